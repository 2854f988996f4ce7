"""The relay reads events, has them published, and notes which were confirmed."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from django.db import DatabaseError, InterfaceError, connections, router

from django_idempotency.logs import cause, log
from django_idempotency.outbox import signals
from django_idempotency.outbox.backlog import Backlog
from django_idempotency.outbox.conf import make_publisher, options
from django_idempotency.outbox.cursor import Cursor
from django_idempotency.outbox.lanes import Lanes
from django_idempotency.outbox.models import OutboxEvent
from django_idempotency.outbox.publishers.base import (
    Confirmed,
    ConnectionLost,
    Event,
    NotSent,
    Outcome,
    PublisherUnavailable,
    Refused,
)
from django_idempotency.outbox.wakeup import Wakeup
from django_idempotency.outbox.waves import waves, without_keys

SHORTEST_PAUSE, LONGEST_PAUSE = 0.1, 30.0


class EventRelay:
    """Publishes the events of one publisher, beside any number of other relays of that publisher.

    No transaction is open and no row is locked while events are being sent. Events are sent at least once: if the
    process dies before it has noted a confirmation, the event is sent again.
    """

    def __init__(self, alias: str, *, using: str | None = None) -> None:
        self.alias = alias
        self.options = options()
        self.using = using or self.options.using or router.db_for_write(OutboxEvent)
        self.publisher = make_publisher(alias)
        self.backlog = Backlog(alias, self.using, self.options)
        self.lanes = Lanes(alias, self.using, self.options.lease)
        self.wakeup = Wakeup(alias, self.using, listen=self.options.notify)
        self.cursor = Cursor()
        self.published = 0
        self._suspects: set[int] = set()
        self._share_at = 0.0
        self._pause = 0.0

    # --- Running -------------------------------------------------------------------------------------------------

    def run(self, stop: threading.Event) -> None:
        """Publish until ``stop`` is set. Wait out outages of the database and the broker."""
        with self._ending():
            while not stop.is_set():
                with self._waiting_out(stop):
                    if self.step() == 0:
                        self.lanes.expect_progress(self.options.poll)
                        self.wakeup.wait(self.options.poll, stop)

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
        events = self._read()
        if events:
            self.publisher.connect()
            self._publish(events)
        return len(events)

    @contextmanager
    def _ending(self) -> Iterator[None]:
        try:
            yield
        finally:
            self.publisher.close()
            self.wakeup.close()
            try:
                self.lanes.leave()
            except (DatabaseError, InterfaceError) as error:
                log(logging.WARNING, "outbox_relay", "outbox: the relay left its lanes behind: %s", cause(error))
            connections[self.using].close()

    @contextmanager
    def _waiting_out(self, stop: threading.Event) -> Iterator[None]:
        try:
            yield
            self._pause = 0.0
        except (PublisherUnavailable, DatabaseError, InterfaceError) as error:
            self._pause = min(LONGEST_PAUSE, max(SHORTEST_PAUSE, self._pause * 2))
            message = "outbox: publisher %r pauses for %.1f s: %s"
            log(logging.WARNING, "outbox_relay", message, self.alias, self._pause, _reason(error))
            if isinstance(error, PublisherUnavailable):
                self.publisher.close()
            else:
                connections[self.using].close()
            self.lanes.expect_progress(self._pause)
            stop.wait(self._pause)

    # --- Lanes ---------------------------------------------------------------------------------------------------

    def _see_to_lanes(self) -> None:
        self.lanes.expect_progress(self.options.send_timeout)
        if not self.lanes.are_ours:
            self.lanes.join()
            self.cursor, self._share_at = Cursor(), 0.0
        if time.monotonic() >= self._share_at:
            self.lanes.share()
            self._share_at = time.monotonic() + self.options.poll

    def _read(self) -> list[Event]:
        held_back = self.backlog.held_back(self.lanes.numbers)
        begun = time.monotonic()
        events = self.backlog.read(self.cursor.after(self.lanes.numbers, held_back, begun), self.options.batch)
        now = time.monotonic()
        self.cursor.has_read(events, now - begun, now)
        return events

    # --- Publishing ----------------------------------------------------------------------------------------------

    def _publish(self, events: Sequence[Event]) -> None:
        outcomes: list[Outcome] = []
        try:
            self._send_in_waves(events, outcomes)
        finally:
            done = {outcome.event.position for outcome in outcomes if not isinstance(outcome, NotSent)}
            self.cursor.leave_behind(event for event in events if event.position not in done)
            self._note(outcomes)

    def _send_in_waves(self, events: Sequence[Event], outcomes: list[Outcome]) -> None:
        """Send each event once the previous one of its key is confirmed. Stop when the batch has used up its time."""
        begun, stuck = time.monotonic(), set[str]()
        for wave in waves(events):
            if not self.lanes.are_ours or time.monotonic() - begun > self.options.send_timeout:
                return
            self.lanes.expect_progress(self.options.send_timeout)
            ready = without_keys(wave, stuck)
            known = len(outcomes)
            self._send_suspects_alone(ready, outcomes)
            confirmed = {outcome.event.position for outcome in outcomes[known:] if isinstance(outcome, Confirmed)}
            stuck |= {event.key for event in ready if event.key and event.position not in confirmed}

    def _send_suspects_alone(self, events: Sequence[Event], outcomes: list[Outcome]) -> None:
        together = [event for event in events if event.position not in self._suspects]
        if together:
            self._send(together, outcomes)
        for event in events:
            if event.position in self._suspects:
                self._send([event], outcomes)

    def _send(self, events: Sequence[Event], outcomes: list[Outcome]) -> None:
        """Send ``events`` together, and find out which one is to blame if that fails.

        An event that stays unconfirmed while others are confirmed is to blame. If none was confirmed, or the connection
        broke, each is sent alone the next time, and is to blame if that fails too. If a connection broke only because
        it was old, no event is at fault.
        """
        done, confirmed, lost = set[int](), False, None
        try:
            self.publisher.connect()
            for outcome in self.publisher.send(events, self.options.send_timeout):
                outcomes.append(outcome)
                done.add(outcome.event.position)
                confirmed |= isinstance(outcome, Confirmed)
        except ConnectionLost as error:
            lost = error
        silent = [event for event in events if event.position not in done]
        if silent:
            self.publisher.close()
        was_alone = len(events) == 1 and events[0].position in self._suspects
        if was_alone or (confirmed and not lost):
            reason = f"connection lost: {lost}" if lost else f"no confirmation within {self.options.send_timeout:g} s"
            outcomes.extend(Refused(event, reason) for event in silent)
            self._suspects -= {event.position for event in events}
        else:
            self._suspects |= {event.position for event in silent}

    def _note(self, outcomes: Sequence[Outcome]) -> None:
        confirmed = [outcome.event for outcome in outcomes if isinstance(outcome, Confirmed)]
        refused = [outcome for outcome in outcomes if isinstance(outcome, Refused)]
        if confirmed:
            self.backlog.note_confirmed(confirmed)
            self.published += len(confirmed)
        later, dead = self.backlog.note_refused(refused, self.lanes.id) if refused else ([], [])
        signals.tell(self.alias, confirmed, later, dead, self.using)


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, PublisherUnavailable) else cause(error)
