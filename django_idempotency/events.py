"""The only catalogue of events: the name, signal, meaning and log level of each.

Signals, log records, counters, metrics and statistics all take their names from here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial, update_wrapper
from typing import Any

from django.dispatch import Signal

from django_idempotency import signals
from django_idempotency.logs import cause, log
from django_idempotency.outcomes import Operation, Rejection


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happens to a key, or to events of the outbox. ``name`` is the name of its signal.

    ``reason`` tells the events of ``request_rejected`` apart. ``level`` is the level of its log record; ``None`` if
    it is not logged. ``is_outcome``: whether it is the outcome of a caller's claim.
    """

    signal: Signal
    meaning: str
    reason: Rejection | None = None
    level: int | None = None
    is_outcome: bool = False

    @property
    def name(self) -> str:
        return _NAMES[self.signal]

    @property
    def counted_as(self) -> str:
        """The name under which statistics count it, such as ``request_rejected.in_flight``."""
        return f"{self.name}.{self.reason}" if self.reason else self.name


def _rejected(reason: Rejection, meaning: str, level: int | None = None) -> Event:
    return Event(signals.request_rejected, meaning, reason=reason, level=level, is_outcome=True)


_NAMES = {signal: name for name, signal in vars(signals).items() if isinstance(signal, Signal)}

EVENTS = (
    Event(signals.key_claimed, "A key had no response yet: it was claimed, and runs.", is_outcome=True),
    Event(
        signals.key_taken_over,
        "A dead owner's key was claimed, and runs again.",
        level=logging.WARNING,
        is_outcome=True,
    ),
    Event(signals.response_replayed, "A stored response was replayed.", is_outcome=True),
    _rejected(Rejection.IN_FLIGHT, "A duplicate was told to ask again: the first request still runs."),
    _rejected(Rejection.WAIT_TIMEOUT, "A duplicate waited in vain, and was told to ask again.", logging.INFO),
    _rejected(Rejection.KEY_REUSED, "A key came with another request.", logging.WARNING),
    _rejected(Rejection.ON_HOLD, "A caller was told that an operator has to decide.", logging.WARNING),
    _rejected(Rejection.TOO_OLD, "A request was older than anything known of its key.", logging.INFO),
    _rejected(Rejection.FORBIDDEN, "A caller was not allowed to see the stored response.", logging.WARNING),
    _rejected(Rejection.NOT_ADMITTED, "A new key was not admitted: nothing was run.", logging.INFO),
    Event(signals.key_completed, "A response was stored."),
    Event(signals.key_failed, "A run failed; a retry may run again."),
    Event(signals.key_released, "A run left its key as if never used."),
    Event(signals.claim_lost, "A rival was quicker between claim and row lock: nothing was run.", level=logging.INFO),
    Event(
        signals.stale_write_rejected,
        "An owner came back too late: the fencing token kept it from writing.",
        level=logging.WARNING,
    ),
    Event(signals.key_reaped, "Maintenance freed a key whose lease had lapsed, or put it on hold.", level=logging.INFO),
    Event(signals.operator_decided, "An operator decided about a key.", level=logging.INFO),
    Event(signals.response_viewed, "A stored response body was shown in the admin, or exported.", level=logging.INFO),
    Event(signals.store_failed, "The store failed, at the claim or at the completion.", level=logging.ERROR),
)

# Their signals are sent for several events of the outbox at once, so they have receivers of their own.
OUTBOX_EVENTS = (
    Event(signals.outbox_published, "An event of the outbox was published: its publisher confirmed it."),
    Event(signals.outbox_failed, "An event of the outbox was refused; it is tried again."),
    Event(
        signals.outbox_dead_lettered, "An event of the outbox was given up: it is a dead letter.", level=logging.ERROR
    ),
    Event(signals.outbox_requeued, "An operator had a dead letter of the outbox tried again.", level=logging.INFO),
)

# Called with the event and the arguments of its signal: ``operation`` and others, or ``sender``, ``count`` and
# ``using`` for one of ``OUTBOX_EVENTS``.
Receiver = Callable[..., None]


def listen(receive: Receiver, uid: Hashable, events: Iterable[Event] = EVENTS) -> None:
    """Connect ``receive`` to each of ``events``. Calling this again with the same ``uid`` changes nothing."""
    for event in events:
        event.signal.connect(_receiving(receive, event), weak=False, dispatch_uid=(uid, event.counted_as))


def stop_listening(uid: Hashable) -> None:
    """Undo ``listen`` for the same ``uid``."""
    for event in (*EVENTS, *OUTBOX_EVENTS):
        event.signal.disconnect(dispatch_uid=(uid, event.counted_as))


def _receiving(receive: Receiver, event: Event) -> Receiver:
    if event.reason is None:
        return update_wrapper(partial(receive, event), receive)  # when Django logs an error, it names the receiver

    def receive_if_meant(**named: Any) -> None:
        if event.reason == named.get("reason"):
            receive(event, **named)

    return receive_if_meant


def log_events() -> None:
    """Log every event that has a level, from now on."""
    listen(_log, __name__, [event for event in EVENTS if event.level is not None])
    listen(_log_of_outbox, __name__, [event for event in OUTBOX_EVENTS if event.level is not None])


def _log(event: Event, *, operation: Operation, **named: Any) -> None:
    assert event.level is not None
    message = "idempotency record %s: %s" + " (%s)" * bool(details := ", ".join(_details(named)))
    log(
        event.level,
        event.name,
        message,
        *(operation.id, event.meaning, details)[: 2 + bool(details)],
        operation=operation,
        attempt=named.get("attempt"),
        reason=event.reason,
    )


def _log_of_outbox(event: Event, *, sender: str, count: int, **_named: Any) -> None:
    assert event.level is not None
    log(event.level, event.name, "outbox: publisher %r: %s (events: %d)", sender, event.meaning, count)


def _details(named: Mapping[str, Any]) -> Iterator[str]:
    if "error" in named:
        yield cause(named["error"])
    if "act" in named:
        yield str(named["act"])
