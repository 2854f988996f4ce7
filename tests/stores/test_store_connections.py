"""The database and the clock that a store uses."""

from __future__ import annotations

from datetime import datetime, timedelta

import pytest
from django.db import (
    connection,
    transaction,
)
from django.utils import timezone

from django_idempotency import engine
from django_idempotency.exceptions import (
    ClaimInsideTransaction,
)
from django_idempotency.maintenance import cleanup, reap
from django_idempotency.maintenance.stats import stats
from django_idempotency.models import IdempotencyRecord
from django_idempotency.policy import Policy
from django_idempotency.stores import store_for
from django_idempotency.values.outcomes import Keep, Replay
from tests.stores.contract import ATOMIC, MODES, RESPONSE, claimed, operation

pytestmark = pytest.mark.usefixtures("transactional_db")


ZONES = {"postgresql": "SET TIME ZONE 'Asia/Tokyo'", "mysql": "SET time_zone = '+09:00'", "sqlite": "SELECT 1"}


def test_times_are_the_databases_own_in_whatever_time_zone_it_is(monkeypatch):
    began = _database_time()
    monkeypatch.setattr(timezone, "now", lambda: pytest.fail("the application's clock was asked"))
    connection.cursor().execute(ZONES[connection.vendor])
    claim = claimed()
    connection.close()
    record = store_for(ATOMIC).read(claim.id)
    for told in (record.created_at, record.locked_at, record.now):
        assert timedelta(seconds=-1) < told - began < timedelta(seconds=9)


def _database_time() -> datetime:
    """In UTC, by other means than the package's."""
    seconds = {"postgresql": "extract(epoch FROM now())", "mysql": "UNIX_TIMESTAMP(NOW(6))", "sqlite": "unixepoch()"}
    with connection.cursor() as cursor:
        cursor.execute(f"SELECT {seconds[connection.vendor]}")
        return datetime.fromtimestamp(float(cursor.fetchone()[0]), tz=timezone.get_fixed_timezone(0))


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


@pytest.mark.row_locks
@pytest.mark.parametrize("mode", ["atomic", "lease"])
def test_records_are_read_where_they_are_written(other_alias, settings, mode):
    settings.DATABASE_ROUTERS = [ReadsFromAReplica()]
    policy = Policy(mode=mode)
    with engine.execution(engine.claim(operation(), policy), policy) as run:
        run.verdict = Keep(RESPONSE)
    assert engine.claim(operation(), policy) == Replay(RESPONSE)
    assert (reap().done["failed"], cleanup().rows, stats().pending) == (0, 0, 0)
    IdempotencyRecord.objects.using(other_alias).all().delete()
