"""What all runs have in common: they end once, with a verdict that is written to the
record and announced.
"""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from typing import Self, TypeVar

from django.db import DatabaseError
from django.dispatch import Signal

from django_idempotency import signals
from django_idempotency.engine.admission import count_stored
from django_idempotency.engine.claims import duplicate
from django_idempotency.engine.context import Context
from django_idempotency.engine.redaction import redacted
from django_idempotency.reporting.events import send
from django_idempotency.stores.base import Store
from django_idempotency.values.exceptions import ClaimLost, StoreUnavailable
from django_idempotency.values.outcomes import (
    Claimed,
    Duplicate,
    Fail,
    Keep,
    Release,
    StoredResponse,
    Verdict,
)
from django_idempotency.values.policy import Policy

V = TypeVar("V", bound=Verdict)


class Run(ABC):
    """One run of a claimed operation. A ``with`` block begins it, and ends it with
    ``verdict``, for scripts and tests.

    ``verdict``: what stands if an error keeps the run from being ended with another
    verdict and its effects can't be undone.
    """

    __slots__ = (
        "__weakref__",
        "began",
        "claim",
        "context",
        "ended",
        "lost",
        "policy",
        "process",
        "reported",
        "store",
        "stored",
        "transactional_on",
        "verdict",
    )

    def __init__(self, claimed: Claimed, policy: Policy, store: Store) -> None:
        self.claim = claimed
        self.policy = policy
        self.store = store
        self.context = Context(claimed, policy)
        self.verdict: Verdict | None = None
        # a response, and how the record stores it
        self.stored: tuple[StoredResponse, StoredResponse] | None = None
        self.process = os.getpid()
        # the alias of the database whose transaction this run is, if it is one
        self.transactional_on: str | None = None
        self.began = time.monotonic()
        self.reported = self.ended = self.lost = False

    @abstractmethod
    def begin(self) -> None:
        """Begin the run. Raises ``ClaimLost`` if another attempt has taken over, and
        ``StoreUnavailable``.
        """

    # Without a transaction there is nothing to do.
    def outlive_handled_errors(self) -> None:  # noqa: B027
        """Have errors that the view handles undo no more than they would have outside
        of a transaction.
        """

    def end(
        self, verdict: Verdict | None = None, *, error: BaseException | None = None
    ) -> Duplicate | None:
        """End the run with ``verdict``: complete its record and, in atomic mode, commit
        or roll back its effects.

        ``error``: what propagates from the view, and does so afterwards. Without a
        verdict, it was not expected: then effects are rolled back, or ``self.verdict``
        stands if they can't be. Return ``None`` once the verdict is written, or the
        outcome for a duplicate if another attempt took over; the ``error`` may say so,
        too. Raises ``StoreUnavailable`` if the store failed or if it is unknown whether
        the effects were committed, ``TransactionEnded``, ``ReplayForbidden`` and what
        ``may_replay`` raises.
        """
        try:
            self.finish(verdict, error)
            if not isinstance(error, ClaimLost):  # from ``request.idempotency.renew()``
                return None
        except ClaimLost:
            pass
        self.lost = True
        return duplicate(self.claim.operation, self.policy)

    def finish(self, verdict: Verdict | None, error: BaseException | None) -> None:
        """``end``, but raise ``ClaimLost``."""
        if self.process != os.getpid():  # in a child of the view's
            return
        if self.ended:
            raise RuntimeError("The run has ended already.")
        self.ended, self.context.running = True, False
        try:
            if verdict is not None:
                operation = self.claim.operation
                self.verdict = redacted(verdict, self.policy.body, operation)
                self._carry_out(self.verdict, error)
            elif error is not None:
                self._abort(error)
            else:
                missing = RuntimeError("The run ended without a verdict.")
                self._abort(missing)
                raise missing
        except StoreUnavailable as failure:
            self.report(failure)
            raise
        if isinstance(error, StoreUnavailable):
            self.report(error)

    def __enter__(self) -> Self:
        self.begin()
        return self

    def __exit__(
        self, _kind: object, error: BaseException | None, _traceback: object
    ) -> None:
        self.finish(None if error else self.verdict, error)

    @abstractmethod
    def _carry_out(self, verdict: Verdict, error: BaseException | None) -> None:
        """Carry out ``verdict``. ``error`` propagates afterwards."""

    @abstractmethod
    def _abort(self, error: BaseException) -> None:
        """Leave the record in order after an error that nobody expected."""

    def write(self, verdict: Verdict) -> None:
        """Write ``verdict`` to the record. Raises ``ClaimLost`` if it is no longer this
        run's.
        """
        self.write_by(self.store, verdict)

    def write_by(self, store: Store, verdict: Verdict) -> None:
        match verdict:
            case Keep(response, failure):
                encoded = self._encoded(response)
                written = store.complete(self.claim, encoded, failure=failure)
            case Fail(reason, on_hold):
                written = store.fail(self.claim, reason, on_hold=on_hold)
            case Release():
                written = store.release(self.claim)
        if not written:
            raise ClaimLost

    def _encoded(self, response: StoredResponse) -> StoredResponse:
        """Encode the response once: encrypted again, it would be another one to a store
        that already has it.
        """
        if self.stored is None or self.stored[0] is not response:
            self.stored = response, self.store.encode(response, self.claim)
        return self.stored[1]

    def write_and_announce(self, verdict: Verdict) -> None:
        """Write ``verdict`` outside the run's transaction, and announce the result."""
        try:
            self.write(verdict)
        except ClaimLost:
            self.lose(signals.stale_write_rejected)
            raise
        self.announce(verdict)

    def announce(self, verdict: Verdict) -> None:
        operation, seconds = self.claim.operation, time.monotonic() - self.began
        match verdict:
            case Keep(response):
                if self.policy.admit is not None:
                    count_stored(operation, self.policy, response)
                send(
                    signals.key_completed, operation, response=response, seconds=seconds
                )
            case Fail(reason):
                send(signals.key_failed, operation, reason=reason, seconds=seconds)
            case Release():
                send(signals.key_released, operation, seconds=seconds)

    def lose(self, signal: Signal) -> None:
        send(signal, self.claim.operation, attempt=self.claim.attempt)

    def abandon(self, verdict: Verdict) -> None:
        """Write ``verdict`` if that is still possible. An error is propagating, and no
        other error may replace it.
        """
        try:
            self.write_and_announce(verdict)
        except ClaimLost:
            pass
        except (StoreUnavailable, DatabaseError) as error:
            self.report(error)

    def report(self, error: Exception) -> None:
        """Announce that the store failed, once."""
        if not self.reported:
            self.reported = True
            send(signals.store_failed, self.claim.operation, error=error)
