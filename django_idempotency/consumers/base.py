"""The message entry point: handle a message once, however often it is delivered."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from inspect import iscoroutinefunction
from typing import Any

from asgiref.sync import sync_to_async
from django.core.exceptions import ImproperlyConfigured
from django.db import close_old_connections

from django_idempotency import engine, signals
from django_idempotency.conf import resolve
from django_idempotency.consumers.batches import consume_together
from django_idempotency.consumers.messages import (
    AlreadyDone,
    AwaitsOperator,
    Delivery,
    Done,
    Exhausted,
    InFlightElsewhere,
    Malformed,
    MarkedFailed,
    Message,
    Refused,
    Reject,
    RejectMessage,
    Retry,
    StoreAway,
    Unidentifiable,
    identified,
)
from django_idempotency.consumers.results import (
    ERRORS,
    REJECTED,
    TYPED_JSON,
    Codec,
    reason_of,
    result_of,
    stored_rejection,
    stored_result,
    without_result,
)
from django_idempotency.consumers.tracing import message_span
from django_idempotency.digests import keyed
from django_idempotency.engine import Context
from django_idempotency.exceptions import ClaimLost, StoreUnavailable
from django_idempotency.fingerprints import canonical_json, digest
from django_idempotency.logs import log
from django_idempotency.outcomes import (
    Claimed,
    Duplicate,
    EntryPoint,
    Fail,
    InFlight,
    Keep,
    Mismatch,
    OnHold,
    Operation,
    Replay,
    StoredResponse,
    Verdict,
)
from django_idempotency.policy import Mode, Policy

METHOD = "MESSAGE"
MAX_ATTEMPTS = 10
OPERATOR_DELAY = 60
STORE_DELAY = 1
NOTHING_STATED = Policy()
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,100}")
_current: ContextVar[Context | None] = ContextVar("django_idempotency_consumer", default=None)

Handler = Callable[[Message, Context], Any]


def current_context() -> Context | None:
    """The context of the message that this code is run for; ``None`` outside a handler."""
    return _current.get()


@contextmanager
def _in_context(context: Context) -> Iterator[None]:
    token = _current.set(context)
    try:
        yield
    finally:
        _current.reset(token)


@dataclass(frozen=True, kw_only=True, slots=True)
class Backoff:
    """Seconds before the next attempt: ``first``, ``factor`` times longer after each, ``longest`` at most."""

    first: float = 1
    factor: float = 2
    longest: float = 300

    def __call__(self, attempt: int) -> float:
        return min(self.first * self.factor ** min(attempt - 1, 100), self.longest)


@dataclass(frozen=True, eq=False)
class Consumer:
    """Handles each message once.

    ``name``: part of the key with the message's source, so that two consumers of one queue each handle all messages.
    Renaming a consumer makes every message new to it. ``handler``: called with the message and its context; what it
    returns is the result. ``max_attempts``: how often a message is tried before it is a dead letter. ``backoff``: from
    the number of an attempt that failed to the seconds before the next. ``codec``: how results are kept. ``sender``:
    what signals name, the handler unless stated.
    """

    name: str
    handler: Callable[..., Any]
    policy: Policy | None = field(default=None, kw_only=True)
    max_attempts: int = field(default=MAX_ATTEMPTS, kw_only=True)
    backoff: Callable[[int], float] = field(default=Backoff(), kw_only=True)
    codec: Codec = field(default=TYPED_JSON, kw_only=True)
    sender: object = field(default=None, kw_only=True)
    entry_point: EntryPoint = field(default=EntryPoint.CONSUMER, kw_only=True)

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ImproperlyConfigured(
                f"The consumer's name is {self.name!r}; use 1 to 100 letters, digits, dots, hyphens, underscores."
            )
        if not isinstance(self.max_attempts, int) or self.max_attempts < 1:
            raise ImproperlyConfigured(f"max_attempts is {self.max_attempts!r}; it must be an integer from 1.")

    def consume(self, message: Message) -> Delivery:
        """Handle ``message`` unless that was done before, and say what to tell the broker. See ``consume()``."""
        attempt = self._attempt(message)
        if isinstance(attempt, Reject):
            return attempt
        with message_span(attempt.message):
            begun = attempt.begin()
            return attempt.run(begun) if isinstance(begun, Claimed) else begun

    async def aconsume(self, message: Message) -> Delivery:
        """``consume`` for event loops: a coroutine function is awaited, in lease mode; others run in a thread."""
        if not iscoroutinefunction(self.handler):
            return await sync_to_async(self.consume_in_thread, thread_sensitive=False)(message)
        attempt = self._attempt(message)
        if isinstance(attempt, Reject):
            return attempt
        if attempt.policy.mode != Mode.LEASE:
            raise ImproperlyConfigured(f'{self.handler!r} is async and in atomic mode; state mode="lease" for it.')
        with message_span(attempt.message):
            begun = await sync_to_async(attempt.begin)()
            return await attempt.arun(begun) if isinstance(begun, Claimed) else begun

    def consume_many(self, messages: Sequence[Message]) -> list[Delivery]:
        """Handle several messages, and say what to tell the broker of each.

        One statement claims them and one transaction has the effects of all, each behind a savepoint. One that fails
        is handled by itself afterwards, and so are all where the transaction fails, and in lease mode.
        """
        attempts = [self._attempt(message) for message in messages]
        return consume_together(attempts)

    def consume_in_thread(self, message: Message) -> Delivery:
        """``consume`` in a thread that nobody else looks after: its connections are Django's to close."""
        close_old_connections()
        try:
            return self.consume(message)
        finally:
            close_old_connections()

    def _attempt(self, message: Message) -> Attempt | Malformed:
        try:
            return Attempt(self, identified(message))
        except Unidentifiable as error:
            return Malformed(str(error))

    def verdict_on(self, error: Exception) -> Verdict | None:
        """What becomes of the record when the handler raises ``error``; ``None``: a retry runs again."""
        return None

    def after(self, error: Exception, attempt: int, limit: int) -> Delivery:
        """What to tell the broker when the handler raised ``error`` in its ``attempt`` of ``limit``."""
        reason = f"{type(error).__name__}: {error}".strip(": ")
        if attempt >= limit:
            return Exhausted(f"attempt {attempt} of {limit} failed: {reason}", attempt)
        return Retry(self.backoff(attempt), reason, attempt, error)


