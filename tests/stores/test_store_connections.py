"""The database, the clock and the connections that a store uses, those of background
threads among them.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta

import pytest
from django.db import connection, connections, transaction
from django.db.backends.postgresql.psycopg_any import IsolationLevel
from django.utils import timezone

from django_idempotency import engine
from django_idempotency.maintenance import cleanup, reap
from django_idempotency.maintenance.stats import stats
from django_idempotency.models import IdempotencyRecord
from django_idempotency.stores import store_for
from django_idempotency.stores.own_connections import own_connection
from django_idempotency.values.exceptions import ClaimInsideTransaction
from django_idempotency.values.outcomes import Keep, Replay
from django_idempotency.values.policy import Policy
from testproject.models import LedgerEntry
from tests.stores.contract import ATOMIC, MODES, RESPONSE, claimed, operation
from tests.support.callers import pay
from tests.support.pausing_process import pause, pausing
from tests.support.sql import run_sql, value_of
from tests.support.waiting import eventually, someone_waits_for_a_lock

pytestmark = pytest.mark.usefixtures("transactional_db")


ZONES = {
    "postgresql": "SET TIME ZONE 'Asia/Tokyo'",
    "mysql": "SET time_zone = '+09:00'",
    "sqlite": "SELECT 1",
}


def test_times_are_the_databases_own_in_whatever_time_zone_it_is(monkeypatch):
    began = _database_time()
    monkeypatch.setattr(
        timezone, "now", lambda: pytest.fail("the application's clock was asked")
    )
    connection.cursor().execute(ZONES[connection.vendor])
    claim = claimed()
    connection.close()
    record = store_for(ATOMIC).read(claim.id)
    for told in (record.created_at, record.locked_at, record.now):
        assert timedelta(seconds=-1) < told - began < timedelta(minutes=9)


def _database_time() -> datetime:
    """In UTC, by other means than the package's."""
    seconds = {
        "postgresql": "extract(epoch FROM now())",
        "mysql": "UNIX_TIMESTAMP(NOW(6))",
        "sqlite": "unixepoch()",
    }
    now = float(value_of(f"SELECT {seconds[connection.vendor]}"))
    return datetime.fromtimestamp(now, tz=timezone.get_fixed_timezone(0))


@MODES
def test_with_autocommit_off_nothing_is_claimed(policy):
    transaction.set_autocommit(False)
    try:
        with pytest.raises(ClaimInsideTransaction):
            engine.claim(operation(), policy)
    finally:
        transaction.rollback()
        transaction.set_autocommit(True)
    assert store_for(policy).read(operation().id) is None


class ReadsFromAReplica:
    """``default`` stands for the replica, and leads nowhere."""

    def db_for_read(self, model, **hints):
        return "default"

    def db_for_write(self, model, **hints):
        return "elsewhere"


@pytest.mark.not_on_citus
@pytest.mark.row_locks
@pytest.mark.parametrize("mode", ["atomic", "lease"])
def test_records_are_read_where_they_are_written(other_alias, settings, mode):
    settings.DATABASE_ROUTERS = [ReadsFromAReplica()]
    policy = Policy(mode=mode)
    with engine.execution(engine.claim(operation(), policy), policy) as run:
        run.verdict = Keep(RESPONSE)
    assert engine.claim(operation(), policy) == Replay(RESPONSE)
    assert (reap().done["failed"], cleanup().rows, stats()["pending"]) == (0, 0, 0)
    IdempotencyRecord.objects.using(other_alias).all().delete()


SCHEMA = 'Tenant "one'
QUOTED = SCHEMA.replace('"', '""')


def on_its_own(work, **options):
    try:
        with own_connection("default", seconds=30, **options):
            return work()
    finally:
        connections.close_all()


@pytest.mark.postgresql
@pytest.mark.usefixtures("payer")
@pytest.mark.parametrize(
    "options",
    [
        {"options": "-c lock_timeout=20ms"},
        {"isolation_level": IsolationLevel.REPEATABLE_READ},
    ],
    ids=["lock timeout", "isolation level"],
)
def test_a_write_waits_for_another_ones_row_whatever_the_project_has_set(
    monkeypatch, options, other_thread
):
    pay()
    monkeypatch.setitem(
        connection.settings_dict,
        "OPTIONS",
        connection.settings_dict["OPTIONS"] | options,
    )
    with ThreadPoolExecutor(1) as pool:
        with transaction.atomic():
            LedgerEntry.objects.update(amount=6)
            write = pool.submit(
                on_its_own,
                lambda: LedgerEntry.objects.filter(amount__gt=0).update(amount=7),
            )
            eventually(lambda: write.done() or other_thread(someone_waits_for_a_lock))
            time.sleep(0.1)
        assert write.result(60) == 1
    assert LedgerEntry.objects.get().amount == 7


def hold_a_row():
    with own_connection("default", seconds=1), transaction.atomic():
        list(LedgerEntry.objects.select_for_update())
        pause("locked")


@pytest.mark.postgresql
@pytest.mark.usefixtures("payer")
def test_a_process_that_is_frozen_between_two_statements_loses_its_lock():
    pay()
    with pausing(hold_a_row) as frozen:
        assert frozen.says() == "locked"
        frozen.stop()
        with transaction.atomic():
            assert LedgerEntry.objects.update(amount=7) == 1


@pytest.mark.postgresql
@pytest.mark.usefixtures("payer")
def test_a_schema_may_have_any_name(other_thread):
    run_sql(f'CREATE SCHEMA "{QUOTED}"')
    try:
        found = other_thread(
            on_its_own,
            lambda: run_sql("SELECT current_schemas(false)"),
            schemas=[SCHEMA],
        )
    finally:
        run_sql(f'DROP SCHEMA "{QUOTED}"')
    assert found == [([SCHEMA, "public"],)]
