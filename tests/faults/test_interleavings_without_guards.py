"""Every order of statements with one guard taken out: the explorer finds a
violation.
"""

from __future__ import annotations

import pytest

from django_idempotency import engine, maintenance
from django_idempotency.engine.decisions import ASK_AGAIN
from django_idempotency.maintenance import sweep
from django_idempotency.models import IdempotencyRecord, RecordQuerySet
from django_idempotency.stores import database, postgresql
from django_idempotency.values.exceptions import StoreConflict
from tests.faults.schedule import Violation
from tests.faults.world import hours_pass, in_all_modes, retention_ends

pytestmark = [pytest.mark.postgresql, pytest.mark.usefixtures("transactional_db")]


def without(monkeypatch, name, part, instead=""):
    """The statement ``name`` less a part of it."""
    statement = getattr(postgresql, name)
    assert part in statement
    monkeypatch.setattr(postgresql, name, statement.replace(part, instead))


@pytest.fixture
def unlocked(monkeypatch):
    """Maintenance locks no rows."""
    monkeypatch.setattr(sweep, "locked", lambda rows: rows)


UNFENCED = ("AND token = %s", "AND %s::uuid IS NOT NULL")


def test_without_the_fence_a_zombie_completes_anothers_claim(world, monkeypatch):
    w = world("lease")
    w.runs_again = True
    without(monkeypatch, "COMPLETE", *UNFENCED)
    with pytest.raises(Violation, match="L2"):
        w.explore({**dict.fromkeys("AB", w.caller()), "time": hours_pass})


def test_without_the_fence_an_atomic_owner_that_was_overtaken_runs(world, monkeypatch):
    w = world()
    without(monkeypatch, "LOCK", *UNFENCED)
    without(monkeypatch, "COMPLETE", *UNFENCED)
    with pytest.raises(Violation, match="L1"):
        w.explore(dict.fromkeys("AB", w.caller()))


def test_without_its_row_lock_a_live_owner_is_overtaken(world, monkeypatch):
    w = world()
    without(monkeypatch, "LOCK", "FOR NO KEY UPDATE")
    with pytest.raises(Violation, match="L6"):
        w.explore(dict.fromkeys("AB", w.caller()))


@in_all_modes
def test_without_a_lock_two_take_what_one_may(world, monkeypatch, mode):
    w = world(mode)
    monkeypatch.setattr(database, "_for_update", lambda rows, **how: rows)
    with pytest.raises(Violation, match=r"L[123]"):
        w.explore(
            {**dict.fromkeys("AB", w.caller()), "expiry": retention_ends},
            given=w.earlier_life,
        )


def test_without_a_lock_the_reaper_waits_for_a_live_owner(world, unlocked):
    w = world()
    # or the reaper takes from it what it has answered meanwhile
    with pytest.raises(AssertionError, match=r"L11|L3"):
        w.explore({"A": w.caller(), "time": hours_pass, "reaper": maintenance.reap})


def test_without_a_lock_two_reapers_reap_the_same(world, unlocked):
    w = world()
    with pytest.raises(Violation, match="L11: maintenance told of 2 rows, and wrote 1"):
        w.explore(
            {"reaper": maintenance.reap, "reaper2": maintenance.reap},
            given=w.dead_holder,
        )


def test_without_a_lock_the_reaper_takes_a_lease_that_is_renewed(world, unlocked):
    w = world("lease")
    with pytest.raises(Violation, match="L6: reaper took"):
        w.explore({"beat": w.beat, "reaper": maintenance.reap}, given=w.stopped_holder)


def test_without_a_second_lookup_a_lease_that_is_renewed_is_taken_over(
    world, monkeypatch
):
    def take_over(claimant):
        try:
            with claimant.store.try_lock(claimant.operation.id) as record:
                return claimant.store.reassign(
                    record, claimant.operation, claimant.token
                )
        except StoreConflict:
            return ASK_AGAIN

    w = world("lease")
    monkeypatch.setattr(engine.claims.Claimant, "_take_over", take_over)
    with pytest.raises(Violation, match="L6: A took"):
        w.explore({"A": w.caller(), "beat": w.beat}, given=w.stopped_holder)


def test_without_the_fence_a_zombie_renews_anothers_lease(world, monkeypatch):
    def renew(store, claims):
        ids = [claim.id for claim in claims]
        IdempotencyRecord.objects.filter(pk__in=ids).update(
            locked_until=database.ahead(store.policy.mode.seconds)
        )

    w = world("lease")
    w.runs_again = True
    monkeypatch.setattr(database.DatabaseStore, "renew", renew)
    with pytest.raises(Violation, match="L5"):
        w.explore(
            {"A": w.caller(), "beat": w.beat, "time": hours_pass},
            given=w.stopped_holder,
        )


@in_all_modes
def test_without_the_end_of_retention_cleanup_allows_a_duplicate(
    world, monkeypatch, mode
):
    w = world(mode)
    monkeypatch.setattr(
        RecordQuerySet, "purgeable", lambda rows: rows.filter(token=None)
    )
    works = {"A": w.caller(), "cleanup": maintenance.cleanup, "expiry": retention_ends}
    with pytest.raises(Violation, match=r"L[123]"):
        w.explore(works, given=w.earlier_life)


def test_without_a_lock_cleaning_up_waits_for_a_live_owner(world, unlocked):
    w = world()
    with pytest.raises(AssertionError, match="L11: maintenance waited"):
        w.explore(
            {"A": w.caller(), "cleanup": maintenance.cleanup, "expiry": retention_ends},
            given=w.earlier_life,
        )


def test_without_the_grace_a_live_claim_is_overtaken(world):
    w = world()
    found = w.explore(dict.fromkeys("AB", w.caller()))
    assert any(last[1] in ("A2", "B2") for _told, last in found.outcomes)
