"""The engine's outcomes on the database's store, beyond those that the contract of all stores has."""

from __future__ import annotations

import time
from collections import Counter

import pytest
from django.contrib.auth import get_user_model

from django_idempotency import engine
from django_idempotency.exceptions import ClaimLost, DigestCollision
from django_idempotency.models import IdempotencyRecord
from django_idempotency.policy import Atomic, Policy
from django_idempotency.stores import store_for
from django_idempotency.values.outcomes import Claimed, InFlight, Keep, Replay
from testproject.models import LedgerEntry
from tests.stores.contract import (
    ATOMIC,
    LOCKS,
    MANY,
    MODES,
    RESPONSE,
    claimed,
    commit,
    lapse,
    lock_in,
    operation,
)
from tests.support.callers import mode_of
from tests.support.threads import in_threads

pytestmark = pytest.mark.usefixtures("transactional_db")


@pytest.fixture
def user():
    return get_user_model().objects.create_user("carol")


def perform(user, policy: Policy, *, key: str = "k"):
    """Claim, and run if claimed: one ledger entry."""
    outcome = engine.claim(operation(key), policy)
    if not isinstance(outcome, Claimed):
        return outcome
    try:
        with engine.execution(outcome, policy) as run:
            LedgerEntry.objects.create(user=user, amount=1, reference=key)
            run.verdict = Keep(RESPONSE)
    except ClaimLost:
        return engine.duplicate(outcome.operation, policy)
    return outcome


def kinds(outcomes) -> Counter[str]:
    return Counter(type(outcome).__name__ for outcome in outcomes)


@MODES
@LOCKS
def test_of_concurrent_callers_one_runs_even_without_any_grace(user, policy, lock):
    for key in "abcde":
        told = in_threads(MANY, lambda _index, key=key: perform(user, policy, key=key))
        assert kinds(told).keys() <= {"Claimed", "InFlight", "Replay"}
    assert LedgerEntry.objects.count() == 5


@pytest.mark.usefixtures("impatient")
@LOCKS
def test_a_live_owner_is_never_taken_over_however_slow(other_thread, lock):
    claim = claimed(ATOMIC)
    lapse(claim)
    block = lock_in(other_thread, claim)
    assert engine.claim(operation(), ATOMIC) == InFlight(retry_after=1)
    assert other_thread(store_for(ATOMIC).complete, claim, RESPONSE)
    commit(other_thread, block)
    assert engine.claim(operation(), ATOMIC) == Replay(RESPONSE)


def test_a_claim_without_its_row_lock_yet_is_let_alone_for_the_grace():
    claimed()
    began = time.monotonic()
    outcome = engine.claim(operation(), Policy(mode=Atomic(takeover_grace=0.3)))
    assert outcome.taken_over
    assert time.monotonic() - began > 0.2


def test_within_the_grace_a_claim_is_asked_again_every_10_ms(monkeypatch):
    pauses, claim = [], claimed()

    def complete_at_the_third(seconds):
        pauses.append(seconds)
        if len(pauses) == 3:
            store_for(ATOMIC).complete(claim, RESPONSE)

    monkeypatch.setattr(engine.waiting.time, "sleep", complete_at_the_third)
    assert engine.claim(operation(), Policy(mode=Atomic(takeover_grace=5))) == Replay(RESPONSE)
    assert pauses == [0.01] * 3


@MODES
@LOCKS
def test_a_failed_record_goes_to_one_concurrent_caller(user, policy, lock):
    # On a slow machine too, nobody is taken for dead.
    policy = Policy(mode=mode_of(policy.mode.word, takeover_grace=5))
    store_for(policy).fail(claimed(policy), "broke")
    told = in_threads(MANY, lambda _index: perform(user, policy))
    (winner,) = [outcome for outcome in told if isinstance(outcome, Claimed)]
    assert (winner.attempt, winner.taken_over) == (2, False)
    assert kinds(told).keys() <= {"Claimed", "InFlight", "Replay"}
    assert LedgerEntry.objects.count() == 1


@MODES
@pytest.mark.parametrize("what", ["scope", "key"])
def test_a_digest_collision_is_an_error(policy, what):
    store_for(policy).complete(claimed(policy), RESPONSE)
    IdempotencyRecord.objects.update(**{what: "another"})
    before = IdempotencyRecord.objects.values().get()
    with pytest.raises(DigestCollision):
        engine.claim(operation(), policy)
    assert IdempotencyRecord.objects.values().get() == before
