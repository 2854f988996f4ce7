"""One delivery of a message, from its claim to its acknowledgement or rejection."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

from asgiref.sync import sync_to_async
from django.core.exceptions import ImproperlyConfigured

from django_idempotency import engine
from django_idempotency.conf import resolve
from django_idempotency.engine import Context
from django_idempotency.engine.digests import keyed
from django_idempotency.exceptions import ClaimLost, StoreUnavailable
from django_idempotency.messages.message import (
    AlreadyDone,
    AwaitsOperator,
    Delivery,
    Done,
    Exhausted,
    InFlightElsewhere,
    Malformed,
    MarkedFailed,
    Message,
    OutOfTurn,
    Refused,
    RejectMessage,
    Retry,
    RetryLater,
    StoreAway,
)
from django_idempotency.messages.results import (
    DONE,
    ERRORS,
    PLAIN_JSON,
    REJECTED,
    Codec,
    final,
    reason_of,
    result_of,
    stored_rejection,
    stored_result,
)
from django_idempotency.policy import Policy
from django_idempotency.reporting.logs import log
from django_idempotency.values.fingerprints import canonical_json, digest
from django_idempotency.values.outcomes import (
    Claimed,
    Duplicate,
    EntryPoint,
    Fail,
    InFlight,
    Keep,
    Mismatch,
    OnHold,
    Operation,
    Release,
    Replay,
    StoredResponse,
    Verdict,
)

METHOD = "MESSAGE"
MAX_ATTEMPTS = 10
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,100}")
OPERATOR_DELAY = 60
STORE_DELAY = 1
NOTHING_STATED = Policy()
_current: ContextVar[Context | None] = ContextVar("django_idempotency_consumer", default=None)

Handled = tuple[Verdict | None, "Delivery | Exception"]


def current_context() -> Context | None:
    """Return the context of the message that is being handled, or ``None`` outside a handler."""
    context = _current.get()
    return context if context is not None and context.running else None


@contextmanager
def _in_context(context: Context) -> Iterator[None]:
    """Have ``current_context()`` return the context of a run, whose handler is running meanwhile."""
    token = _current.set(context)
    context.running = True
    try:
        yield
    finally:
        context.running = False
        _current.reset(token)


@dataclass(frozen=True, kw_only=True, slots=True)
class Backoff:
    """Seconds before the next attempt: ``first``, then ``factor`` times longer after each, at most ``longest``."""

    first: float = 1
    factor: float = 2
    longest: float = 300

    def __call__(self, attempt: int) -> float:
        return min(self.first * self.factor ** min(attempt - 1, 100), self.longest)


BACKOFF = Backoff()


@dataclass(frozen=True, eq=False)
class Handling:
    """How a consumer handles its messages. See ``Consumer``."""

    name: str
    handler: Callable[..., Any]
    policy: Policy | None = field(default=None, kw_only=True)
    max_attempts: int = field(default=MAX_ATTEMPTS, kw_only=True)
    backoff: Callable[[int], float] = field(default=BACKOFF, kw_only=True)
    codec: Codec = field(default=PLAIN_JSON, kw_only=True)
    sender: object = field(default=None, kw_only=True)
    entry_point: EntryPoint = field(default=EntryPoint.CONSUMER, kw_only=True)

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ImproperlyConfigured(
                f"The consumer's name is {self.name!r}; use 1 to 100 letters, digits, dots, hyphens or underscores."
            )
        if not isinstance(self.max_attempts, int) or self.max_attempts < 1:
            raise ImproperlyConfigured(f"max_attempts is {self.max_attempts!r}; it must be an integer of at least 1.")

    # --- What adapters decide otherwise

    def verdict_on(self, error: Exception) -> Verdict | None:
        """Return the verdict on the record when the handler raises ``error``, or ``None`` if a retry runs again."""
        return None

    def verdict_on_result(self, result: Any) -> Verdict | None:
        """Return the verdict on the record when the handler returns ``result``, or ``None`` to keep the result."""
        return None

    def after_mismatch(self, *, running: bool) -> Delivery:
        """Return what to tell the broker of a message with another body, whose first one may be ``running``."""
        return Malformed("its id was first used for a message with a different body")

    def is_exhausted(self, claim: Claimed, message: Message, limit: int) -> bool:
        """Return whether the attempts before ``claim`` have reached ``limit``."""
        return claim.attempt > limit

    def after(self, error: Exception, attempt: int, limit: int) -> Delivery:
        """Return what to tell the broker when the handler raised ``error`` in attempt ``attempt`` of ``limit``."""
        reason = f"{type(error).__name__}: {error}".strip(": ")
        if attempt >= limit:
            return Exhausted(f"attempt {attempt} of {limit} failed: {reason}", attempt)
        return Retry(self.backoff(attempt), reason, attempt, error)


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
            scope=f"consumer:{consumer.name}:{message.source}",
            key=message.id,
            fingerprint=digest,
            digest=digest,
            method=METHOD,
            sender=consumer.sender or consumer.handler,
            entry_point=consumer.entry_point,
        )
        self.operation = keyed(operation)

    def consume(self, claimed: Claimed | None = None) -> Delivery:
        """Handle the message with the claim that was made for it, or make a claim first."""
        begun = self.begin(claimed)
        return self.run(begun) if isinstance(begun, engine.Run) else begun

    def leave(self, claimed: Claimed | None, first: RetryLater) -> OutOfTurn:
        """Leave the message until ``first`` is handled, and give its claim back."""
        begun = None if claimed is None else self.begin(claimed)
        if isinstance(begun, engine.Run):
            with suppress(StoreUnavailable):
                begun.end(Release())
        return OutOfTurn(0, f"an earlier message has to be handled first: {first.reason}")

    def begin(self, claimed: Claimed | None = None) -> engine.Run | Delivery:
        """Claim the message and begin its run, or return the outcome that it has already."""
        try:
            if claimed is None:
                begun = engine.begin(self.operation, self.policy)
            else:
                begun = engine.begin_claimed(claimed, self.policy)
        except StoreUnavailable as error:
            return StoreAway(STORE_DELAY, str(error))
        return begun if isinstance(begun, engine.Run) else self.delivery(begun)

    def run(self, run: engine.Run) -> Delivery:
        run.outlive_handled_errors()
        try:
            verdict, handled = self.handle(run)
        except Exception as error:  # from a signal's handler
            verdict, handled = None, error
        except BaseException as error:
            run.end(error=error)
            raise
        return self.end(run, verdict, handled)

    async def arun(self, run: engine.Run) -> Delivery:
        try:
            verdict, handled = await self._ahandle(run)
        except Exception as error:
            verdict, handled = None, error
        except BaseException as error:
            await engine.shielded(partial(run.end, error=error))
            raise
        return await engine.shielded(partial(self.end, run, verdict, handled))

    def end(self, run: engine.Run, verdict: Verdict | None, handled: Delivery | Exception) -> Delivery:
        """End the run, and return what to tell the broker."""
        error = handled if isinstance(handled, Exception) else None
        try:
            lost = run.end(verdict, error=error)
            if lost is not None or isinstance(error, ClaimLost):
                return self.delivery(lost or run.duplicate())
        except Exception as failed:  # from the store: tell the broker, and let the consumer go on
            error = failed
        if error is not None:
            return self._after(error, run)
        return cast("Delivery", handled)

    def handle(self, run: engine.Run) -> Handled:
        """Run the handler. Return the verdict and what to tell the broker if it stands, or the handler's error."""
        if exhausted := self._exhausted(run):
            return exhausted
        try:
            with _in_context(run.context):
                result = final(self.consumer.handler(self.message, run.context))
        except Exception as error:  # the handler's own
            return self._failed(run, error)
        return self._done(result)

    async def _ahandle(self, run: engine.Run) -> Handled:
        if exhausted := self._exhausted(run):
            return exhausted
        try:
            with _in_context(run.context):
                result = await self.consumer.handler(self.message, run.context)
        except Exception as error:  # the handler's own
            return self._failed(run, error)
        return await sync_to_async(self._done)(result)

    def _exhausted(self, run: engine.Run) -> Handled | None:
        """Fail the message if all attempts are used up. A process that dies in its handler can't report its failure."""
        if not self.consumer.is_exhausted(run.claim, self.message, self.limit):
            return None
        before = run.claim.attempt - 1
        reason = f"{before} attempts failed or were cut short"
        return Fail(reason), Exhausted(reason, before)

    def _failed(self, run: engine.Run, error: Exception) -> Handled:
        if isinstance(error, RejectMessage):
            reason = str(error) or "the handler rejected it"
            return Keep(stored_rejection(reason, self.policy), failure=True, rollback=True), Refused(reason)
        return self.consumer.verdict_on(error), error

    def _done(self, result: Any) -> Handled:
        try:
            return self.consumer.verdict_on_result(result) or Keep(self.stored(result)), Done(result)
        except Exception as error:  # a codec may raise anything
            return None, error

    def stored(self, result: Any) -> StoredResponse:
        """Return what is kept of a result. In lease mode, its effects have happened even if it can't be kept."""
        try:
            return stored_result(result, self.consumer.codec, self.policy)
        except Exception as error:  # a codec may raise anything
            if self.policy.is_atomic:
                raise
            log(logging.ERROR, "result_lost", "a result was not kept: %s", error, operation=self.operation)
            return StoredResponse(DONE, body=None)

    def _after(self, error: Exception, run: engine.Run) -> Delivery:
        if isinstance(error, StoreUnavailable):
            return StoreAway(STORE_DELAY, str(error), has_run=True)
        delivery = self.consumer.after(error, run.claim.attempt, self.limit)
        message = "a message was not handled: %s"
        fields = {"operation": self.operation, "attempt": run.claim.attempt, "error": error}
        log(logging.ERROR, "handler_failed", message, delivery.reason, **fields)  # type: ignore[union-attr, arg-type]
        return delivery

    def delivery(self, outcome: Duplicate) -> Delivery:
        match outcome:
            case Replay(response) if response.status < ERRORS:
                return AlreadyDone(result_of(response, self.consumer.codec))
            case Replay(response):
                kind = Refused if response.status == REJECTED else MarkedFailed
                return kind(reason_of(response))
            case InFlight(retry_after):
                return InFlightElsewhere(retry_after, "another consumer is handling the message")
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
