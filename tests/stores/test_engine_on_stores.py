"""The engine's outcomes on every store: the same ones, whatever the database."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace
from unittest.mock import ANY

import pytest
from django.contrib.auth import get_user_model
from django.db import (
    connection,
)

from django_idempotency import engine
from django_idempotency.exceptions import (
    ClaimLost,
    DigestCollision,
)
from django_idempotency.models import IdempotencyRecord
from django_idempotency.outcomes import (
    Claimed,
    InFlight,
    Keep,
    Mismatch,
    OnHold,
    Replay,
)
from django_idempotency.policy import Policy
from testproject.models import LedgerEntry
from tests.stores.contract import (
    ATOMIC,
    LEASE,
    LOCKS,
    MANY,
    MODES,
    RESPONSE,
    claimed,
    commit,
    expire,
    lapse,
    lock_in,
    operation,
)
from tests.support.threads import in_threads
from tests.support.waiting import eventually

pytestmark = pytest.mark.usefixtures("transactional_db")


@pytest.fixture
def user():
    return get_user_model().objects.create_user("carol")


def perform(user, policy: Policy = ATOMIC, *, key: str = "k", hold=lambda: None):
    """Claim, and run if claimed: one ledger entry."""
    outcome = engine.claim(operation(key), policy)
    if not isinstance(outcome, Claimed):
        return outcome
    try:
        with engine.execution(outcome, policy) as run:
            LedgerEntry.objects.create(user=user, amount=1, reference=key)
            hold()
            run.settle(Keep(RESPONSE))
    except ClaimLost:
        return engine.duplicate(outcome.operation, policy)
    return outcome


def kinds(outcomes) -> Counter[str]:
    return Counter(type(outcome).__name__ for outcome in outcomes)


@MODES
@LOCKS
def test_of_concurrent_callers_one_runs_and_the_others_are_told(store, user, policy, lock):
    policy = Policy(mode=policy.mode, lock=lock)
    told = kinds(in_threads(MANY, lambda _index: perform(user, policy)))
    assert told["Claimed"] == 1
    assert told.keys() <= {"Claimed", "InFlight", "Replay"}
    assert LedgerEntry.objects.count() == 1
    assert perform(user, policy) == Replay(RESPONSE)


@LOCKS
def test_with_no_grace_at_all_there_is_still_one_effect(store, user, lock):
    policy = Policy(takeover_grace=0, lock=lock)
    for key in "abcde":
        told = in_threads(MANY, lambda _index, key=key: perform(user, policy, key=key))
        assert kinds(told).keys() <= {"Claimed", "InFlight", "Replay"}
    assert LedgerEntry.objects.count() == 5


@LOCKS
def test_callers_that_wait_all_get_the_one_answer(store, user, lock):
    policy = Policy(on_conflict="wait", max_waiters=MANY, lock=lock)
    told = kinds(in_threads(MANY, lambda _index: perform(user, policy)))
    assert told == {"Claimed": 1, "Replay": MANY - 1}
    assert LedgerEntry.objects.count() == 1


@pytest.mark.usefixtures("impatient")
@LOCKS
def test_a_live_owner_is_never_taken_over_however_slow(store, other_thread, lock):
    policy = Policy(takeover_grace=0, lock=lock)
    claim = claimed(store, policy)
    lapse(claim)
    block = lock_in(other_thread, store, claim, policy)
    assert engine.claim(operation(), policy) == InFlight(retry_after=1)
    assert other_thread(store(policy).complete, claim, RESPONSE)
    commit(other_thread, block)
    assert engine.claim(operation(), policy) == Replay(RESPONSE)


@pytest.mark.usefixtures("impatient")
@LOCKS
def test_a_dead_owner_is_taken_over_at_once_and_its_effects_are_gone(store, other_thread, user, lock):
    policy = Policy(lock=lock)
    claim = claimed(store, policy)
    lock_in(other_thread, store, claim, policy)
    other_thread(LedgerEntry.objects.create, user=user, amount=1, reference="k")
    other_thread(lambda: connection.close())
    outcome = eventually(lambda: _run_if_claimed(user, policy), within=20)
    assert (outcome.attempt, outcome.taken_over) == (2, True)
    assert LedgerEntry.objects.count() == 1
    assert not store(policy).complete(claim, RESPONSE)


def _run_if_claimed(user, policy):
    outcome = perform(user, policy)
    return outcome if isinstance(outcome, Claimed) else None


def test_a_claim_without_its_row_lock_yet_is_let_alone_for_the_grace(store):
    claimed(store)
    began = time.monotonic()
    outcome = engine.claim(operation(), Policy(takeover_grace=0.3))
    assert outcome.taken_over
    assert time.monotonic() - began > 0.2


def test_within_the_grace_a_claim_is_asked_again_every_10_ms(store, monkeypatch):
    pauses, claim = [], claimed(store)

    def complete_at_the_third(seconds):
        pauses.append(seconds)
        if len(pauses) == 3:
            store(ATOMIC).complete(claim, RESPONSE)

    monkeypatch.setattr(engine.claims.time, "sleep", complete_at_the_third)
    assert engine.claim(operation(), Policy(takeover_grace=5)) == Replay(RESPONSE)
    assert pauses == [0.01] * 3


def _dead(store, policy):
    lapse(claimed(store, policy))


def _failed(store, policy):
    store(policy).fail(claimed(store, policy), "broke")


def _expired(store, policy):
    claim = claimed(store, policy)
    store(policy).complete(claim, RESPONSE)
    expire(claim)


@MODES
@LOCKS
@pytest.mark.parametrize(("before", "attempt"), [(_dead, 2), (_failed, 2), (_expired, 1)])
def test_an_available_record_goes_to_one_concurrent_caller(store, user, policy, lock, before, attempt):
    policy = Policy(mode=policy.mode, lock=lock, takeover_grace=5)  # on a slow machine too, nobody is taken for dead
    before(store, policy)
    told = in_threads(MANY, lambda _index: perform(user, policy))
    (winner,) = [outcome for outcome in told if isinstance(outcome, Claimed)]
    assert (winner.attempt, winner.taken_over) == (attempt, before is _dead)
    assert kinds(told).keys() <= {"Claimed", "InFlight", "Replay"}
    assert LedgerEntry.objects.count() == 1


@MODES
@pytest.mark.parametrize("what", ["scope", "key"])
def test_a_digest_collision_is_an_error(store, policy, what):
    store(policy).complete(claimed(store, policy), RESPONSE)
    IdempotencyRecord.objects.update(**{what: "another"})
    before = IdempotencyRecord.objects.values().get()
    with pytest.raises(DigestCollision):
        engine.claim(operation(), policy)
    assert IdempotencyRecord.objects.values().get() == before


def test_a_live_lease_is_not_taken_over_and_a_lapsed_one_is(store):
    claim = claimed(store, LEASE)
    assert isinstance(engine.claim(operation(), LEASE), InFlight)
    lapse(claim)
    assert engine.claim(operation(), LEASE).taken_over


@LOCKS
def test_a_crash_that_an_operator_has_to_judge_is_put_on_hold(store, lock):
    policy = Policy(mode="lease", on_crash="hold", lock=lock)
    lapse(claimed(store, policy))
    told = in_threads(MANY, lambda _index: engine.claim(operation(), policy))
    assert kinds(told).keys() <= {"OnHold", "InFlight"}
    assert isinstance(engine.claim(operation(), policy), OnHold)


@pytest.mark.parametrize("before", [lambda store, policy: claimed(store, policy), _dead, _failed])
@MODES
def test_another_request_is_a_mismatch_in_every_state(store, policy, before):
    before(store, policy)
    record = store(policy).read(operation().id)
    assert engine.claim(operation(body=b"other"), policy) == Mismatch()
    assert store(policy).read(operation().id) == replace(record, now=ANY)
