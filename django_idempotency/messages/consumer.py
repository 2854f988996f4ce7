"""The message entry point: handle a message once, however often it is delivered."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

from asgiref.sync import sync_to_async
from django.core.exceptions import ImproperlyConfigured
from django.db import Error, close_old_connections, connections

from django_idempotency import engine
from django_idempotency.engine import Context
from django_idempotency.messages.attempt import Attempt
from django_idempotency.messages.batch import consume_together
from django_idempotency.messages.handling import (
    BACKOFF,
    MAX_ATTEMPTS,
    UNLIMITED,
    Handling,
)
from django_idempotency.messages.message import (
    Delivery,
    Malformed,
    Message,
    Reject,
    Unidentifiable,
    identified,
)
from django_idempotency.values.outcomes import dotted_name
from django_idempotency.values.policy import Policy, is_async

Handler = Callable[[Message, Context], Any]


def _close_broken_connections() -> None:
    """Close unusable connections, as Django does around a request. Those that work are
    kept.

    ``CONN_MAX_AGE = 0``, the default, would have each message open a new one.
    """
    for connection in connections.all(initialized_only=True):
        if connection.settings_dict["CONN_MAX_AGE"] == 0:
            connection.close_at = None
        # from the driver, if it is closed already; Django forgets it all the same
        with suppress(Error):
            connection.close_if_unusable_or_obsolete()


class Consumer(Handling):
    """Handles each message once.

    ``name``: part of the key, with the message's source, so that two consumers of one
    queue each handle all messages. If a consumer is renamed, every message is new to
    it. ``handler``: called with the message and its context. Its return value is the
    result. ``max_attempts``: how often a message is tried before it becomes a dead
    letter. ``backoff``: takes the number of the failed attempt and returns the seconds
    before the next. ``codec``: how results are kept. ``sender``: the ``sender`` of
    signals; by default, the handler.
    """

    def consume(self, message: Message) -> Delivery:
        """Handle ``message`` unless it was handled before, and return what to tell the
        broker. See ``consume()``.
        """
        self.refuse_coroutine()
        attempt = self._attempt(message)
        return attempt if isinstance(attempt, Reject) else attempt.consume()

    async def aconsume(self, message: Message) -> Delivery:
        """``consume`` for event loops. A coroutine function is awaited, in lease mode;
        others run in a thread.
        """
        if not is_async(self.handler):
            return await sync_to_async(self.consume_in_thread, thread_sensitive=False)(
                message
            )
        attempt = self._attempt(message)
        if isinstance(attempt, Reject):
            return attempt
        if attempt.policy.is_atomic:
            name = dotted_name(self.handler)
            raise ImproperlyConfigured(
                f'{name} is async and in atomic mode; set mode="lease" for it.'
            )
        run: engine.Run | Delivery = await engine.awaited(
            attempt.begin_or_wait, attempt.begin_again
        )
        if not isinstance(run, engine.Run):
            return run
        try:
            verdict, handled = await attempt.handle_async(run)
        except Exception as error:
            verdict, handled = None, error
        except BaseException as error:
            await engine.shielded(partial(run.end, error=error))
            raise
        return await engine.shielded(partial(attempt.end, run, verdict, handled))

    def consume_many(
        self, messages: Sequence[Message | Malformed], *, in_order: bool = False
    ) -> list[Delivery]:
        """Handle several messages, and return what to tell the broker about each. Those
        that are malformed stay so.

        One statement claims them, and one transaction has the effects of all, each
        behind a savepoint. A message that fails is handled by itself afterwards. If the
        transaction fails, and in lease mode, all are handled one by one.

        ``in_order``: handle no message behind one that must be redelivered. Those
        behind it are ``OutOfTurn``.
        """
        self.refuse_coroutine()
        attempts = [self._attempt(message) for message in messages]
        return consume_together(attempts, in_order=in_order)

    def refuse_coroutine(self) -> None:
        """Raise ``ImproperlyConfigured`` if the handler has to be awaited, which only
        ``aconsume`` does.
        """
        if is_async(self.handler):
            raise ImproperlyConfigured(
                f"{dotted_name(self.handler)} is async, so only aconsume() can run it."
                " Make it sync, or use aconsume()."
            )

    def consume_in_thread(self, message: Message) -> Delivery:
        """``consume`` for a thread outside Django's request cycle: close its old
        connections before and after.
        """
        close_old_connections()
        try:
            return self.consume(message)
        finally:
            close_old_connections()

    def consume_many_in_thread(
        self, messages: Sequence[Message | Malformed], *, in_order: bool = False
    ) -> list[Delivery]:
        """``consume_many`` for a runner's thread, which keeps its connections: replace
        those that are broken.
        """
        _close_broken_connections()
        try:
            return self.consume_many(messages, in_order=in_order)
        finally:
            _close_broken_connections()

    def _attempt(self, message: Message | Malformed) -> Attempt | Malformed:
        if isinstance(message, Malformed):
            return message
        try:
            return Attempt(self, identified(message))
        except Unidentifiable as error:
            return Malformed(str(error))


@dataclass(frozen=True, eq=False)
class Caller(Consumer):
    """A consumer whose handler's exceptions go to its caller, who knows when to give
    up.
    """

    max_attempts: int = UNLIMITED

    def after_mismatch(self, *, running: bool) -> Delivery:
        return Malformed("its key was first used with other arguments")

    def after(self, error: Exception, attempt: int, limit: int) -> NoReturn:
        raise error


def consume(
    message: Message,
    handler: Handler,
    *,
    consumer: str = "default",
    policy: Policy | None = None,
    max_attempts: int = MAX_ATTEMPTS,
    backoff: Callable[[int], float] = BACKOFF,
) -> Delivery:
    """Handle a message once, however often it is delivered, and return what to tell the
    broker.

    Acknowledge the message after this function has returned. In atomic mode, the
    handler's effects, its result and the record are committed in one transaction. An
    exception in the handler is logged and rolls them back. The outcome is then a
    ``Retry``, or an ``Exhausted`` after ``max_attempts``.

    See ``Consumer`` for the arguments. Raises ``ClaimInsideTransaction``.
    """
    made = Consumer(
        consumer, handler, policy=policy, max_attempts=max_attempts, backoff=backoff
    )
    return made.consume(message)
