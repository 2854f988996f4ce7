"""Reaping: what it takes, what it passes over, and what a retry meets meanwhile."""

from __future__ import annotations

import logging
from datetime import timedelta

import pytest
from django.db import DatabaseError, connection

from django_idempotency import engine, signals
from django_idempotency.maintenance import reap, reaper
from django_idempotency.models import IdempotencyRecord, Status
from django_idempotency.stores import store_for
from django_idempotency.values.outcomes import Keep, StoredResponse
from django_idempotency.values.policy import Policy
from tests.support.callers import (
    claim,
    effects,
    entry_point,
    paying,
    record,
    row,
    shift,
)
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
    updates_refused,
)
from tests.support.sql import run_sql
from tests.support.threads import just_before

pytestmark = pytest.mark.usefixtures("payer")


@pytest.mark.parametrize("mode", ["atomic", "lease"])
def test_a_key_whose_lease_ran_out_is_free_to_retry(mode):
    dead(mode=mode)
    reaped = reap()
    assert (reaped.done["failed"], reaped.done["on_hold"], reaped.finished) == (
        1,
        0,
        True,
    )
    found = row()
    assert (
        found["status"],
        found["on_hold"],
        found["token"],
        found["locked_until"],
    ) == ("failed", False, None, None)
    assert entry_point(paying, mode=mode)().status_code == 201
    assert record().attempts == 2


def test_a_key_that_was_accepted_but_never_begun_is_reaped():
    dead(mode="lease")
    IdempotencyRecord.objects.update(status=Status.STARTED)
    assert reap().done["failed"] == 1


def test_a_key_with_on_crash_hold_is_put_on_hold():
    dead(**HOLD)
    assert (reap().done["failed"], record().on_hold, record().reason) == (
        0,
        True,
        engine.decisions.LEASE_LAPSED,
    )
    assert entry_point(paying, **HOLD)().status_code == 409
    assert effects() == 0


@pytest.mark.parametrize("policy", [{"mode": "lease"}, HOLD], ids=["retry", "hold"])
def test_a_reaped_key_is_kept_for_its_whole_retention(policy):
    """Its heartbeat kept it alive beyond its retention; a key on hold that were expired
    now would simply run again.
    """
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
    """Else the owner would go on, believing that its lease is good, while a retry
    runs.
    """
    policy = Policy(mode="lease")
    with renewed_before_the_update(dead(mode="lease"), policy) as renewals:
        assert reap().done["failed"] == 1
    assert renewals[0].result() == set()


@pytest.mark.not_on_citus
@postgresql
def test_where_leases_can_not_be_renewed_none_is_taken_from_its_owner(monkeypatch):
    """The database was read-only for as long as the leases were watched."""
    ownerless = reaper._is_ownerless

    def after_the_watch(seconds):
        run_sql(f"DROP TRIGGER refuse ON {TABLE}")
        return ownerless(seconds)

    dead(mode="lease")
    # a watch shorter than the query for its length is still a watch
    shift(locked_at=-HOUR - 0.001, locked_until=-HOUR)
    monkeypatch.setattr(reaper, "_is_ownerless", after_the_watch)
    with updates_refused(), pytest.raises(DatabaseError, match="no updates here"):
        reap()
    assert record().status == Status.PROCESSING


def test_a_watch_cut_short_by_its_deadline_does_not_take_a_lease(monkeypatch):
    dead(mode="lease")
    shift(locked_at=-2 * HOUR)
    dead("atomic")
    with monkeypatch.context() as patch:
        # a busy machine may stall for as long as the watch of other tests lasts
        patch.setattr(reaper, "LONGEST_WATCH", HOUR)
        assert (reap(max_seconds=0).done["failed"], keys(status="failed")) == (
            1,
            {"atomic"},
        )
    assert reap().done["failed"] == 1


@row_locks
def test_a_lease_renewed_just_before_the_row_is_locked_is_left_alone(other_thread):
    policy = Policy(mode="lease")
    claimed = dead(mode="lease")
    with just_before(LOCKING, lambda: other_thread(store_for(policy).renew, [claimed])):
        assert reap().done["failed"] == 0
    assert record().token == claimed.token


@pytest.mark.parametrize(
    ("path", "route"), [("/orders/", "orders/"), ("/no/longer/there/", None)]
)
def test_the_log_names_the_route_of_a_reaped_key(path, route, caplog):
    caplog.set_level(logging.INFO, "django_idempotency")
    dead(mode="lease")
    IdempotencyRecord.objects.update(path=path)
    reap()
    (said,) = caplog.records
    assert (said.event, said.view) == ("key_reaped", route)
    assert said.getMessage().endswith(f" [{route}]" if route else "put it on hold.")


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
    expected = {
        (record(key).pk, key, key == "hold", False) for key in ("retry", "hold")
    }
    assert (set(sent), len(sent)) == (expected, 2)
