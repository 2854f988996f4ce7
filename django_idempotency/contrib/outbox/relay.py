"""The relay reads events, has them published, and notes which were confirmed."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from django.db import Error, connections

from django_idempotency.contrib.outbox import signals
from django_idempotency.contrib.outbox.backlog import Backlog
from django_idempotency.contrib.outbox.chains import Chains
from django_idempotency.contrib.outbox.conf import make_publisher, options
from django_idempotency.contrib.outbox.cursor import Cursor
from django_idempotency.contrib.outbox.lanes import Lanes
from django_idempotency.contrib.outbox.publishing import database, is_sealed
from django_idempotency.extending import cause, log, send_several
from django_idempotency.extending.brokers import (
    Confirmed,
    ConnectionLost,
    Event,
    NotSent,
    Outcome,
    Postponed,
    PublisherUnavailable,
    Refused,
)

SHORTEST_PAUSE, LONGEST_PAUSE = 0.1, 30.0
SHARE_EVERY = 1.0  # seconds


class EventRelay:
    """Publishes the events of one publisher, beside any number of other relays of that
    publisher.

    No transaction is open and no row is locked while events are being sent. Events are
    sent at least once: if the process dies before it has noted a confirmation, the
    event is sent again.
    """

    def __init__(self, alias: str, *, using: str | None = None) -> None:
        self.alias = alias
        self.options = options()
        self.using = database(using)
        self.publisher = make_publisher(alias)
        self.backlog = Backlog(alias, self.using, self.options)
        self.lanes = Lanes(alias, self.using, self.options.lease)
        self.cursor = Cursor()
        self.published = 0
        self._suspects: set[int] = set()
        self._share_at = 0.0
        self._pause = 0.0

    # --- Running ----------------------------------------------------------------------

    def run(self, stop: threading.Event) -> None:
        """Publish until ``stop`` is set. Wait out outages of the database and the
        broker.
        """
        with self._ending():
            while not stop.is_set():
                try:
                    if self.step() == 0:
                        self.lanes.expect_progress(self.options.poll)
                        stop.wait(self.options.poll)
                    self._pause = 0.0
                except (PublisherUnavailable, Error) as error:
                    self._wait_out(error, stop)

    def run_once(self) -> int:
        """Publish what can be published now. Return the number of events.

        Raises ``PublisherUnavailable`` and database errors.
        """
        with self._ending():
            while self.step():
                pass
        return self.published

    def step(self) -> int:
        """Read and publish one batch of events. Return how many were read."""
        self._see_to_lanes()
        try:
            events = self._read()
            if events:
                self._publish(events)
        except Exception:
            # events that were read may not be published, or it may not be noted
            self.cursor = Cursor()
            raise
        return len(events)

    @contextmanager
    def _ending(self) -> Iterator[None]:
        try:
            yield
        finally:
            self.publisher.close()
            try:
                self.lanes.leave()
            except Error as error:
                log(
                    logging.WARNING,
                    "outbox_relay",
                    "outbox: the relay could not release its lanes: %s",
                    cause(error),
                )
            connections[self.using].close()

    def _wait_out(
        self, error: PublisherUnavailable | Error, stop: threading.Event
    ) -> None:
        self._pause = min(LONGEST_PAUSE, max(SHORTEST_PAUSE, self._pause * 2))
        if isinstance(error, PublisherUnavailable):
            why = str(error)
            self.publisher.close()
        else:
            why = cause(error)
            connections[self.using].close()
        message = "outbox: publisher %r pauses for %.1f s: %s"
        log(logging.WARNING, "outbox_relay", message, self.alias, self._pause, why)
        self.lanes.expect_progress(self._pause)
        stop.wait(self._pause)

    # --- Lanes ------------------------------------------------------------------------

    def _see_to_lanes(self) -> None:
        self.lanes.expect_progress(self.options.send_timeout)
        if not self.lanes.are_ours:
            self.lanes.join()
            self.cursor, self._share_at = Cursor(), 0.0
        if time.monotonic() >= self._share_at:
            self.lanes.share()
            self._share_at = time.monotonic() + SHARE_EVERY

    def _read(self) -> list[Event]:
        held_back = self.backlog.held_back(self.lanes.numbers)
        begun = time.monotonic()
        events = self.backlog.read(
            self.cursor.after(self.lanes.numbers, held_back, begun), self.options.batch
        )
        now = time.monotonic()
        self.cursor.has_read(_never_tried(events), now - begun, now)
        return events

    # --- Publishing -------------------------------------------------------------------

    def _publish(self, events: Sequence[Event]) -> None:
        outcomes: list[Outcome] = []
        try:
            self._send_in_order(events, outcomes)
        finally:
            self._note(outcomes)
        done = {
            outcome.event.position
            for outcome in outcomes
            if not isinstance(outcome, NotSent)
        }
        self.cursor.leave_behind(
            event for event in _never_tried(events) if event.position not in done
        )

    def _send_in_order(self, events: Sequence[Event], outcomes: list[Outcome]) -> None:
        """Send each event once the previous one of its key is confirmed. Stop when the
        batch has used up its time.
        """
        begun, stuck, readable = time.monotonic(), set[str](), list[Event]()
        for event in events:
            if event.key not in stuck and is_sealed(event.headers):
                reason = "it could not be decrypted; the log says why"
                outcomes.append(Refused(event, reason))
                stuck |= {event.key} - {""}
            elif event.key not in stuck:
                readable.append(event)

        def may_go_on() -> bool:
            self.lanes.expect_progress(self.options.send_timeout)
            is_over = time.monotonic() - begun > self.options.send_timeout
            return self.lanes.are_ours and not is_over

        chains = Chains(readable, self._suspects, may_go_on)
        for together in chains.passes():
            self._send(together, chains, outcomes)

    def _send(
        self, events: Iterable[Event], chains: Chains, outcomes: list[Outcome]
    ) -> None:
        """Send ``events`` together, and find out which one is to blame if that fails.

        An event that stays unconfirmed while one that was sent after it is confirmed is
        to blame. Others, and all of them if the publisher raised an error, are sent
        alone, and are to blame if that fails too. An event that made the publisher fail
        alone stays a suspect. If a connection broke only because it was old, no event
        is at fault.
        """
        done, confirmed, failure = set[int](), set[int](), None
        self.publisher.connect()
        try:
            for outcome in self.publisher.send(events, self.options.send_timeout):
                done.add(outcome.event.position)
                outcomes.append(outcome)
                if isinstance(outcome, Confirmed):
                    confirmed.add(outcome.event.position)
                    chains.confirm(outcome.event)
        except PublisherUnavailable:
            raise
        except Exception as error:
            # a publisher may raise anything; the relay goes on with its other events
            failure = error
            if not isinstance(error, ConnectionLost):
                log(
                    logging.ERROR,
                    "outbox_publisher",
                    "outbox: publisher %r failed",
                    self.alias,
                    error=error,
                )
        taken = [event.position for event in chains.taken]
        silent = [event for event in chains.taken if event.position not in done]
        if silent:
            self.publisher.close()
        blamed = silent
        if len(taken) > 1 or not self._suspects.intersection(taken):
            last = max((n for n, at in enumerate(taken) if at in confirmed), default=0)
            before = set[int]() if failure else set(taken[:last])
            blamed = [event for event in silent if event.position in before]
        outcomes.extend(Refused(event, self._blame(failure)) for event in blamed)
        self._suspects.difference_update(taken)
        for event in silent:
            if failure or event not in blamed:
                self._suspects.add(event.position)
            if event not in blamed:
                chains.suspect(event)

    def _blame(self, failure: Exception | None) -> str:
        if failure is None:
            return f"no confirmation within {self.options.send_timeout:g} s"
        if isinstance(failure, ConnectionLost):
            return f"connection lost: {failure}"
        return f"the publisher raised {type(failure).__name__}: {failure}"

    def _note(self, outcomes: Sequence[Outcome]) -> None:
        confirmed = [
            outcome.event for outcome in outcomes if isinstance(outcome, Confirmed)
        ]
        refused = [outcome for outcome in outcomes if isinstance(outcome, Refused)]
        postponed = [outcome for outcome in outcomes if isinstance(outcome, Postponed)]
        if postponed:
            self.backlog.note_postponed(postponed, self.lanes.id)
        if confirmed:
            self.backlog.note_confirmed(confirmed)
            self.published += len(confirmed)
        later, dead = (
            self.backlog.note_refused(refused, self.lanes.id) if refused else (0, 0)
        )
        send_several(signals.outbox_published, self.alias, len(confirmed), self.using)
        send_several(signals.outbox_failed, self.alias, later, self.using)
        send_several(signals.outbox_dead_lettered, self.alias, dead, self.using)


def _never_tried(events: Sequence[Event]) -> list[Event]:
    """Return the events that are read by the cursor. Those that have failed are read
    once they are due.
    """
    return [event for event in events if not event.attempts]
