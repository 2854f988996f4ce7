"""Runners take messages from a broker, hand them to a consumer, and tell the broker the
outcomes.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import groupby
from typing import Any, Generic, TypeVar

from django.core.exceptions import ImproperlyConfigured
from django.utils.module_loading import import_string

from django_idempotency.messages.consumer import Consumer
from django_idempotency.messages.message import (
    ATTEMPTS,
    REASON,
    Ack,
    AwaitsStore,
    Delivery,
    Exhausted,
    Malformed,
    Message,
    OutOfTurn,
    Reject,
    RetryLater,
)
from django_idempotency.reporting.logs import is_due, log

D = TypeVar("D")
IDLE = 1.0  # seconds
# seconds without hearing from the broker after which the runner is not healthy
SILENCE = 30.0
RECONNECT, AFTER_ERROR = 1.0, 5.0


class NothingHeard(Exception):
    """The broker does not respond, or has not what is consumed. The client keeps
    trying, so that there is no need to connect again.
    """


class NotTaken(Exception):
    """The broker is reachable, but does not take the message: there is no room, or it
    may not be sent there.
    """


class Runner(ABC, Generic[D]):
    """Runs a consumer on one broker, one batch after the other. An adapter defines how
    to talk to the broker.

    A turn: receive what is there, at most ``batch`` messages, hand it to
    ``consume_many``, and tell the broker the outcomes. To handle more at a time, run
    more processes.

    While the store is unavailable, the runner receives nothing and keeps what it has,
    so that the broker counts no delivery. It hands that to the consumer from time to
    time, until the store responds.

    ``heartbeat``: seconds between two calls of ``keep_alive``, if the broker needs
    them. ``idle``: seconds for which an idle runner waits for messages; ``stop()`` may
    take as long. ``redelivered_after``: seconds after which the broker takes an
    unsettled message for lost, if it does. ``redelivered_for``: seconds for which a
    message can be redelivered, including a replay of its dead letter.
    ``tells_redeliveries``: whether ``message`` sets ``redelivered``, by which crashes
    are counted with ``claim="lock"``.
    """

    tells_redeliveries = False
    heartbeat: float | None = None
    idle = IDLE
    redelivered_after: float | None = None
    redelivered_for: float = 7 * 24 * 60 * 60
    # errors that mean a broken connection
    broken: tuple[type[Exception], ...] = (OSError,)

    def __init__(
        self,
        consumer: Consumer,
        *,
        batch: int = 10,
        redelivered_for: float | None = None,
    ) -> None:
        consumer.refuse_coroutine()
        if not isinstance(batch, int) or not 1 <= batch <= 10_000:
            raise ImproperlyConfigured(
                f"batch is {batch!r}; it must be an integer from 1 to 10000."
            )
        self.consumer = consumer
        self.batch = batch
        self.redelivered_for = redelivered_for or self.redelivered_for
        self.counts: Counter[str] = Counter()
        self._heard = self._last_beat = 0.0
        self._stopped = False
        self._in_hand: dict[int, D] = {}  # by identity
        # messages that the broker did not take back, and when they are due
        self._kept: list[tuple[D, float]] = []

    # --- What an adapter says ---------------------------------------------------------

    @abstractmethod
    def open(self) -> None:
        """Connect, and declare what has to exist.

        Raises one of ``broken`` to be called again, and ``ImproperlyConfigured`` if
        reconnecting can't help.
        """

    @abstractmethod
    def receive(self, most: int, timeout: float) -> Iterable[D]:
        """Return at most ``most`` messages as soon as there are any, or none after
        ``timeout`` seconds.

        Raises one of ``broken`` to connect again, and ``NothingHeard`` to be called
        again.
        """

    @abstractmethod
    def message(self, received: D) -> Message:
        """Return what identifies a received message."""

    @abstractmethod
    def ack(self, received: Sequence[D]) -> None:
        """Tell the broker that these messages have been handled."""

    @abstractmethod
    def later(self, received: D, delay: float) -> None:
        """Have the message redelivered after ``delay`` seconds, not much sooner. It
        must not get lost meanwhile.

        Raises ``NotTaken``. The runner then keeps the message, and handles it again
        after ``delay`` seconds.
        """

    @abstractmethod
    def dead_letter(self, received: D, headers: dict[str, str]) -> None:
        """Keep the message, with the additional ``headers``, where operators look, and
        stop its delivery.

        Raises ``NotTaken``. The message is then redelivered, and this method is tried
        again.
        """

    def lane(self, received: D) -> Hashable:
        """Return the lane in which the message keeps its order, such as its partition,
        or ``None`` for no order.

        The broker must deliver no message of a lane before one that comes ``later``.
        """
        return None

    def keep_alive(self) -> None:
        """Tell the broker that this consumer is alive, and that the messages
        ``at_work`` are.

        Called every ``heartbeat`` seconds. While handlers run or the runner pauses, a
        thread calls it, and no other method is called.
        """

    def close(self) -> None:
        """Disconnect. Messages that are not acknowledged are redelivered."""

    # --- Running ----------------------------------------------------------------------

    def run(self) -> None:
        """Consume until ``stop()``. If the connection breaks, connect again; the broker
        redelivers what was in hand.

        Raises ``ImproperlyConfigured`` if the broker is reachable but not set up as the
        adapter needs it.
        """
        while not self._stopped:
            try:
                self._run_connected()
            except self.broken as error:
                self._log(
                    logging.WARNING,
                    "broker_unavailable",
                    "the broker can't be reached: %s",
                    type(error).__name__,
                )
                self._pause(RECONNECT)

    def _run_connected(self) -> None:
        self._in_hand, self._kept = {}, []
        try:
            self.open()
            while not self._stopped:
                self._turn()
        finally:
            self.close()

    def stop(self) -> None:
        """Receive no more messages, and end ``run()`` once those that are being handled
        are. For signal handlers.
        """
        self._stopped = True

    def _pause(self, seconds: float) -> None:
        """Sleep, but not for long after ``stop()``, which a signal handler may call in
        this thread.
        """
        end = time.monotonic() + seconds
        while not self._stopped and (left := end - time.monotonic()) > 0:
            time.sleep(min(left, 0.1))

    @property
    def at_work(self) -> list[D]:
        """The messages that were received, and whose outcome the broker does not
        know.
        """
        return [*self._in_hand.values(), *(received for received, _due in self._kept)]

    @property
    def is_healthy(self) -> bool:
        """Whether messages are being handled, or the runner looks for them and has
        heard from the broker of late.
        """
        return not self._stopped and (
            bool(self._in_hand) or time.monotonic() - self._heard < SILENCE
        )

    def _turn(self) -> None:
        self._beat()
        now = time.monotonic()
        taken = [received for received, due in self._kept if due <= now]
        self._kept = [(received, due) for received, due in self._kept if due > now]
        if not taken:
            # what is kept has to be kept alive
            timeout = min(IDLE, self.heartbeat or IDLE) if self._kept else self.idle
            try:
                taken = list(self.receive(self.batch, timeout))
            except NothingHeard as error:
                if is_due(f"{self.consumer.name} received nothing: {error}"):
                    message = "the broker sends nothing: %s"
                    self._log(
                        logging.WARNING, "broker_unavailable", message, str(error)
                    )
            else:
                self._heard = time.monotonic()
        self._in_hand = {id(received): received for received in taken}
        lanes: dict[Hashable, list[D]] = defaultdict(list)
        for received in taken:
            lanes[self.lane(received)].append(received)
        for lane, group in lanes.items():
            self._handle(group, in_order=lane is not None)

    def _handle(self, group: list[D], *, in_order: bool) -> None:
        """Handle messages, and tell the broker the outcomes. Keep those for which the
        store is unavailable.

        If a message has run twice, each time without a known end, the store is there
        and the cause lies in the message.
        """
        paused = has_run = False
        while group and not self._stopped:
            outcomes = list(
                zip(group, self._consume(group, in_order=in_order), strict=True)
            )
            lost = (
                delivery
                for _received, delivery in outcomes
                if isinstance(delivery, AwaitsStore)
            )
            away = next(
                (delivery for delivery in lost if not (has_run and delivery.has_run)),
                None,
            )
            keeps = (AwaitsStore, OutOfTurn) if away is not None else ()
            self._tell(
                [outcome for outcome in outcomes if not isinstance(outcome[1], keeps)]
            )
            self.counts.update(
                type(delivery).__name__ for _received, delivery in outcomes
            )
            group = [
                received
                for received, delivery in outcomes
                if isinstance(delivery, keeps)
            ]
            if away is not None:
                if not paused:
                    message = (
                        "no more messages are received until the store can be"
                        " reached: %s"
                    )
                    self._log(logging.WARNING, "receiving_paused", message, away.reason)
                with self._kept_alive():
                    self._pause(away.delay)
                paused, has_run = True, has_run or away.has_run

    def _consume(self, group: list[D], *, in_order: bool) -> list[Delivery]:
        messages = [self._identified(received) for received in group]
        try:
            with self._kept_alive():
                return self.consumer.consume_many_in_thread(messages, in_order=in_order)
        except Exception as error:  # not a handler's; those are outcomes
            self._log(
                logging.ERROR,
                "handler_failed",
                "messages were not handled: %r",
                error,
                error=error,
            )
            return [RetryLater(AFTER_ERROR, repr(error))] * len(group)

    def _log(
        self, level: int, event: str, message: str, *arguments: object, **fields: Any
    ) -> None:
        view = self.consumer.sender or self.consumer.handler
        log(level, event, message, *arguments, view=view, **fields)

    # --- Heartbeats -------------------------------------------------------------------

    def _until_beat(self) -> float:
        """Seconds until ``keep_alive`` is due. There is one clock, whatever the runner
        does meanwhile.
        """
        return self._last_beat + (self.heartbeat or math.inf) - time.monotonic()

    def _beat(self) -> None:
        if self._until_beat() <= 0:
            self._last_beat = time.monotonic()
            self.keep_alive()

    @contextmanager
    def _kept_alive(self) -> Iterator[None]:
        """Call ``keep_alive`` meanwhile, if the broker needs that."""
        if self.heartbeat is None:
            yield
            return
        over = threading.Event()

        def beat() -> None:
            while not over.wait(max(0.0, self._until_beat())):
                # this thread's successor in talking to the broker meets it too
                with suppress(*self.broken):
                    self._beat()

        thread = threading.Thread(
            target=beat, name="idempotency-heartbeat", daemon=True
        )
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    # --- Outcomes ---------------------------------------------------------------------

    def _identified(self, received: D) -> Message | Malformed:
        """Return what identifies a message.

        A message that can't be identified becomes a dead letter, so that it does not
        end the runner at each restart.
        """
        try:
            return self.message(received)
        except self.broken:
            raise
        except Exception as error:  # ``identify`` may raise anything
            return Malformed(f"it can't be identified: {error!r}")

    def _tell(self, outcomes: Sequence[tuple[D, Delivery]]) -> None:
        for handled, part in groupby(
            outcomes, lambda outcome: isinstance(outcome[1], Ack)
        ):
            if handled:
                done = [received for received, _delivery in part]
                self.ack(done)
                self._let_go(done)
                continue
            for received, delivery in part:
                if isinstance(delivery, Reject):
                    self._dead_letter(received, delivery)
                elif isinstance(delivery, RetryLater):
                    self._later(received, delivery.delay)
                self._let_go([received])

    def _let_go(self, answered: Iterable[D]) -> None:
        for received in answered:
            self._in_hand.pop(id(received), None)
        self._beat()

    def _later(self, received: D, delay: float) -> None:
        try:
            self.later(received, delay)
        except NotTaken as error:
            self._log(
                logging.WARNING,
                "delay_not_taken",
                "a message has to wait in the consumer: %s",
                error,
            )
            self._kept.append((received, time.monotonic() + delay))

    def _dead_letter(self, received: D, delivery: Reject) -> None:
        message = self._identified(received)
        before = message.attempts_before if isinstance(message, Message) else 0
        attempts = delivery.attempts if isinstance(delivery, Exhausted) else before
        text = "".join(
            character if character.isprintable() else " "
            for character in delivery.reason
        )
        try:
            self.dead_letter(received, {REASON: text[:500], ATTEMPTS: str(attempts)})
        except NotTaken as error:
            message_text = "a dead letter was not accepted: %s"
            self._log(
                logging.ERROR,
                "dead_letter_not_taken",
                message_text,
                error,
                reason=delivery.reason,
            )
            self._later(received, AFTER_ERROR)
        else:
            self._log(
                logging.ERROR,
                "dead_lettered",
                "a message is dead-lettered: %s",
                delivery.reason,
            )


def runner_at(path: str) -> Runner[Any]:
    """Return the runner at a dotted path, or what the function there returns.

    Raises ``ImportError``, and ``ImproperlyConfigured`` if it is not a runner.
    """
    found = import_string(path)
    found = found() if callable(found) else found
    if not isinstance(found, Runner):
        raise ImproperlyConfigured(
            f"{path!r} is {found!r}; it must be a runner, or return one."
        )
    return found
