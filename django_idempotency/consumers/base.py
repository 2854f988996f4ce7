"""The message entry point: handle a message once, however often it is delivered."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from asgiref.sync import sync_to_async
from django.core.exceptions import ImproperlyConfigured
from django.db import close_old_connections, connections

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
    OutOfTurn,
    Refused,
    Reject,
    RejectMessage,
    Retry,
    RetryLater,
    StoreAway,
    Unidentifiable,
    identified,
)
from django_idempotency.consumers.results import (
    ERRORS,
    REJECTED,
    TYPED_JSON,
    Codec,
    final,
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
    Release,
    Replay,
    StoredResponse,
    Verdict,
    dotted_name,
)
from django_idempotency.policy import Mode, Policy, is_async

METHOD = "MESSAGE"
MAX_ATTEMPTS = 10
OPERATOR_DELAY = 60
STORE_DELAY = 1
NOTHING_STATED = Policy()
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,100}")
_current: ContextVar[Context | None] = ContextVar("django_idempotency_consumer", default=None)

Handler = Callable[[Message, Context], Any]


def current_context() -> Context | None:
    """Return the context of the message that is being handled, or ``None`` outside a handler."""
    return _current.get()


@contextmanager
def _in_context(context: Context) -> Iterator[None]:
    token = _current.set(context)
    try:
        yield
    finally:
        _current.reset(token)


@contextmanager
def _without_broken_connections() -> Iterator[None]:
    """Close unusable connections before and after, as Django does around a request. Those that work are kept.

    ``CONN_MAX_AGE = 0``, the default, would have each message open a new one.
    """
    _close_broken_connections()
    try:
        yield
    finally:
        _close_broken_connections()


def _close_broken_connections() -> None:
    for connection in connections.all(initialized_only=True):
        if connection.settings_dict["CONN_MAX_AGE"] == 0:
            connection.close_at = None
        connection.close_if_unusable_or_obsolete()


@dataclass(frozen=True, kw_only=True, slots=True)
class Backoff:
    """Seconds before the next attempt: ``first``, then ``factor`` times longer after each, at most ``longest``."""

    first: float = 1
    factor: float = 2
    longest: float = 300

    def __call__(self, attempt: int) -> float:
        return min(self.first * self.factor ** min(attempt - 1, 100), self.longest)


@dataclass(frozen=True, eq=False)
class Consumer:
    """Handles each message once.

    ``name``: part of the key, with the message's source, so that two consumers of one queue each handle all messages.
    If a consumer is renamed, every message is new to it.
    ``handler``: called with the message and its context. Its return value is the result.
    ``max_attempts``: how often a message is tried before it becomes a dead letter.
    ``backoff``: takes the number of the failed attempt and returns the seconds before the next.
    ``codec``: how results are kept.
    ``sender``: the ``sender`` of signals; by default, the handler.
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
                f"The consumer's name is {self.name!r}; use 1 to 100 letters, digits, dots, hyphens or underscores."
            )
        if not isinstance(self.max_attempts, int) or self.max_attempts < 1:
            raise ImproperlyConfigured(f"max_attempts is {self.max_attempts!r}; it must be an integer of at least 1.")

    def consume(self, message: Message) -> Delivery:
        """Handle ``message`` unless it was handled before, and return what to tell the broker. See ``consume()``."""
        self.refuse_coroutine()
        attempt = self._attempt(message)
        if isinstance(attempt, Reject):
            return attempt
        return attempt.consume()

    async def aconsume(self, message: Message) -> Delivery:
        """``consume`` for event loops. A coroutine function is awaited, in lease mode; others run in a thread."""
        if not is_async(self.handler):
            return await sync_to_async(self.consume_in_thread, thread_sensitive=False)(message)
        attempt = self._attempt(message)
        if isinstance(attempt, Reject):
            return attempt
        if attempt.policy.mode != Mode.LEASE:
            name = dotted_name(self.handler)
            raise ImproperlyConfigured(f'{name} is async and in atomic mode; set mode="lease" for it.')
        with message_span(attempt.message):
            begun = await sync_to_async(attempt.begin)()
            return await attempt.arun(begun) if isinstance(begun, Claimed) else begun

    def consume_many(self, messages: Sequence[Message], *, in_order: bool = False) -> list[Delivery]:
        """Handle several messages, and return what to tell the broker about each.

        One statement claims them, and one transaction has the effects of all, each behind a savepoint. A message that
        fails is handled by itself afterwards. If the transaction fails, and in lease mode, all are handled one by one.

        ``in_order``: handle no message behind one that has to come again. Those behind it are ``OutOfTurn``.
        """
        self.refuse_coroutine()
        attempts = [self._attempt(message) for message in messages]
        return consume_together(attempts, in_order=in_order)

    def refuse_coroutine(self) -> None:
        """Raise ``ImproperlyConfigured`` if the handler has to be awaited, which only ``aconsume`` does."""
        if is_async(self.handler):
            raise ImproperlyConfigured(
                f"{dotted_name(self.handler)} is async, so only aconsume() can run it. Make it sync, or use aconsume()."
            )

    def consume_in_thread(self, message: Message) -> Delivery:
        """``consume`` for a thread outside Django's request cycle: close its old connections before and after."""
        close_old_connections()
        try:
            return self.consume(message)
        finally:
            close_old_connections()

    def consume_many_in_thread(self, messages: Sequence[Message], *, in_order: bool = False) -> list[Delivery]:
        """``consume_many`` for a runner's thread, which keeps its connections: replace those that are broken."""
        with _without_broken_connections():
            return self.consume_many(messages, in_order=in_order)

    def _attempt(self, message: Message) -> Attempt | Malformed:
        try:
            return Attempt(self, identified(message))
        except Unidentifiable as error:
            return Malformed(str(error))

    def verdict_on(self, error: Exception) -> Verdict | None:
        """Return the verdict on the record when the handler raises ``error``, or ``None`` if a retry runs again."""
        return None

    def verdict_when_exhausted(self) -> Verdict | None:
        """Return the verdict on the record when all attempts are used up, or ``None`` if it keeps their number."""
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

    def __init__(self, consumer: Consumer, message: Message) -> None:
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

    def consume(self, begun: Claimed | None = None) -> Delivery:
        """Handle the message with the claim ``begun``, or make a claim first."""
        with message_span(self.message):
            outcome = begun or self.begin()
            return self.run(outcome) if isinstance(outcome, Claimed) else outcome

    def leave(self, begun: Claimed | None, first: RetryLater) -> OutOfTurn:
        """Leave the message until ``first`` is handled, and give its claim back."""
        if begun is not None:
            with suppress(StoreUnavailable, ClaimLost), engine.execution(begun, self.policy) as execution:
                execution.settle(Release())
        return OutOfTurn(0, f"an earlier message has to be handled first: {first.reason}")

    def begin(self) -> Claimed | Delivery:
        """Claim the message, or return what became of it."""
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
        except Exception as error:  # from the handler or the store: tell the broker, and let the consumer go on
            return self._after(error, claimed)

    async def arun(self, claimed: Claimed) -> Delivery:
        try:
            async with engine.aexecution(claimed, self.policy) as execution:
                return await self._ahandle(execution)
        except Exception as error:  # as in run()
            return await sync_to_async(self._after)(error, claimed)

    def handle(self, execution: engine.Execution) -> Delivery:
        """Run the handler, and settle what becomes of the record."""
        if exhausted := self._exhausted(execution):
            return exhausted
        try:
            with _in_context(execution.context):
                result = final(self.consumer.handler(self.message, execution.context))
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
        """Fail the message if all attempts are used up. A process that dies in its handler can't report its failure."""
        if not self.consumer.is_exhausted(execution.claim, self.message, self.limit):
            return None
        before = execution.claim.attempt - 1
        reason = f"{before} attempts failed or were cut short"
        execution.settle(self.consumer.verdict_when_exhausted() or Fail(reason))
        return Exhausted(reason, before)

    def _settle_error(self, execution: engine.Execution, error: Exception) -> Delivery:
        if isinstance(error, RejectMessage):
            reason = str(error) or "the handler rejected it"
            execution.settle(Keep(stored_rejection(reason, self.policy), failure=True, rollback=True))
            return Refused(reason)
        verdict = self.consumer.verdict_on(error)
        if verdict is None and execution.claim.attempt >= self.limit:
            verdict = self.consumer.verdict_when_exhausted()
        if verdict is not None:
            execution.settle(verdict)
        raise error

    def settle(self, execution: engine.Execution, result: Any) -> Done:
        execution.settle(Keep(self.stored(result)))
        return Done(result)

    def stored(self, result: Any) -> StoredResponse:
        """Return what is kept of a result. In lease mode, its effects have happened even if it can't be kept."""
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
            case Mismatch(running):
                return self.consumer.after_mismatch(running=running)


def consume(
    message: Message,
    handler: Handler,
    *,
    consumer: str = "default",
    policy: Policy | None = None,
    max_attempts: int = MAX_ATTEMPTS,
    backoff: Callable[[int], float] = Backoff(),
) -> Delivery:
    """Handle a message once, however often it is delivered, and return what to tell the broker.

    Acknowledge the message after this function has returned. In atomic mode, the handler's effects, its result and the
    record are committed in one transaction. An exception in the handler is logged and rolls them back. The outcome is
    then a ``Retry``, or an ``Exhausted`` after ``max_attempts``.

    See ``Consumer`` for the arguments. Raises ``ClaimInsideTransaction``.
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
    """``consume`` for event loops. A handler that is a coroutine function needs a policy in lease mode.

    Raises ``ImproperlyConfigured`` if such a policy is missing.
    """
    made = Consumer(consumer, handler, policy=policy, max_attempts=max_attempts, backoff=backoff)
    return await made.aconsume(message)


def _fingerprint(message: Message) -> bytes:
    try:
        body = canonical_json(message.body)
    except ValueError:
        body = message.body
    return digest([message.source.encode(), message.id.encode(), body])
