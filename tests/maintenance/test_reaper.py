"""Reaping: what it takes, what it passes over, and what a retry meets meanwhile."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.db import DatabaseError, OperationalError, connection, transaction

from django_idempotency import engine, signals
from django_idempotency.maintenance import cleanup, drop_bodies, reap, reaper
from django_idempotency.models import IdempotencyRecord, Status
from django_idempotency.policy import Policy
from django_idempotency.stores import store_for
from django_idempotency.values.outcomes import Keep, StoredResponse
from tests.support.callers import claim, effects, entry_point, heard, paying, record, row, shift
from tests.support.maintained import (
    DAY,
    HOLD,
    HOUR,
    LOCKING,
    TABLE,
    dead,
    done,
    keys,
    postgresql,
    renewed_before_the_update,
    row_locks,
    run_sql,
    updates_refused,
)
from tests.support.threads import just_before

pytestmark = pytest.mark.usefixtures("payer")


@pytest.mark.parametrize("mode", ["atomic", "lease"])
def test_a_key_whose_lease_ran_out_is_free_to_retry(mode):
    dead(mode=mode)
    reaped = reap()
    assert (reaped.done["failed"], reaped.done["on_hold"], reaped.finished) == (1, 0, True)
    found = row()
    assert (found["status"], found["on_hold"], found["token"], found["locked_until"]) == ("failed", False, None, None)
    assert entry_point(paying, mode=mode)().status_code == 201
    assert record().attempts == 2


def test_a_key_that_was_accepted_but_never_begun_is_reaped():
    dead(mode="lease")
    IdempotencyRecord.objects.update(status=Status.STARTED)
    assert reap().done["failed"] == 1


def test_a_key_with_on_crash_hold_is_put_on_hold():
    dead(**HOLD)
    assert (reap().done["failed"], record().on_hold, record().reason) == (0, True, engine.decisions.LEASE_LAPSED)
    assert entry_point(paying, **HOLD)().status_code == 409
    assert effects() == 0


@pytest.mark.parametrize("policy", [{"mode": "lease"}, HOLD], ids=["retry", "hold"])
def test_a_reaped_key_is_kept_for_its_whole_retention(policy):
    """Its heartbeat kept it alive beyond its retention; a key on hold that were expired now would simply run again."""
    dead(**policy, retention=HOUR, audit_retention=DAY)
    shift(locked_at=-10 * HOUR, expires_at=-9 * HOUR, purge_at=-9 * HOUR + DAY - HOUR)
    reap()
    kept = row()
    assert kept["expires_at"] - kept["updated_at"] == timedelta(hours=1)
    assert kept["purge_at"] - kept["updated_at"] == timedelta(days=1)


@pytest.mark.parametrize("mode", ["atomic", "lease"])
def test_a_lease_that_has_not_run_out_is_left_alone(mode):
    claim(policy=Policy(mode=mode))
    before = row()
    assert reap().done["failed"] == 0
    assert row() == before


def test_older_than_leaves_those_alone_that_ran_out_lately():
    dead("lately", since=60)
    dead("long-ago", since=HOUR)
    assert reap(older_than=600).done["failed"] == 1
    assert keys(status="failed") == {"long-ago"}


@row_locks
def test_a_live_owner_in_atomic_mode_is_passed_over_however_old(other_thread):
    claimed = dead(since=DAY)
    with engine.execution(claimed, Policy()) as run:
        assert other_thread(reap).done["failed"] == 0
        run.verdict = Keep(StoredResponse(201))
    assert record().status == "completed"


def test_a_response_that_is_there_is_left_alone():
    done(expires_at=HOUR)
    before = row()
    assert reap().finished
    assert row() == before


@row_locks
def test_a_lease_can_not_be_renewed_between_the_row_lock_and_the_reaping():
    """Else the owner would go on, believing that its lease is good, while a retry runs."""
    policy = Policy(mode="lease")
    with renewed_before_the_update(dead(mode="lease"), policy) as renewals:
        assert reap().done["failed"] == 1
    assert renewals[0].result() == set()


@postgresql
def test_where_leases_can_not_be_renewed_none_is_taken_from_its_owner(monkeypatch):
    """The database was read-only for as long as the leases were watched."""
    ownerless = reaper._is_ownerless

    def after_the_watch(seconds):
        run_sql(f"DROP TRIGGER refuse ON {TABLE}")
        return ownerless(seconds)

    dead(mode="lease")
    monkeypatch.setattr(reaper, "_is_ownerless", after_the_watch)
    with updates_refused(), pytest.raises(DatabaseError, match="no updates here"):
        reap()
    assert record().status == Status.PROCESSING


@row_locks
def test_a_lease_renewed_just_before_the_row_is_locked_is_left_alone(other_thread):
    policy = Policy(mode="lease")
    claimed = dead(mode="lease")
    with just_before(LOCKING, lambda: other_thread(store_for(policy).renew, [claimed])):
        assert reap().done["failed"] == 0
    assert record().token == claimed.token


@row_locks
def test_an_owner_that_comes_back_after_the_reaper_changes_nothing():
    policy = Policy(mode="lease")
    claimed = dead(mode="lease")
    reap()
    before = row()
    store = store_for(policy)
    assert not store.complete(claimed, StoredResponse(201))
    assert not store.release(claimed)
    assert not store.renew([claimed])
    assert row() == before


def test_every_reaped_key_sends_one_signal_after_the_commit():
    dead("retry", mode="lease")
    dead("hold", **HOLD)
    sent = []

    def hear(operation, on_hold, **_named):
        sent.append((operation.id, operation.key, on_hold, connection.in_atomic_block))

    signals.key_reaped.connect(hear)
    try:
        reap()
        reap()
    finally:
        signals.key_reaped.disconnect(hear)
    expected = {(record(key).pk, key, key == "hold", False) for key in ("retry", "hold")}
    assert (set(sent), len(sent)) == (expected, 2)


def test_a_pass_goes_batch_by_batch_and_ends_in_time():
    for number in range(5):
        dead(f"k{number}", since=HOUR + number)
    assert [step.done["failed"] for step in reap.in_steps(batch=2)] == [2, 2, 1]
    for number in range(5):
        dead(f"m{number}")
    ended = reap(batch=2, max_seconds=0)
    assert (ended.done["failed"], ended.finished) == (2, False)


BAD = "bad"
REFUSE = {  # a database that won't let this one row go
    "postgresql": (
        f"CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'refused'; END $$;"
        f"CREATE TRIGGER refuse BEFORE UPDATE ON {TABLE} FOR EACH ROW"
        f" WHEN (old.key LIKE '{BAD}%' AND new.status = 'failed') EXECUTE FUNCTION refuse()",
        f"DROP TRIGGER refuse ON {TABLE}; DROP FUNCTION refuse",
    ),
    "mysql": (
        f"CREATE TRIGGER refuse BEFORE UPDATE ON {TABLE} FOR EACH ROW"
        f" IF old.`key` LIKE '{BAD}%' AND new.status = 'failed' THEN"
        " SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'refused'; END IF",
        "DROP TRIGGER refuse",
    ),
    "sqlite": (
        f"CREATE TRIGGER refuse BEFORE UPDATE ON {TABLE}"
        f" WHEN old.key LIKE '{BAD}%' AND new.status = 'failed' BEGIN SELECT RAISE(ABORT, 'refused'); END",
        "DROP TRIGGER refuse",
    ),
}


@pytest.fixture
def bad_rows(payer):
    refuse, allow = REFUSE[connection.vendor]
    run_sql(refuse)
    yield
    run_sql(allow)


@pytest.mark.usefixtures("bad_rows")
def test_a_bad_row_is_reported_and_does_not_stop_the_pass():
    for number in range(3):
        dead(f"{BAD}{number}", since=2 * HOUR)
    for number in range(5):
        dead(f"k{number}")
    with heard(signals.key_reaped) as sent:
        reaped = reap(batch=2)
    assert reaped.done["failed"] == len(sent) == 5
    assert reaped.finished
    assert set(reaped.bad) == {
        str(id) for id in IdempotencyRecord.objects.filter(status="processing").values_list("pk", flat=True)
    }
    assert all("refused" in error for error in reaped.bad.values())
    assert keys(status="processing") == {f"{BAD}{number}" for number in range(3)}


@row_locks
@pytest.mark.usefixtures("bad_rows")
def test_live_owners_before_a_bad_row_do_not_loop(other_thread):
    live = dead("live", since=DAY)
    dead(BAD)
    dead("k")
    with engine.execution(live, Policy()) as run:
        assert other_thread(lambda: [step.done["failed"] for step in reap.in_steps(batch=1)]) == [0, 1, 0]
        run.verdict = Keep(StoredResponse(201))


@postgresql
@pytest.mark.usefixtures("bad_rows")
def test_a_lost_connection_makes_no_bad_row(proxy):
    for key in (BAD, "k1", "k2"):
        dead(key)
    updates = []

    def cut_the_second(execute, sql, *details):
        updates.append(sql.startswith("UPDATE"))
        if sum(updates) == 2:
            proxy.go_away()
        return execute(sql, *details)

    with connection.execute_wrapper(cut_the_second), pytest.raises(OperationalError):
        reap()
    proxy.come_back()


def test_maintenance_inside_a_transaction_is_refused():
    for work in (reap, cleanup, drop_bodies):
        with transaction.atomic(), pytest.raises(RuntimeError, match="durable"):
            work()
