"""The whole life of a record in random steps, beside a small model of it: after each
step they agree.

More of it: ``STATE_MACHINE_EXAMPLES=2000 pytest tests/faults/test_state_machine.py``.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from typing import Any

import pytest
from django.db import transaction
from django.db.models import F
from django.test import override_settings
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from django_idempotency import engine, maintenance
from django_idempotency.engine.background import Worker
from django_idempotency.models import DatabaseNow, IdempotencyRecord
from django_idempotency.stores import store_for
from django_idempotency.stores.database import ahead
from django_idempotency.values.outcomes import (
    Claimed,
    InFlight,
    Mismatch,
    OnHold,
    Operation,
    Replay,
    StoredResponse,
)
from django_idempotency.values.policy import Atomic, Lease, Policy
from tests.support.threads import OtherThread

pytestmark = [
    pytest.mark.postgresql,
    pytest.mark.usefixtures("transactional_db"),
    pytest.mark.exhaustive,
]

EXAMPLES = int(os.environ.get("STATE_MACHINE_EXAMPLES", "15"))
POLICIES = {
    "atomic": Policy(mode=Atomic(takeover_grace=0)),
    "skip_locked": Policy(mode=Atomic(takeover_grace=0), store="skip_locked"),
    "lease": Policy(mode="lease"),
    "hold": Policy(mode=Lease(on_crash="hold")),
}
SKIPPING = {
    "BACKEND": "django_idempotency.stores.DatabaseStore",
    "OPTIONS": {"row_lock": "skip_locked"},
}
FINGERPRINTS = (b"a" * 32, b"b" * 32)
RESPONSES = st.builds(
    StoredResponse,
    st.sampled_from([200, 201, 402]),
    st.sampled_from([(), (("X-A", "1"), ("X-A", "2"))]),
    st.none() | st.binary(max_size=4),
)


@dataclass
class Model:
    """A record as this test understands it."""

    fingerprint: bytes
    token: Any
    status: str = "processing"
    attempts: int = 1
    on_hold: bool = False
    answer: StoredResponse | None = None
    lapsed: bool = False  # its lease has run out
    expired: bool = False

    @property
    def live(self) -> bool:
        return self.status == "processing"

    @property
    def forgotten(self) -> bool:
        """What waits for an operator waits as long as it takes."""
        return self.expired and not self.live and not self.on_hold

    def end(
        self,
        status: str,
        *,
        answer: StoredResponse | None = None,
        on_hold: bool = False,
    ) -> None:
        self.status, self.answer, self.on_hold = status, answer, on_hold
        self.token, self.lapsed, self.expired = None, False, False


def actual() -> Model | None:
    lapses, expires = F("locked_until") - DatabaseNow(), F("expires_at") - DatabaseNow()
    record = IdempotencyRecord.objects.annotate(lapses=lapses, expires=expires).first()
    if record is None:
        return None
    answer = None
    if record.response_status is not None:
        body = None if record.response_body is None else bytes(record.response_body)
        answer = StoredResponse(
            record.response_status, tuple(map(tuple, record.response_headers)), body
        )
    return Model(
        fingerprint=bytes(record.fingerprint),
        token=record.token,
        status=record.status,
        attempts=record.attempts,
        on_hold=record.on_hold,
        answer=answer,
        lapsed=record.lapses is not None and record.lapses.total_seconds() < 0,
        expired=record.expires.total_seconds() < 0,
    )


class Life(RuleBasedStateMachine):
    policy: Policy
    model: Model | None = None
    # the business transaction of a live owner in atomic mode
    block: transaction.Atomic | None = None

    @initialize()
    def begin(self) -> None:
        IdempotencyRecord.objects.all().delete()
        self.store = store_for(self.policy)
        self.claims: list[Claimed] = []
        self.owner = OtherThread()

    def teardown(self) -> None:
        if self.block:
            self.crash()
        self.owner.close()

    @property
    def atomic(self) -> bool:
        return self.policy.is_atomic

    def unlocked(self) -> bool:
        return self.block is None

    # --- Asking ---

    def expected(self, fingerprint: bytes) -> Any:
        """The outcome, or the attempt of a claim."""
        seen = self.model
        if seen is None or seen.forgotten:
            return 1
        if seen.fingerprint != fingerprint:
            return Mismatch
        if seen.answer:
            return Replay
        if seen.on_hold:
            return OnHold
        if seen.live and (self.block if self.atomic else not seen.lapsed):
            return InFlight
        if seen.live and self.policy.holds_on_crash:
            return OnHold
        return seen.attempts + 1

    @rule(fingerprint=st.sampled_from(FINGERPRINTS))
    def ask(self, fingerprint: bytes) -> None:
        expected, seen = self.expected(fingerprint), self.model
        outcome = engine.claim(Operation("s", "k", fingerprint), self.policy)
        if isinstance(outcome, Claimed):
            assert expected == outcome.attempt
            assert outcome.token not in [claim.token for claim in self.claims]
            self.claims.append(outcome)
            self.model = Model(fingerprint, outcome.token, attempts=outcome.attempt)
            return
        assert isinstance(outcome, expected), outcome
        if isinstance(outcome, Replay):
            assert outcome.response == seen.answer
        if isinstance(outcome, OnHold) and seen.live:
            seen.end("failed", on_hold=True)

    @rule()
    def ask_the_same(self) -> None:
        self.ask(self.model.fingerprint if self.model else FINGERPRINTS[0])

    # --- Ending: by anyone who ever had a claim, the owner or a zombie ---

    @precondition(lambda self: self.claims and self.unlocked())
    @rule(which=st.integers(0, 9), answer=RESPONSES, failure=st.booleans())
    def complete(self, which: int, answer: StoredResponse, failure: bool) -> None:
        claim = self.claim(which)
        if self.judged(claim, self.store.complete(claim, answer, failure=failure)):
            self.model.end("failed" if failure else "completed", answer=answer)

    @precondition(lambda self: self.claims and self.unlocked())
    @rule(which=st.integers(0, 9), on_hold=st.booleans())
    def fail(self, which: int, on_hold: bool) -> None:
        claim = self.claim(which)
        if self.judged(claim, self.store.fail(claim, "why", on_hold=on_hold)):
            self.model.end("failed", on_hold=on_hold)

    @precondition(lambda self: self.claims and self.unlocked())
    @rule(which=st.integers(0, 9))
    def release(self, which: int) -> None:
        claim = self.claim(which)
        if self.judged(claim, self.store.release(claim)):
            self.model = None

    @precondition(lambda self: self.claims and self.unlocked())
    @rule(which=st.integers(0, 9))
    def renew(self, which: int) -> None:
        claim = self.claim(which)
        if self.judged(claim, claim.token in self.store.renew([claim])):
            self.model.lapsed = False

    def claim(self, which: int) -> Claimed:
        """The last ones more often."""
        return self.claims[-1 - which % min(len(self.claims), 3)]

    def judged(self, claim: Claimed, written: bool) -> bool:
        """``written``, which only the owner's may be."""
        assert written == (self.model is not None and self.model.token == claim.token)
        return written

    # --- Atomic mode: the business transaction ---

    @precondition(lambda self: self.claims and self.unlocked() and self.atomic)
    @rule(which=st.integers(0, 9))
    def lock(self, which: int) -> None:
        claim = self.claim(which)
        self.block = transaction.atomic()
        self.owner(self.block.__enter__)
        self.running = self.owner(self.store.lock, claim)
        if not self.judged(claim, self.running is not None):
            self.crash()

    @precondition(lambda self: self.block)
    @rule()
    def crash(self) -> None:
        block, self.block = self.block, None
        self.owner(block.__exit__, Exception, Exception(), None)

    @precondition(lambda self: self.block)
    @rule(answer=RESPONSES, crashes=st.booleans())
    def complete_and_commit(self, answer: StoredResponse, crashes: bool) -> None:
        assert self.owner(self.store.complete, self.running, answer)
        if crashes:
            self.crash()
        else:
            block, self.block = self.block, None
            self.owner(block.__exit__, None, None, None)
            self.model.end("completed", answer=answer)

    # --- Time and maintenance ---

    @precondition(lambda self: self.model and self.unlocked())
    @rule()
    def lease_runs_out(self) -> None:
        if self.model.live:
            IdempotencyRecord.objects.update(locked_until=F("locked_at"))
            self.model.lapsed = True

    @precondition(lambda self: self.model and self.unlocked())
    @rule()
    def retention_runs_out(self) -> None:
        IdempotencyRecord.objects.update(
            expires_at=ahead(-9), purge_at=ahead(-9), locked_at=F("locked_at")
        )
        self.model.expired = True

    @rule()
    def reap(self) -> None:
        reaped = maintenance.reap()
        stuck = bool(
            self.model and self.model.live and self.model.lapsed and self.unlocked()
        )
        hold = self.policy.holds_on_crash
        assert (reaped.done["failed"], reaped.done["on_hold"]) == (
            stuck and not hold,
            stuck and hold,
        )
        if stuck:
            expired = self.model.expired
            self.model.end("failed", on_hold=hold)
            self.model.expired = expired

    @rule()
    def clean_up(self) -> None:
        due = bool(self.model and self.model.forgotten)
        assert maintenance.cleanup().rows == due
        if due:
            self.model = None

    @invariant()
    def record_and_model_agree(self) -> None:
        seen = actual()
        assert (seen and asdict(seen)) == (self.model and asdict(self.model))


@pytest.mark.parametrize("mode", POLICIES)
def test_record_and_model_agree_after_every_step(monkeypatch, mode):
    # counts of replays are not part of this life
    monkeypatch.setattr(Worker, "wake", lambda worker: None)
    checks = [
        HealthCheck.too_slow,
        HealthCheck.data_too_large,
        HealthCheck.filter_too_much,
    ]
    limits = settings(
        max_examples=EXAMPLES,
        stateful_step_count=30,
        deadline=None,
        suppress_health_check=checks,
    )
    with override_settings(IDEMPOTENCY={"STORES": {"skip_locked": SKIPPING}}):
        run_state_machine_as_test(
            type("Life", (Life,), {"policy": POLICIES[mode]}), settings=limits
        )