class Attempt:
    """One delivery of a message to a consumer."""

    def __init__(self, consumer: Consumer, message: Message) -> None:
        self.consumer = consumer
        self.message = message
        self.policy = resolve(consumer.policy or NOTHING_STATED)
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

    def begin(self) -> Claimed | Delivery:
        """Claim the message, or say what became of it."""
        try:
            outcome = engine.claim(self.operation, self.policy)
        except StoreUnavailable as error:
            signals.send(signals.store_failed, self.operation, error=error)
            return StoreAway(STORE_DELAY, str(error))
        return outcome if isinstance(outcome, Claimed) else self.delivery(outcome)

    def run(self, claimed: Claimed) -> Delivery:
        try:
            with engine.execution(claimed, self.policy) as execution:
                return self.handle(execution)
        except Exception as error:  # of the handler or the store: the broker is told, and the consumer goes on
            return self._after(error, claimed)

    async def arun(self, claimed: Claimed) -> Delivery:
        try:
            async with engine.aexecution(claimed, self.policy) as execution:
                return await self._ahandle(execution)
        except Exception as error:  # as in run()
            return await sync_to_async(self._after)(error, claimed)

    def handle(self, execution: engine.Execution) -> Delivery:
        """Run the handler, and settle on what is to become of the record."""
        if exhausted := self._exhausted(execution):
            return exhausted
        try:
            with _in_context(execution.context):
                result = self.consumer.handler(self.message, execution.context)
        except Exception as error:  # the handler's own
            return self._settle_error(execution, error)
        return self.settle(execution, result)

    async def _ahandle(self, execution: engine.Execution) -> Delivery:
        if exhausted := self._exhausted(execution):
            return exhausted
        try:
            with _in_context(execution.context):
                result = await self.consumer.handler(self.message, execution.context)
        except Exception as error:  # the handler's own
            return self._settle_error(execution, error)
        return await sync_to_async(self.settle)(execution, result)

    def _exhausted(self, execution: engine.Execution) -> Exhausted | None:
        """A process that dies in its handler never comes to say that it failed."""
        before = execution.claim.attempt - 1
        if before < self.limit:
            return None
        reason = f"{before} attempts failed or were cut short"
        execution.settle(Fail(reason))
        return Exhausted(reason, before)

    def _settle_error(self, execution: engine.Execution, error: Exception) -> Delivery:
        if isinstance(error, RejectMessage):
            reason = str(error) or "the handler rejected it"
            execution.settle(Keep(stored_rejection(reason, self.policy), failure=True, rollback=True))
            return Refused(reason)
        if verdict := self.consumer.verdict_on(error):
            execution.settle(verdict)
        raise error

    def settle(self, execution: engine.Execution, result: Any) -> Done:
        execution.settle(Keep(self.stored(result)))
        return Done(result)

    def stored(self, result: Any) -> StoredResponse:
        """What is kept of a result. In lease mode its effects have happened, whatever can be kept of it."""
        try:
            return stored_result(result, self.consumer.codec, self.policy)
        except Exception as error:  # a codec may raise anything
            if self.policy.mode == Mode.ATOMIC:
                raise
            log(logging.ERROR, "result_lost", "a result was not kept: %s", error, operation=self.operation)
            return without_result()

    def _after(self, error: Exception, claimed: Claimed) -> Delivery:
        if isinstance(error, StoreUnavailable):
            return StoreAway(STORE_DELAY, str(error))
        if isinstance(error, ClaimLost):
            return self._after_losing()
        delivery = self.consumer.after(error, claimed.attempt, self.limit)
        message = "a message was not handled: %s"
        told = {"operation": self.operation, "attempt": claimed.attempt, "error": error}
        log(logging.ERROR, "handler_failed", message, delivery.reason, **told)  # type: ignore[union-attr, arg-type]
        return delivery

    def _after_losing(self) -> Delivery:
        try:
            return self.delivery(engine.duplicate(self.operation, self.policy))
        except StoreUnavailable as error:
            return StoreAway(STORE_DELAY, str(error))

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
            case Mismatch():
                return Malformed("its id was first used for a message with another body")


