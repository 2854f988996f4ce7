"""The only catalogue of events: the name, signal, meaning and log level of each.

Signals, log records, counters, metrics and statistics all take their names from here. Logs and counters are called
directly, because they hear of most requests; only a project's receivers are called by Django's signals.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from django.dispatch import Signal
from django.utils.functional import Promise

from django_idempotency import signals
from django_idempotency.reporting.logs import cause, is_due, log
from django_idempotency.values.outcomes import Operation, Rejection

# Called with the event and the arguments of its signal: ``operation`` and others, or ``sender``, ``count`` and
# ``using`` for an event of a family.
Receiver = Callable[..., None]


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happens to a key. ``name`` is the name of its signal.

    ``reason`` tells the events of ``request_rejected`` apart. ``level`` is the level of its log record; ``None`` if
    it is not logged.
    """

    name: str
    signal: Signal
    meaning: str
    reason: Rejection | None = None
    level: int | None = None

    @property
    def counted_as(self) -> str:
        """The name under which statistics count it, such as ``request_rejected.in_flight``."""
        return f"{self.name}.{self.reason}" if self.reason else self.name

    @property
    def is_outcome(self) -> bool:
        return self.name in OUTCOMES


OUTCOMES = ("key_claimed", "key_taken_over", "response_replayed", "request_rejected")


def _event(name: str, meaning: str, level: int | None = None, *, reason: Rejection | None = None) -> Event:
    return Event(name, getattr(signals, name), meaning, reason, level)


def _rejected(reason: Rejection, meaning: str, level: int | None = None) -> Event:
    return _event("request_rejected", meaning, level, reason=reason)


INFO, WARNING, ERROR = logging.INFO, logging.WARNING, logging.ERROR
EVENTS = (
    _event("key_claimed", "A key had no response yet: it was claimed, and runs."),
    _event("key_taken_over", "A dead owner's key was claimed, and runs again.", WARNING),
    _event("response_replayed", "A stored response was replayed."),
    _rejected(Rejection.IN_FLIGHT, "A duplicate was asked to retry later: the first request is still running."),
    _rejected(Rejection.WAIT_TIMEOUT, "A duplicate waited in vain, and was asked to retry later.", INFO),
    _rejected(Rejection.KEY_REUSED, "A key was sent with a different request.", WARNING),
    _rejected(Rejection.ON_HOLD, "A request was refused because its key is on hold.", WARNING),
    _rejected(Rejection.FORBIDDEN, "A caller was not allowed to see the stored response.", WARNING),
    _rejected(Rejection.NOT_ADMITTED, "A new key was not admitted: nothing was run.", INFO),
    _event("key_completed", "A response was stored."),
    _event("key_failed", "A run failed; a retry may run again."),
    _event("key_released", "A key was released: it counts as never used."),
    _event("claim_lost", "Another request took the key between claim and row lock: nothing was run.", INFO),
    _event("stale_write_rejected", "An owner returned too late: its write was rejected by the fencing token.", WARNING),
    _event("key_reaped", "Maintenance freed a key whose lease had lapsed, or put it on hold.", INFO),
    _event("operator_decided", "An operator decided about a key.", INFO),
    _event("response_viewed", "A stored response body was shown in the admin, or exported.", INFO),
    _event("store_failed", "The store failed, at the claim or at the completion.", ERROR),
)


@dataclass(frozen=True, slots=True)
class Family:
    """Events that a wing adds. Each signal is sent once for several of them, by ``send_several``.

    ``name``: the wing's, in logs and statistics. ``label``: what the ``sender`` of the signals is, such as
    ``"publisher"``; metrics have a label of this name. ``titles``: what statistics call each event, by its name.
    """

    name: str
    label: str
    events: tuple[Event, ...]
    titles: Mapping[str, str | Promise]


_families: list[Family] = []
_followers: dict[Hashable, tuple[Receiver, Callable[[Family], None]]] = {}


def register(family: Family) -> None:
    """Have logs, counters and metrics take in ``family``."""
    if family in _families:  # an AppConfig can get ready again
        return
    _families.append(family)
    for uid, follower in _followers.items():
        _introduce(family, uid, *follower)


def families() -> list[Family]:
    return list(_families)


_listeners: dict[Signal, dict[Hashable, tuple[Event, Receiver]]] = defaultdict(dict)


def listen(receive: Receiver, uid: Hashable, events: Iterable[Event] = EVENTS) -> None:
    """Call ``receive`` for each of ``events``. Calling this again with the same ``uid`` changes nothing."""
    for event in events:
        _listeners[event.signal].setdefault((uid, event.counted_as), (event, receive))


def listen_to_families(
    receive: Receiver, uid: Hashable, introduce: Callable[[Family], None] = lambda _family: None
) -> None:
    """Connect ``receive`` to the events of every family, now or once it is registered. ``introduce`` gets it first."""
    _followers[uid] = receive, introduce
    for family in _families:
        _introduce(family, uid, receive, introduce)


def _introduce(family: Family, uid: Hashable, receive: Receiver, introduce: Callable[[Family], None]) -> None:
    introduce(family)
    listen(partial(receive, family), uid, family.events)


def stop_listening(uid: Hashable) -> None:
    """Undo ``listen`` and ``listen_to_families`` for the same ``uid``."""
    _followers.pop(uid, None)
    for event in (*EVENTS, *(event for family in _families for event in family.events)):
        _listeners[event.signal].pop((uid, event.counted_as), None)


def send(signal: Signal, operation: Operation, **named: Any) -> None:
    """Send ``signal``. An error in a listener or a receiver is logged and not raised."""
    _send(signal, operation.sender, operation, {"operation": operation, **named})


def send_several(signal: Signal, sender: str, count: int, using: str) -> None:
    """Send a wing's ``signal`` once for ``count`` events, if there are any. Errors are handled as by ``send``."""
    if count:
        _send(signal, sender, None, {"count": count, "using": using})


def _send(signal: Signal, sender: object, operation: Operation | None, named: dict[str, Any]) -> None:
    calls: list[Callable[..., object]] = [
        partial(receive, event, sender=sender)
        for event, receive in tuple(_listeners.get(signal, {}).values())
        if event.reason in (None, named.get("reason"))
    ]
    if signal.receivers:
        calls.append(partial(signal.send_robust, sender=sender))
    for call in calls:
        try:
            call(**named)
        except Exception as error:  # Django logs an error with the receiver's name, and fails if it has none
            log(logging.ERROR, "receiver", "error in a receiver of a signal", operation=operation, error=error)


def log_events() -> None:
    listen(_log, __name__, [event for event in EVENTS if event.level is not None])
    listen_to_families(_log_several, __name__)


def _log(event: Event, *, operation: Operation, **named: Any) -> None:
    assert event.level is not None
    if event.reason and not is_due(f"{event.counted_as} {operation.id}"):  # a caller can send it without end
        return
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


def _log_several(family: Family, event: Event, *, sender: str, count: int, **_named: Any) -> None:
    if event.level is not None:
        log(
            event.level,
            event.name,
            "%s: %s %r: %s (events: %d)",
            *(family.name, family.label, sender, event.meaning, count),
        )


def _details(named: Mapping[str, Any]) -> Iterator[str]:
    if "error" in named:
        yield cause(named["error"])
    if "act" in named:
        yield str(named["act"])
