"""Runners take messages from a broker, hand them to a consumer, and tell the broker what became of them."""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Hashable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Generic, TypeVar

from django.core.exceptions import ImproperlyConfigured
from django.db import connections
from django.utils.module_loading import import_string

from django_idempotency.consumers.base import Consumer
from django_idempotency.consumers.messages import (
    ATTEMPTS,
    REASON,
    Ack,
    Delivery,
    Exhausted,
    Malformed,
    Message,
    Reject,
    RetryLater,
)
from django_idempotency.logs import log

D = TypeVar("D")
IDLE, BUSY = 0.5, 0.02  # seconds to wait for messages, without and with something to settle soon
PATIENCE = 30.0
RECONNECT, AFTER_ERROR = 1.0, 5.0


class DeadLetterNotTaken(Exception):
    """The broker is reachable, but does not take the dead letter: there is no room, or it may not be sent there."""


class Runner(ABC, Generic[D]):
    """Runs a consumer on one broker. An adapter defines how to receive, acknowledge, postpone and dead-letter messages.

    One thread calls all of its methods. A pool of ``concurrency`` threads calls handlers.

    ``batch``: how many messages at most are handed to ``consume_many`` at once.
    ``heartbeat``: seconds between two calls of ``beat``, and so of ``extend`` for messages at work.
    ``redelivered_after``: seconds after which the broker takes an unsettled message for lost, if it does.
    ``redelivered_for``: seconds for which a message can come again, including a replay of its dead letter.
    ``tells_redeliveries``: whether ``message`` sets ``redelivered``, by which crashes are counted with
    ``claim="lock"``.
    """

    tells_redeliveries = False
    polls_always = False  # whether to call receive(), for no messages if need be, while there is no room
    heartbeat: float | None = None
    redelivered_after: float | None = None
    redelivered_for: float = 7 * 24 * 60 * 60
    broken: tuple[type[Exception], ...] = (OSError,)  # errors that mean a broken connection

    def __init__(
        self,
        consumer: Consumer,
        *,
        concurrency: int = 1,
        batch: int = 1,
        ahead: int | None = None,
        redelivered_for: float | None = None,
    ) -> None:
        consumer.refuse_coroutine()
        self.consumer = consumer
        self.batch = _count("batch", batch)
        self._ahead = ahead
        self.redelivered_for = redelivered_for or self.redelivered_for
        self.set_concurrency(concurrency)
        self.counts: Counter[str] = Counter()
        self.ticked = 0.0
        self._stopping = threading.Event()
        self._waiting: list[D] = []
        self._at_work: dict[Future[list[Delivery]], list[D]] = {}

    def set_concurrency(self, concurrency: int) -> None:
        """Set how many handlers run at a time, and have enough messages in hand to keep them busy."""
        self.concurrency = _count("concurrency", concurrency)
        self.ahead = self._ahead or concurrency * self.batch * 4

    # --- What an adapter says ----------------------------------------------------------------------------------------

    @abstractmethod
    def open(self) -> None:
        """Connect, and declare what has to exist.

        Raises one of ``broken`` to be called again, and ``ImproperlyConfigured`` if reconnecting can't help.
        """

    @abstractmethod
    def receive(self, most: int, timeout: float) -> Iterable[D]:
        """Return at most ``most`` messages, or none after ``timeout`` seconds."""

    @abstractmethod
    def message(self, received: D) -> Message:
        """Return what identifies a received message."""

    @abstractmethod
    def ack(self, received: D) -> None:
        """Tell the broker that the message has been handled."""

    @abstractmethod
    def later(self, received: D, delay: float) -> None:
        """Make the message come again after ``delay`` seconds, not much sooner. It must not get lost meanwhile."""

    @abstractmethod
    def dead_letter(self, received: D, headers: dict[str, str]) -> None:
        """Keep the message, with the additional ``headers``, where operators look, and stop its delivery.

        Raises ``DeadLetterNotTaken``. The message then comes again, and this method is tried again.
        """

    def lane(self, received: D) -> Hashable:
        """Return the lane in which the message keeps its order, or ``None`` for no order.

        One group of a lane is at work at a time, in order. If a message is to come ``later``, no message behind it may
        come before it.
        """
        return None

    def extend(self, received: D) -> None:
        """Tell the broker that the message is still at work."""

    def beat(self) -> None:
        """Tell the broker every ``heartbeat`` seconds, also while there is no room, that this consumer is alive."""
        for received in self.at_work:
            self.extend(received)

    def close(self) -> None:
        """Disconnect. Messages that are not settled come again."""

    # --- Running -----------------------------------------------------------------------------------------------------

    def run(self, *, patience: float = PATIENCE) -> None:
        """Consume until ``stop()``, then give messages at work ``patience`` seconds to end.

        If the connection breaks, connect again. Messages that were not settled on it come again. Raises
        ``ImproperlyConfigured`` if the broker is reachable but not set up as the adapter needs it.
        """
        pool = ThreadPoolExecutor(self.concurrency, thread_name_prefix="idempotency-consumer")
        try:
            while not self._stopping.is_set():
                try:
                    self._run_connected(pool, patience)
                except self.broken as error:
                    self._forget(error)
        finally:
            _end(pool, self.concurrency)

    def _run_connected(self, pool: ThreadPoolExecutor, patience: float) -> None:
        try:
            self.open()
            beat = time.monotonic()
            while not self._stopping.is_set():
                self._turn(pool)
                beat = self._keep_alive(beat)
            self._drain(time.monotonic() + patience, beat)
        finally:
            self.close()

    def _forget(self, error: Exception) -> None:
        log(logging.WARNING, "broker_away", "the broker can't be reached: %s", type(error).__name__)
        self._waiting, self._at_work = [], {}
        self._stopping.wait(RECONNECT)

    def stop(self) -> None:
        """Receive no more messages, and end ``run()`` once messages at work are settled. For signal handlers."""
        self._stopping.set()

    @property
    def is_healthy(self) -> bool:
        """Whether the runner is looking for messages."""
        return not self._stopping.is_set() and time.monotonic() - self.ticked < PATIENCE

    @property
    def at_work(self) -> list[D]:
        """The messages that were received and are not settled."""
        return [*self._waiting, *(received for group in self._at_work.values() for received in group)]

    def _turn(self, pool: ThreadPoolExecutor) -> None:
        self.ticked = time.monotonic()
        room = max(0, self.ahead - len(self.at_work))
        if room or self.polls_always:
            received = self.receive(room, BUSY if self._at_work else IDLE)
            self._waiting = [*self._waiting, *received]  # receive() may have removed some
        else:
            self.wait_for_one()
        while len(self._at_work) < self.concurrency and (group := self._next_group()):
            messages = [self._identified(received) for received in group]
            in_order = self.lane(group[0]) is not None
            self._at_work[pool.submit(self._consume, messages, in_order=in_order)] = group
        self.settle_ended()

    def _next_group(self) -> list[D]:
        """Return the next messages of one lane in which nothing is at work."""
        taken = {self.lane(received) for group in self._at_work.values() for received in group} - {None}
        first = next((received for received in self._waiting if self.lane(received) not in taken), None)
        if first is None:
            return []
        lane = self.lane(first)
        group = [received for received in self._waiting if self.lane(received) == lane][: self.batch]
        self._waiting = [received for received in self._waiting if all(received is not one for one in group)]
        return group

    def wait_for_one(self) -> None:
        """Wait a moment for something at work to end."""
        ended = threading.Event()
        for future in self._at_work:
            future.add_done_callback(lambda _future: ended.set())
        ended.wait(BUSY)

    def _identified(self, received: D) -> Message | Malformed:
        """Return what identifies a message.

        A message that can't be identified becomes a dead letter, so that it does not end the runner at each restart.
        """
        try:
            return self.message(received)
        except self.broken:
            raise
        except Exception as error:  # ``identify`` may raise anything
            return Malformed(f"it can't be identified: {error!r}")

    def _consume(self, messages: list[Message | Malformed], *, in_order: bool) -> list[Delivery]:
        known = [message for message in messages if isinstance(message, Message)]
        deliveries = iter(self.consumer.consume_many_in_thread(known, in_order=in_order))
        return [next(deliveries) if isinstance(message, Message) else message for message in messages]

    def settle_ended(self) -> None:
        """Tell the broker about messages whose handling has ended."""
        for future in [future for future in self._at_work if future.done()]:
            group = self._at_work.pop(future)
            for received, delivery in zip(group, _deliveries(future, len(group)), strict=True):
                self.settle(received, delivery)

    def settle(self, received: D, delivery: Delivery) -> None:
        """Tell the broker what became of a message."""
        self.counts[type(delivery).__name__] += 1
        match delivery:
            case Ack():
                self.ack(received)
            case RetryLater(delay=delay):
                self.later(received, delay)
            case Reject(reason=reason):
                self._dead_letter(received, delivery, reason)

    def _dead_letter(self, received: D, delivery: Reject, reason: str) -> None:
        message = self._identified(received)
        before = message.attempts_before if isinstance(message, Message) else 0
        attempts = delivery.attempts if isinstance(delivery, Exhausted) else before
        text = "".join(character if character.isprintable() else " " for character in reason)
        try:
            self.dead_letter(received, {REASON: text[:500], ATTEMPTS: str(attempts)})
        except DeadLetterNotTaken as error:
            log(logging.ERROR, "dead_letter_not_taken", "a dead letter was not accepted: %s", error, reason=reason)
            self.later(received, AFTER_ERROR)
        else:
            log(logging.ERROR, "dead_lettered", "a message is dead-lettered: %s", reason)

    def _keep_alive(self, last: float) -> float:
        now = time.monotonic()
        if self.heartbeat is None or now - last < self.heartbeat:
            return last
        self.beat()
        return now

    def _drain(self, deadline: float, beat: float) -> None:
        self._waiting.clear()  # they were never begun, and the broker still has them
        while self._at_work and time.monotonic() < deadline:
            self.wait_for_one()
            beat = self._keep_alive(beat)
            self.settle_ended()


