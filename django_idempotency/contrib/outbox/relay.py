"""The relay reads events, has them published, and notes which were confirmed."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from django.db import Error, connections

from django_idempotency.contrib.outbox import signals
from django_idempotency.contrib.outbox.backlog import Backlog
from django_idempotency.contrib.outbox.conf import make_publisher, options
from django_idempotency.contrib.outbox.cursor import Cursor
from django_idempotency.contrib.outbox.lanes import Lanes
from django_idempotency.contrib.outbox.publishing import database, is_sealed
from django_idempotency.messages.publisher import (
    Confirmed,
    ConnectionLost,
    Event,
    NotSent,
    Outcome,
    PublisherUnavailable,
    Refused,
)
from django_idempotency.reporting.events import send_several
from django_idempotency.reporting.logs import cause, log

SHORTEST_PAUSE, LONGEST_PAUSE = 0.1, 30.0
SHARE_EVERY = 1.0  # seconds


class EventRelay:
    """Publishes the events of one publisher, beside any number of other relays of that publisher.

    No transaction is open and no row is locked while events are being sent. Events are sent at least once: if the
    process dies before it has noted a confirmation, the event is sent again.
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

    # --- Running -------------------------------------------------------------------------------------------------

    def run(self, stop: threading.Event) -> None:
        """Publish until ``stop`` is set. Wait out outages of the database and the broker."""
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
            self.cursor = (
                Cursor()
            )  # events that were read may not be published, or it may not be noted
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

    # --- Lanes ---------------------------------------------------------------------------------------------------

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

    # --- Publishing ----------------------------------------------------------------------------------------------

    def _publish(self, events: Sequence[Event]) -> None:
        outcomes: list[Outcome] = []
        try:
            self._send_in_waves(events, outcomes)
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

    def _send_in_waves(self, events: Sequence[Event], outcomes: list[Outcome]) -> None:
        """Send each event once the previous one of its key is confirmed. Stop when the batch has used up its time."""
        begun, stuck = time.monotonic(), set[str]()
        for wave in waves(events):
            ready, known = (
                [event for event in wave if event.key not in stuck],
                len(outcomes),
            )
            unreadable = [event for event in ready if is_sealed(event.headers)]
            outcomes.extend(
                Refused(event, "it could not be decrypted; the log says why")
                for event in unreadable
            )
            for group in self._apart(
                [event for event in ready if event not in unreadable]
            ):
                if (
                    not self.lanes.are_ours
                    or time.monotonic() - begun > self.options.send_timeout
                ):
                    return
                self.lanes.expect_progress(self.options.send_timeout)
                self._send(group, outcomes)
            confirmed = {
                outcome.event.key
                for outcome in outcomes[known:]
                if isinstance(outcome, Confirmed)
            }
            stuck |= {event.key for event in ready} - confirmed - {""}

    def _apart(self, events: Sequence[Event]) -> Iterator[list[Event]]:
        """Yield the events to send together, then each suspect alone, including those that were found meanwhile."""
        if together := [
            event for event in events if event.position not in self._suspects
        ]:
            yield together
        yield from ([event] for event in events if event.position in self._suspects)

    def _send(self, events: Sequence[Event], outcomes: list[Outcome]) -> None:
        """Send ``events`` together, and find out which one is to blame if that fails.

        An event that stays unconfirmed while others are confirmed is to blame. If none was confirmed, or the publisher
        raised an error, each is sent alone, and is to blame if that fails too. An event that made the publisher fail
        alone stays a suspect. If a connection broke only because it was old, no event is at fault.
        """
        done, confirmed, failure = set[int](), False, None
        self.publisher.connect()
        try:
            for outcome in self.publisher.send(events, self.options.send_timeout):
                done.add(outcome.event.position)
                outcomes.append(outcome)
                confirmed |= isinstance(outcome, Confirmed)
        except PublisherUnavailable:
            raise
        except Exception as error:  # a publisher may raise anything; the relay goes on with its other events
            failure = error
            if not isinstance(error, ConnectionLost):
                log(
                    logging.ERROR,
                    "outbox_publisher",
                    "outbox: publisher %r failed",
                    self.alias,
                    error=error,
                )
        silent = [event for event in events if event.position not in done]
        if silent:
            self.publisher.close()
        was_alone = len(events) == 1 and events[0].position in self._suspects
        blamed = silent if was_alone or (confirmed and failure is None) else []
        outcomes.extend(Refused(event, self._blame(failure)) for event in blamed)
        self._suspects -= {event.position for event in events}
        if failure is not None or not blamed:
            self._suspects |= {event.position for event in silent}

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
        if confirmed:
            self.backlog.note_confirmed(confirmed)
            self.published += len(confirmed)
        later, dead = (
            self.backlog.note_refused(refused, self.lanes.id) if refused else (0, 0)
        )
        send_several(signals.outbox_published, self.alias, len(confirmed), self.using)
        send_several(signals.outbox_failed, self.alias, later, self.using)
        send_several(signals.outbox_dead_lettered, self.alias, dead, self.using)


def waves(events: Iterable[Event]) -> list[list[Event]]:
    """Divide ``events``, in order, so that no part has two of a key and a key's events are in successive parts."""
    parts: dict[int, list[Event]] = defaultdict(list)
    of_key = Counter[str]()
    for event in events:
        parts[of_key[event.key]].append(event)
        of_key[event.key] += bool(event.key)
    return list(parts.values())


def _never_tried(events: Sequence[Event]) -> list[Event]:
    """Return the events that are read by the cursor. Those that have failed are read once they are due."""
    return [event for event in events if not event.attempts]