def consume(
    message: Message,
    handler: Handler,
    *,
    consumer: str = "default",
    policy: Policy | None = None,
    max_attempts: int = MAX_ATTEMPTS,
    backoff: Callable[[int], float] = Backoff(),
) -> Delivery:
    """Handle a message once, however often it is delivered, and say what to tell the broker.

    In atomic mode the handler's effects, its result and the record are one transaction; acknowledge after this
    returns. An exception of the handler's rolls them back and is a ``Retry``, and an ``Exhausted`` after
    ``max_attempts``; it is logged. See ``Consumer`` for the arguments. Raises ``ClaimInsideTransaction``.
    """
    made = Consumer(consumer, handler, policy=policy, max_attempts=max_attempts, backoff=backoff)
    return made.consume(message)


async def aconsume(
    message: Message,
    handler: Callable[[Message, Context], Any],
    *,
    consumer: str = "default",
    policy: Policy | None = None,
    max_attempts: int = MAX_ATTEMPTS,
    backoff: Callable[[int], float] = Backoff(),
) -> Delivery:
    """``consume`` for event loops. A handler that is a coroutine function needs a policy in lease mode."""
    made = Consumer(consumer, handler, policy=policy, max_attempts=max_attempts, backoff=backoff)
    return await made.aconsume(message)


def _fingerprint(message: Message) -> bytes:
    try:
        body = canonical_json(message.body)
    except ValueError:
        body = message.body
    return digest([message.source.encode(), message.id.encode(), body])