def _count(name: str, value: int) -> int:
    if not isinstance(value, int) or not 1 <= value <= 10_000:
        raise ImproperlyConfigured(f"{name} is {value!r}; it must be an integer from 1 to 10000.")
    return value


def _deliveries(future: Future[list[Delivery]], count: int) -> list[Delivery]:
    """Return a group's outcomes. A handler that ends its thread (``sys.exit``) has failed; its next attempts count."""
    error = future.exception()
    if error is None:
        return future.result()
    log(logging.ERROR, "handler_failed", "messages were not handled: %r", error, error=error)
    return [RetryLater(AFTER_ERROR, repr(error))] * count


def _end(pool: ThreadPoolExecutor, threads: int) -> None:
    """Close the threads' connections. A thread that is still in a handler keeps its own until the process ends."""
    together = threading.Barrier(threads)

    def close() -> None:
        with suppress(threading.BrokenBarrierError):
            together.wait(1)
        connections.close_all()

    for _thread in range(threads):
        pool.submit(close)
    pool.shutdown(wait=False)


def runner_at(path: str) -> Runner[Any]:
    """Return the runner at a dotted path, or what the function there returns.

    Raises ``ImportError``, and ``ImproperlyConfigured`` if it is not a runner.
    """
    found = import_string(path)
    found = found() if callable(found) else found
    if not isinstance(found, Runner):
        raise ImproperlyConfigured(f"{path!r} is {found!r}; it must be a runner, or return one.")
    return found
