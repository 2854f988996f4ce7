"""What every pass of maintenance keeps: it is bounded, waits for nobody, and isolates
what can't be written.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
from django.db import OperationalError, ProgrammingError, connection, transaction
from django.test import override_settings

from django_idempotency import engine, signals
from django_idempotency.maintenance import cleanup, drop_bodies, erase, reap, reencrypt
from django_idempotency.models import IdempotencyRecord
from django_idempotency.stores.database import ahead
from django_idempotency.values.outcomes import Keep, StoredResponse
from django_idempotency.values.policy import Body, Policy
from tests.support.aliases import role
from tests.support.callers import SCOPE, heard
from tests.support.maintained import (
    DAY,
    HOUR,
    TABLE,
    dead,
    done,
    fill,
    postgresql,
    row_locks,
    sums,
)
from tests.support.sql import run_sql
from tests.support.threads import wait_little_for_locks

pytestmark = pytest.mark.usefixtures("payer", "keys")
OLD, NEW = (base64.b64encode(word * 8).decode() for word in (b"old ", b"new "))


@pytest.fixture
def keys(settings):
    settings.IDEMPOTENCY = {"ENCRYPTION_KEYS": [NEW, OLD]}


def under_the_old_key(key):
    with override_settings(IDEMPOTENCY={"ENCRYPTION_KEYS": [OLD]}):
        done(key, expires_at=HOUR, body=Body(encrypt="require"))


@dataclass
class Pass:
    """``make``: a record for it. ``walks``: it goes through the table by ids, and tells
    how many it passed over.
    """

    work: Any
    make: Callable[[str], object]
    walks: bool = False


PASSES = {
    "reap": Pass(reap, dead),
    "cleanup": Pass(cleanup, done),
    "drop_bodies": Pass(drop_bodies, partial(done, purge_at=HOUR)),
    "erase": Pass(partial(erase, SCOPE), done, walks=True),
    "erase bodies": Pass(partial(erase, SCOPE, bodies=True), done, walks=True),
    "reencrypt": Pass(reencrypt, under_the_old_key, walks=True),
}
CRYPTOGRAPHY = {"reencrypt": pytest.mark.cryptography}
each_pass = pytest.mark.parametrize(
    "one",
    [
        pytest.param(one, marks=CRYPTOGRAPHY.get(name, ()), id=name)
        for name, one in PASSES.items()
    ],
)


@each_pass
def test_a_pass_ends_in_time_and_the_next_goes_on(one):
    for key in "abcde":
        one.make(key)
    first = one.work(batch=2, pause=0, max_seconds=0)
    assert (first.rows, first.finished) == (2, False)
    rest = one.work(batch=2, pause=0, **({"after": first.after} if one.walks else {}))
    assert (rest.rows, rest.finished) == (3, True)


@each_pass
def test_a_dry_run_counts_and_changes_nothing(one):
    for key in "abc":
        one.make(key)
    before = list(IdempotencyRecord.objects.order_by("pk").values())
    assert one.work(dry_run=True).rows == 3
    assert list(IdempotencyRecord.objects.order_by("pk").values()) == before


@pytest.mark.not_on_citus
@row_locks
@each_pass
def test_a_record_that_somebody_has_locked_is_passed_over(one, other_thread):
    for key in "abc":
        one.make(key)
    with transaction.atomic():
        IdempotencyRecord.objects.select_for_update().get(key="a")
        other_thread(wait_little_for_locks)
        first = other_thread(one.work)
    assert (first.rows, first.left.get("busy", 0), first.complete) == (
        2,
        int(one.walks),
        not one.walks,
    )
    assert one.work().rows >= 1
    assert one.work(dry_run=True).complete


REFUSING = {  # a database that won't let these rows change
    "postgresql": [
        (
            "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
            " RAISE 'refused'; END $$"
        ),
        (
            f"CREATE TRIGGER refuse BEFORE UPDATE OR DELETE ON {TABLE} FOR EACH ROW"
            " WHEN (old.key LIKE 'bad%') EXECUTE FUNCTION refuse()"
        ),
    ],
    "mysql": [
        f"CREATE TRIGGER refuse_{event} BEFORE {event} ON {TABLE} FOR EACH ROW IF"
        " old.`key` LIKE 'bad%' THEN SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT ="
        " 'refused'; END IF"
        for event in ("UPDATE", "DELETE")
    ],
    "sqlite": [
        f"CREATE TRIGGER refuse_{event} BEFORE {event} ON {TABLE} WHEN old.key LIKE"
        " 'bad%' BEGIN SELECT RAISE(ABORT, 'refused'); END"
        for event in ("UPDATE", "DELETE")
    ],
}


@contextmanager
def bad_rows_refused():
    for statement in REFUSING[connection.vendor]:
        run_sql(statement)
    try:
        yield
    finally:
        if connection.vendor == "postgresql":
            run_sql("DROP FUNCTION refuse CASCADE")
        else:
            for event in ("UPDATE", "DELETE"):
                run_sql(f"DROP TRIGGER refuse_{event}")


@pytest.mark.not_on_citus
@each_pass
@pytest.mark.parametrize("batch", [2, 100])
def test_a_record_that_can_not_be_written_does_not_stop_a_pass(one, batch):
    for key in ("a", "bad1", "b", "c", "bad2", "d"):
        one.make(key)
    bad = {
        str(id)
        for id in IdempotencyRecord.objects.filter(key__startswith="bad").values_list(
            "pk", flat=True
        )
    }
    with bad_rows_refused(), heard(signals.key_reaped) as reaped:
        swept = one.work(batch=batch, pause=0)
    assert (swept.rows, swept.bad.keys(), any(swept.left.values())) == (4, bad, False)
    assert all("refused" in error for error in swept.bad.values())
    assert len(reaped) == (4 if one.work is reap else 0)
    assert (swept.finished, swept.complete) == (True, False)
    assert one.work(batch=batch, pause=0).complete


@pytest.mark.not_on_citus
@row_locks
def test_live_owners_before_a_bad_row_do_not_loop(other_thread):
    live = dead("live", since=DAY)
    for key in ("bad", "k"):
        dead(key)
    with bad_rows_refused(), engine.execution(live, Policy()) as run:
        assert other_thread(
            lambda: [swept.done["failed"] for swept in sums(reap, batch=1)]
        ) == [0, 1, 1]
        run.verdict = Keep(StoredResponse(201))


@pytest.mark.not_on_citus
@postgresql
def test_a_lost_connection_is_not_blamed_on_a_row(proxy):
    for key in ("bad", "k1", "k2"):
        dead(key)
    updates = []

    def cut_the_second(execute, sql, *details):
        updates.append(sql.startswith("UPDATE"))
        if sum(updates) == 2:
            proxy.go_away()
        return execute(sql, *details)

    with bad_rows_refused():
        with (
            connection.execute_wrapper(cut_the_second),
            pytest.raises(OperationalError),
        ):
            reap()
        proxy.come_back()
        connection.close()


@pytest.mark.not_on_citus
@postgresql
def test_a_right_that_is_missing_is_an_error_and_not_a_bad_record():
    done("a")
    with role() as name, connection.cursor() as cursor:
        cursor.execute(
            f"GRANT SELECT, UPDATE ON ALL TABLES IN SCHEMA public TO {name}; SET ROLE"
            f" {name}"
        )
        with pytest.raises(ProgrammingError, match="permission denied"):
            cleanup()


@each_pass
def test_a_batch_of_nothing_and_a_pass_inside_a_transaction_are_refused(one):
    one.make("k")
    with pytest.raises(ValueError, match="at least 1"):
        one.work(batch=0)
    with transaction.atomic(), pytest.raises(RuntimeError, match="durable"):
        one.work()


def with_needless_bodies(count):
    fill(count, purge_at=-HOUR)
    IdempotencyRecord.objects.update(purge_at=ahead(HOUR), response_body=b"body")


@pytest.mark.not_on_citus
@pytest.mark.parametrize(
    ("work", "make"),
    [
        (reap, lambda count: [dead(f"{number}") for number in range(count)]),
        (cleanup, partial(fill, purge_at=-HOUR)),
        (drop_bodies, with_needless_bodies),
        (partial(erase, "s"), partial(fill, purge_at=-HOUR)),
    ],
    ids=["reap", "cleanup", "drop_bodies", "erase"],
)
def test_batches_have_as_many_parameters_as_the_database_takes(work, make, monkeypatch):
    make(70)
    monkeypatch.setattr(connection.features, "max_query_params", 60)
    sent = []

    def count(execute, sql, params, *details):
        sent.append(len(params or ()))
        return execute(sql, params, *details)

    with connection.execute_wrapper(count):
        assert work(batch=1000, pause=0).rows == 70
    # these send no ids
    at_once = connection.vendor == "postgresql" and work in (cleanup, drop_bodies)
    assert max(sent) <= 60
    assert at_once or max(sent) >= 10
