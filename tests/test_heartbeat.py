"""The heartbeat outlives whatever goes wrong in it: the leases of the whole process hang on it."""

from __future__ import annotations

from datetime import timedelta

import pytest

from django_idempotency import engine
from django_idempotency.exceptions import ClaimLost, StoreUnavailable
from django_idempotency.heartbeat import Heartbeat
from django_idempotency.models import IdempotencyRecord
from django_idempotency.outcomes import Operation
from django_idempotency.policy import Policy
from tests.threads import in_threads

LEASE = Policy(mode="lease", lease=500)
UNKNOWN = Policy(mode="lease", using="nowhere")


@pytest.fixture
def claim(transactional_db):
    return engine.claim(Operation("s", "k", b"f" * 32), Policy(mode="lease", lease=20))


@pytest.fixture
def beats(monkeypatch):
    """A heartbeat that beats only when told."""
    monkeypatch.setattr(Heartbeat, "_wake", lambda self: None)
    return Heartbeat()


def beat(beats):
    """In a thread of its own, as it is: it closes stale connections."""
    in_threads(1, lambda _: beats.beat())


def left():
    record = IdempotencyRecord.objects.get()
    return record.locked_until - record.locked_at


def test_a_beat_renews_what_is_kept_and_no_longer_what_is_not(beats, claim):
    with beats.keeping(claim, LEASE):
        assert left() == timedelta(seconds=20)
        beat(beats)
        assert left() > timedelta(seconds=490)
    IdempotencyRecord.objects.update(locked_until=IdempotencyRecord.objects.get().locked_at)
    beat(beats)
    assert left() == timedelta(0)


def test_one_lease_that_cannot_be_renewed_does_not_cost_the_others_theirs(beats, claim):
    beats.count_replay(claim.id, UNKNOWN)
    other = engine.claim(Operation("s", "other", b"f" * 32), LEASE)
    with beats.keeping(other, UNKNOWN), beats.keeping(claim, LEASE):
        beat(beats)
    assert IdempotencyRecord.objects.get(key="k").locked_until > IdempotencyRecord.objects.get(key="other").locked_until


@pytest.mark.parametrize(("error", "tries"), [(ValueError, 3), (StoreUnavailable, 3), (ClaimLost, 1)])
def test_a_late_completion_is_tried_at_every_beat_until_it_succeeds_or_the_claim_is_lost(beats, claim, error, tries):
    tried = []

    def finish():
        tried.append(True)
        if len(tried) < 3:
            raise error

    with beats.keeping(claim, LEASE):
        beats.finish_later(claim, finish)
    for _ in range(5):
        beat(beats)
    assert len(tried) == tries
