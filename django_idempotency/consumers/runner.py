"""What takes messages from a broker, hands them to a consumer, and tells the broker what became of them."""

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
    """The broker is there, but does not take the dead letter: nothing has room for it, or it may not be sent there."""


class Runner(ABC, Generic[D]):
    """Runs a consumer on one broker. An adapter says how to receive, acknowledge, put off and dead-letter.

    All of its methods are called by one thread, handlers by a pool of ``concurrency`` threads. ``batch``: hand up to so
    many messages at once to ``consume_many``. ``heartbeat``: seconds between two calls of ``extend`` for what is at
    work. ``redelivered_after``: seconds after which the broker takes an unsettled message for lost, if it does.
    ``redelivered_for``: seconds for which a message can come again, a replay of its dead letter included.
    """

    polls_always = False  # whether to ask for messages, none if need be, while there is no room for any
    heartbeat: float | None = None
    redelivered_after: float | None = None
    redelivered_for: float = 7 * 24 * 60 * 60
    broken: tuple[type[Exception], ...] = (OSError,)  # what says that the connection is gone

    def __init__(
        self,
        consumer: Consumer,
        *,
        concurrency: int = 1,
        batch: int = 1,
        ahead: int | None = None,
        redelivered_for: float | None = None,
    ) -> None:
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
        """Have so many handlers at a time, and as many messages in hand as keep them busy."""
        self.concurrency = _count("concurrency", concurrency)
        self.ahead = self._ahead or concurrency * self.batch * 4

    # --- What an adapter says ----------------------------------------------------------------------------------------

    @abstractmethod
    def open(self) -> None:
        """Connect, and declare what has to be there.

        Raises one of ``broken`` to be called again, and ``ImproperlyConfigured`` for what no reconnection mends.
        """

    @abstractmethod
    def receive(self, most: int, timeout: float) -> Iterable[D]:
        """At most so many messages, or none after ``timeout`` seconds."""

    @abstractmethod
    def message(self, received: D) -> Message:
        """What identifies a message that was received."""

    @abstractmethod
    def ack(self, received: D) -> None:
        """Tell the broker that the message is handled."""

    @abstractmethod
    def later(self, received: D, delay: float) -> None:
        """See that the message comes again after ``delay`` seconds, not much sooner, and is not lost meanwhile."""

    @abstractmethod
    def dead_letter(self, received: D, headers: dict[str, str]) -> None:
        """Keep the message where people look, with more headers, and have it delivered no more.

        Raises ``DeadLetterNotTaken``; the message then comes again, and this is tried again.
        """

    def lane(self, received: D) -> Hashable:
        """What keeps its order: of one lane, one group is at work at a time. ``None``: no order."""
        return None

    def extend(self, received: D) -> None:
        """Tell the broker that the message is still at work."""

    def close(self) -> None:
        """Disconnect; what is not settled comes again."""

    # --- Running -----------------------------------------------------------------------------------------------------

    def run(self, *, patience: float = PATIENCE) -> None:
        """Consume until ``stop()``, then give what is at work ``patience`` seconds to end.

        A connection that breaks is made again; what was not settled on it comes again. Raises
        ``ImproperlyConfigured`` if the broker is there but not set up as the adapter needs it.
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
        log(logging.WARNING, "broker_away", "the broker is away: %s", type(error).__name__)
        self._waiting, self._at_work = [], {}
        self._stopping.wait(RECONNECT)

    def stop(self) -> None:
        """Receive nothing more, and end ``run()`` once what is at work is settled. For signal handlers."""
        self._stopping.set()

    @property
    def is_healthy(self) -> bool:
        """Whether messages are being looked for."""
        return not self._stopping.is_set() and time.monotonic() - self.ticked < PATIENCE

    @property
    def at_work(self) -> list[D]:
        """What was received and is not settled."""
        return [*self._waiting, *(received for group in self._at_work.values() for received in group)]

    def _turn(self, pool: ThreadPoolExecutor) -> None:
        self.ticked = time.monotonic()
        room = max(0, self.ahead - len(self.at_work))
        if room or self.polls_always:
            received = self.receive(room, BUSY if self._at_work else IDLE)
            self._waiting = [*self._waiting, *received]  # receiving may have taken some away
        else:
            self.wait_for_one()
        while len(self._at_work) < self.concurrency and (group := self._next_group()):
            messages = [self.message(received) for received in group]
            self._at_work[pool.submit(self._consume, messages)] = group
        self.settle_ended()

    def _next_group(self) -> list[D]:
        """The next messages of one lane in which nothing is at work."""
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

    def _consume(self, messages: list[Message]) -> list[Delivery]:
        return self.consumer.consume_many(messages)

    def settle_ended(self) -> None:
        """Tell the broker of what has ended."""
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
        attempts = delivery.attempts if isinstance(delivery, Exhausted) else self.message(received).attempts_before
        text = "".join(character if character.isprintable() else " " for character in reason)
        try:
            self.dead_letter(received, {REASON: text[:500], ATTEMPTS: str(attempts)})
        except DeadLetterNotTaken as error:
            log(logging.ERROR, "dead_letter_not_taken", "a dead letter was not taken: %s", error, reason=reason)
            self.later(received, AFTER_ERROR)
        else:
            log(logging.ERROR, "dead_lettered", "a message is dead-lettered: %s", reason)

    def _keep_alive(self, last: float) -> float:
        now = time.monotonic()
        if self.heartbeat is None or now - last < self.heartbeat:
            return last
        for received in self.at_work:
            self.extend(received)
        return now

    def _drain(self, deadline: float, beat: float) -> None:
        self._waiting.clear()  # they were never begun: the broker has them still
        while self._at_work and time.monotonic() < deadline:
            self.wait_for_one()
            beat = self._keep_alive(beat)
            self.settle_ended()


def _count(name: str, value: int) -> int:
    if not isinstance(value, int) or not 1 <= value <= 10_000:
        raise ImproperlyConfigured(f"{name} is {value!r}; it must be an integer from 1 to 10000.")
    return value


def _deliveries(future: Future[list[Delivery]], count: int) -> list[Delivery]:
    """What came of a group. A handler that ends its thread (``sys.exit``) has failed; the next attempts are counted."""
    error = future.exception()
    if error is None:
        return future.result()
    log(logging.ERROR, "handler_failed", "messages were not handled: %r", error, error=error)
    return [RetryLater(AFTER_ERROR, repr(error))] * count


def _end(pool: ThreadPoolExecutor, threads: int) -> None:
    """Close the threads' connections. One that is still in a handler keeps its own, until the process ends."""
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

    Raises ``ImportError``, and ``ImproperlyConfigured`` for what is no runner.
    """
    found = import_string(path)
    found = found() if callable(found) else found
    if not isinstance(found, Runner):
        raise ImproperlyConfigured(f"{path!r} is {found!r}; it must be a runner, or return one.")
    return found
