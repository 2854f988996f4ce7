"""The engine's outcomes on the database's store, beyond those that the contract of all stores has."""

from __future__ import annotations

import time

import pytest

from django_idempotency import engine
from django_idempotency.exceptions import DigestCollision
from django_idempotency.models import IdempotencyRecord
from django_idempotency.policy import Atomic, Policy
from django_idempotency.stores import store_for
from django_idempotency.values.outcomes import InFlight, Replay
from tests.stores.contract import ATOMIC, LOCKS, MODES, RESPONSE, claimed, commit, lapse, lock_in, operation

pytestmark = pytest.mark.usefixtures("transactional_db")


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
@pytest.mark.parametrize("what", ["scope", "key"])
def test_a_digest_collision_is_an_error(policy, what):
    store_for(policy).complete(claimed(policy), RESPONSE)
    IdempotencyRecord.objects.update(**{what: "another"})
    before = IdempotencyRecord.objects.values().get()
    with pytest.raises(DigestCollision):
        engine.claim(operation(), policy)
    assert IdempotencyRecord.objects.values().get() == before
