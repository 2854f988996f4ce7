"""One delivery of a message, from its claim to its acknowledgement or rejection."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar, cast

from asgiref.sync import sync_to_async

from django_idempotency import engine
from django_idempotency.conf import resolve
from django_idempotency.engine.digests import keyed
from django_idempotency.messages.handling import Handling
from django_idempotency.messages.message import (
    AlreadyDone,
    AwaitsOperator,
    AwaitsStore,
    Delivery,
    Done,
    Exhausted,
    InFlightElsewhere,
    MarkedFailed,
    Message,
    OutOfTurn,
    Refused,
    RejectMessage,
    RetryLater,
    storable,
)
from django_idempotency.messages.results import (
    DONE,
    ERRORS,
    REJECTED,
    final,
    reason_of,
    result_of,
    stored_rejection,
    stored_result,
)
from django_idempotency.reporting.logs import log
from django_idempotency.values.exceptions import Hold, StoreUnavailable
from django_idempotency.values.fingerprints import canonical_json, digest
from django_idempotency.values.outcomes import (
    Claimed,
    Duplicate,
    Fail,
    InFlight,
    Keep,
    Mismatch,
    OnHold,
    Operation,
    Outcome,
    Release,
    Replay,
    StoredResponse,
    Verdict,
)
from django_idempotency.values.policy import Policy

T = TypeVar("T")

METHOD = "MESSAGE"
OPERATOR_DELAY = 60
STORE_DELAY = 1
NOTHING_STATED = Policy()

Handled = tuple[Verdict | None, "Delivery | Exception"]


class Attempt:
    """One delivery of a message to a consumer."""

    def __init__(self, consumer: Handling, message: Message) -> None:
        self.consumer = consumer
        self.message = message
        policy = resolve(consumer.policy or NOTHING_STATED)
        # A process may have died in the handler. Only claims by record count that.
        self.policy = policy.by_record if message.redelivered else policy
        self.limit = consumer.max_attempts + message.attempts_before
        digest = _fingerprint(message)
        operation = Operation(
            scope=consumer.scope_of(message),
            key=message.id,
            fingerprint=digest,
            digest=digest,
            method=METHOD,
            sender=consumer.sender or consumer.handler,
            entry_point=consumer.entry_point,
            database=engine.routed(policy),
        )
        self.operation = keyed(operation)
        # of its message, if the consumer counts them
        self.crashes = 0

    def consume(self, claimed: Claimed | None = None) -> Delivery:
        """Handle the message with the claim that was made for it, or make a claim
        first.
        """
        run = self.begin(claimed)
        if not isinstance(run, engine.Run):
            return run
        run.outlive_handled_errors()
        try:
            verdict, handled = self.handle(run)
        except Exception as error:  # from a signal's handler
            verdict, handled = None, error
        except BaseException as error:
            run.end(error=error)
            raise
        return self.end(run, verdict, handled)

    def leave(self, claimed: Claimed | None, first: RetryLater) -> OutOfTurn:
        """Leave the message until ``first`` is handled, and give its claim back."""
        begun = None if claimed is None else self.begin(claimed)
        if isinstance(begun, engine.Run):
            with suppress(StoreUnavailable):
                begun.end(Release())
        return OutOfTurn(
            0, f"an earlier message has to be handled first: {first.reason}"
        )

    def begin(self, claimed: Claimed | None = None) -> engine.Run | Delivery:
        """Claim the message and begin its run, or return the outcome that it has
        already.
        """
        begin = (
            partial(
                engine.begin, self.operation, self.policy, claims=self._claim_and_count
            )
            if claimed is None
            else partial(engine.begin_claimed, claimed, self.policy)
        )
        return self._begun(begin)

    def begin_or_wait(self) -> engine.Run | Delivery | engine.Pending:
        return self._begun(partial(engine.begin_or_wait, self.operation, self.policy))

    def begin_again(
        self, pending: engine.Pending
    ) -> engine.Run | Delivery | engine.Pending:
        return self._begun(partial(engine.begin_again, pending))

    def _begun(self, begin: Callable[[], T | Duplicate]) -> T | Delivery:
        try:
            begun = begin()
        except StoreUnavailable as error:
            return AwaitsStore(STORE_DELAY, str(error))
        return self.delivery(begun) if isinstance(begun, Duplicate) else begun

    # --- Crashes of a message among others that have its key

    def _claim_and_count(self, operation: Operation, policy: Policy) -> Outcome:
        outcome = engine.claim(operation, policy)
        if self.consumer.counted_by is None or not isinstance(outcome, Claimed):
            return outcome
        if self.message.redelivered or outcome.taken_over:
            self.crashes = self._count(Fail("its worker died"))
        return outcome

    def _count(self, verdict: Verdict) -> int:
        """End one more attempt of a record that counts the crashes, and return how many
        there were. Only its claims matter.
        """
        counted = replace(
            self.operation,
            key=storable(f"{self.consumer.counted_by}~crashes"),
            fingerprint=bytes(32),
            digest=None,
        )
        policy = self.policy.by_record.derive(
            wait=None, retention=NOTHING_STATED.retention, audit_retention=None
        )
        run = engine.begin(counted, policy)
        if not isinstance(run, engine.Run):
            return 0
        run.end(verdict)
        return run.claim.attempt

    # --- The end

    def end(
        self, run: engine.Run, verdict: Verdict | None, handled: Delivery | Exception
    ) -> Delivery:
        """End the run, and return what to tell the broker."""
        try:
            return self._finish(run, verdict, handled)
        finally:
            # its worker has lived to see the end
            if self.crashes and not isinstance(handled, Exhausted):
                with suppress(StoreUnavailable):
                    self._count(Release())

    def _finish(
        self, run: engine.Run, verdict: Verdict | None, handled: Delivery | Exception
    ) -> Delivery:
        error = handled if isinstance(handled, Exception) else None
        try:
            lost = run.end(verdict, error=error)
            if lost is not None:
                return self.delivery(lost)
        except (
            Exception
        ) as failed:  # from the store: tell the broker, and let the consumer go on
            error = failed
        if error is not None:
            return self._after(error, run)
        return cast("Delivery", handled)

    def handle(self, run: engine.Run) -> Handled:
        """Run the handler. Return the verdict and what to tell the broker if it stands,
        or the handler's error.
        """
        if exhausted := self._exhausted(run):
            return exhausted
        try:
            with engine.entered(run.context):
                result = final(self.consumer.handler(self.message, run.context))
        except Exception as error:  # the handler's own
            return self._failed(run, error)
        return self._done(result)

    async def handle_async(self, run: engine.Run) -> Handled:
        """``handle`` for a handler that has to be awaited."""
        if exhausted := self._exhausted(run):
            return exhausted
        try:
            with engine.entered(run.context):
                result = await self.consumer.handler(self.message, run.context)
        except Exception as error:  # the handler's own
            return self._failed(run, error)
        return await sync_to_async(self._done)(result)

    def _exhausted(self, run: engine.Run) -> Handled | None:
        """Fail the message if all attempts are used up. A process that dies in its
        handler can't report its failure.
        """
        counted = self.consumer.counted_by is not None
        before = self.crashes if counted else run.claim.attempt - 1
        if before < self.limit:
            return None
        reason = f"{before} attempts failed or were cut short"
        return Fail(reason), Exhausted(reason, before)

    def _failed(self, run: engine.Run, error: Exception) -> Handled:
        if isinstance(error, RejectMessage):
            reason = str(error) or "the handler rejected it"
            return Keep(
                stored_rejection(reason, self.policy), failure=True, rollback=True
            ), Refused(reason)
        if isinstance(error, Hold):
            held = AwaitsOperator(OPERATOR_DELAY, error.reason)
            return Fail(error.reason, on_hold=True), held
        return self.consumer.verdict_on(error), error

    def _done(self, result: Any) -> Handled:
        try:
            return self.consumer.verdict_on_result(result) or Keep(
                self.stored(result)
            ), Done(result)
        except Exception as error:  # a codec may raise anything
            return None, error

    def stored(self, result: Any) -> StoredResponse:
        """Return what is kept of a result. In lease mode, its effects have happened
        even if it can't be kept.
        """
        try:
            return stored_result(result, self.consumer.codec, self.policy)
        except Exception as error:  # a codec may raise anything
            if self.policy.is_atomic:
                raise
            log(
                logging.ERROR,
                "result_lost",
                "a result was not kept: %s",
                error,
                operation=self.operation,
            )
            return StoredResponse(DONE, body=None)

    def _after(self, error: Exception, run: engine.Run) -> Delivery:
        if isinstance(error, StoreUnavailable):
            return AwaitsStore(STORE_DELAY, str(error), has_run=True)
        delivery = self.consumer.after(error, run.claim.attempt, self.limit)
        log(
            logging.ERROR,
            "handler_failed",
            "a message was not handled: %s",
            delivery.reason,
            operation=self.operation,
            attempt=run.claim.attempt,
            error=error,
        )
        return delivery

    def delivery(self, outcome: Duplicate) -> Delivery:
        match outcome:
            case Replay(response) if response.status < ERRORS:
                result = result_of(response, self.consumer.codec, self.operation)
                return AlreadyDone(result)
            case Replay(response):
                kind = Refused if response.status == REJECTED else MarkedFailed
                return kind(reason_of(response))
            case InFlight(retry_after):
                return InFlightElsewhere(
                    retry_after, "another consumer is handling the message"
                )
            case OnHold(reason):
                return AwaitsOperator(OPERATOR_DELAY, reason)
            case Mismatch(running):
                return self.consumer.after_mismatch(running=running)


def _fingerprint(message: Message) -> bytes:
    try:
        body = canonical_json(message.body)
    except ValueError:
        body = message.body
    return digest([message.source.encode(), message.id.encode(), body])
