"""What keeps leases, step by step; what comes of it in real threads is in
``tests/laws/test_leases_are_kept.py``.
"""

from __future__ import annotations

import time
from datetime import timedelta
from uuid import uuid4

import pytest
from django.db.models import F
from django.db.models.expressions import RawSQL

from django_idempotency import engine
from django_idempotency.engine import leases
from django_idempotency.engine.background import Worker, background
from django_idempotency.engine.leases import LeaseKeeper, Suspect, Watch
from django_idempotency.models import IdempotencyRecord
from django_idempotency.stores import store_for
from django_idempotency.stores.database import DatabaseStore, ahead
from django_idempotency.values.exceptions import StoreUnavailable
from django_idempotency.values.outcomes import Keep, Operation, StoredResponse
from django_idempotency.values.policy import Lease, Policy
from tests.support.maintained import updates_refused
from tests.support.threads import in_threads

LEASE = DatabaseStore(Policy(mode=Lease(seconds=500)), "default")
SHORT = DatabaseStore(Policy(mode=Lease(seconds=3)), "default")


def claimed(key="k"):
    return engine.claim(Operation("s", key, b"f" * 32), LEASE.policy)


class Clock:
    """A monotonic clock that stands still until it is put on."""

    def __init__(self):
        self.now = time.monotonic()

    def monotonic(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(leases, "time", clock)
    return clock


@pytest.fixture
def keeper(transactional_db, monkeypatch, clock):
    """A keeper that works when it is told, and waits for a slow store."""
    monkeypatch.setattr(Worker, "wake", lambda self: None)
    monkeypatch.setattr(leases, "LEAST_PATIENCE", 60)
    return LeaseKeeper("leases")


def beat(keeper):
    """In a thread of its own: it gets a connection of its own there."""
    keeper._renewed = -1e9
    in_threads(1, lambda _: keeper.work())


def left(key="k"):
    record = IdempotencyRecord.objects.annotate(
        left=F("locked_until") - F("locked_at")
    ).get(key=key)
    return record.left


def shorten(key="k"):
    IdempotencyRecord.objects.filter(key=key).update(locked_until=ahead(5))


def test_a_lease_is_renewed_until_it_is_dropped(keeper):
    claim = claimed()
    keeper.add(claim, LEASE)
    shorten()
    beat(keeper)
    assert left() > timedelta(seconds=490)
    keeper.drop(claim)
    shorten()
    beat(keeper)
    assert left() < timedelta(seconds=100)


def test_another_owners_claim_is_dropped_and_not_renewed(keeper, caplog):
    claim = claimed()
    keeper.add(claim, LEASE)
    IdempotencyRecord.objects.update(token=uuid4())
    shorten()
    beat(keeper)
    assert left() < timedelta(seconds=100)
    assert keeper.due() is None
    assert [record.event for record in caplog.records] == ["lease_lost"]


def test_the_lease_of_an_unconfirmed_verdict_outlives_a_failover(
    keeper, monkeypatch, caplog
):
    """The store wrote the verdict and could not confirm it; then it comes back with the
    record as it was before.
    """
    kind, before = type(store_for(LEASE.policy)), {}
    complete = kind.complete

    def complete_unconfirmed(store, claim, response, *, failure=False):
        before.update(IdempotencyRecord.objects.values().get())
        assert complete(store, claim, response, failure=failure)
        raise StoreUnavailable("0 of 1 acknowledgements")

    monkeypatch.setattr(leases, "keeper_of", lambda store: keeper)
    monkeypatch.setattr(kind, "complete", complete_unconfirmed)
    with engine.execution(claimed(), LEASE.policy) as execution:
        execution.verdict = Keep(StoredResponse(201, (), b"paid"))
    beat(keeper)
    IdempotencyRecord.objects.update(**before)
    shorten()
    beat(keeper)
    assert left() > timedelta(seconds=490)
    assert [record.event for record in caplog.records] == ["store_failed"]
    monkeypatch.setattr(kind, "complete", complete)
    monkeypatch.setattr(
        background, "stopping", True
    )  # it does what is left, due or not
    in_threads(1, lambda _: background.work())
    assert (IdempotencyRecord.objects.get().status, keeper.due()) == ("completed", None)


def failing(monkeypatch, name):
    def fail(*_arguments, **_named):
        raise StoreUnavailable("away")

    monkeypatch.setattr(DatabaseStore, name, fail)


def test_after_a_heartbeat_that_failed_the_next_comes_within_a_second(
    keeper, monkeypatch
):
    keeper.add(claimed(), LEASE)
    assert keeper.due() > time.monotonic() + 100
    with monkeypatch.context() as patch:
        failing(patch, "renew")
        beat(keeper)
    assert keeper.due() < time.monotonic() + 1.1
    beat(keeper)
    assert keeper.due() > time.monotonic() + 100


def test_failed_heartbeats_come_at_different_times():
    assert len({leases._retry(20) for _ in range(20)}) > 10


def suspected(keeper, *, lapsed, store=SHORT):
    claim = claimed()
    IdempotencyRecord.objects.update(
        locked_at=ahead(-100), locked_until=ahead(-1 if lapsed else 1000)
    )
    keeper.suspect(
        Suspect(
            claim.id,
            claim.token,
            store,
            store.policy.mode.seconds,
            timedelta(seconds=1500),
        )
    )
    return claim


@pytest.fixture
def look(clock):
    def look(keeper, *, times=1):
        for _time in range(times):
            in_threads(1, lambda _: keeper.work())
            clock.now += 0.6

    return look


def expired():
    return left() == timedelta(0)


def test_a_lapsed_lease_expires_after_a_watched_heartbeat(keeper, look):
    suspected(keeper, lapsed=True)
    look(keeper)
    assert not expired()
    look(keeper, times=5)
    assert expired()
    assert keeper.due() is None


@pytest.mark.postgresql
def test_an_expired_lease_is_not_written_again(keeper, look):
    """Its row lock would look like that of a live owner."""
    claim = suspected(keeper, lapsed=True)
    look(keeper, times=6)
    place = RawSQL("ctid::text", ())
    before = IdempotencyRecord.objects.values_list(place).get()
    SHORT.expire({claim.token: claim.id})
    assert IdempotencyRecord.objects.values_list(place).get() == before


def test_a_lease_that_has_not_lapsed_does_not_expire(keeper, look):
    suspected(keeper, lapsed=False)
    look(keeper, times=6)
    assert not expired()
    assert keeper.due() is not None


def release(claim):
    IdempotencyRecord.objects.filter(token=claim.token).delete()


@pytest.mark.parametrize(
    "end", [lambda claim: LEASE.renew([claim]), release], ids=["renewed", "released"]
)
def test_a_lease_that_is_renewed_or_dropped_is_no_longer_watched(keeper, look, end):
    claim = suspected(keeper, lapsed=True)
    look(keeper)
    end(claim)
    look(keeper)
    assert keeper.due() is None
    assert not IdempotencyRecord.objects.filter(locked_until=F("locked_at")).exists(), (
        "it did not expire"
    )


def test_a_gap_begins_the_watch_anew(keeper, look, monkeypatch):
    suspected(keeper, lapsed=True)
    look(keeper, times=3)
    with monkeypatch.context() as patch:
        failing(patch, "leases_left")
        look(keeper)
    look(keeper, times=3)
    assert not expired()


@pytest.mark.postgresql
def test_an_owner_whose_renewals_are_refused_has_time_once_they_are_not(keeper, look):
    """As in a database that is read-only: nobody can renew there."""
    suspected(keeper, lapsed=True)
    with updates_refused():
        look(keeper, times=4)
    look(keeper, times=4)
    assert not expired()
    look(keeper, times=2)
    assert expired()


def test_observations_that_are_too_far_apart_are_a_gap():
    watch = Watch()
    for now in (0, 1, 2, 3):
        watch.observe(now, gap=1.5)
    assert watch.seconds == 3
    watch.observe(5, gap=1.5)
    assert watch.seconds == 0
    watch.observe(6, gap=1.5)
    watch.interrupt()
    assert watch.seconds == 0
