"""The only catalogue of events: the name, signal, meaning and log level of each.

Signals, log records, counters, metrics and statistics all take their names from here.
Logs and counters are called directly, because they hear of most requests; only a
project's receivers are called by Django's signals.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

from django.dispatch import Signal
from django.urls import resolve
from django.utils.functional import Promise

from django_idempotency import signals
from django_idempotency.reporting.logs import cause, is_due, log
from django_idempotency.values.outcomes import Operation, Rejection, Unprotected
from django_idempotency.values.registry import Registry

# Called with the event and its family, ``None`` for those of the core, and by name with
# ``sender`` and the arguments of its signal: ``operation`` and others, or ``count`` and
# ``using`` for an event of a family.
Receiver = Callable[..., None]


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happens to a key. ``name`` is the name of its signal.

    ``reason`` tells the events of one signal apart. ``level`` is the level of its log
    record; ``None`` if it is not logged.
    """

    name: str
    signal: Signal
    meaning: str
    reason: Rejection | Unprotected | None = None
    level: int | None = None

    @property
    def counted_as(self) -> str:
        """The name under which statistics count it, such as
        ``request_rejected.in_flight``.
        """
        return f"{self.name}.{self.reason}" if self.reason else self.name

    @property
    def labels(self) -> dict[str, str]:
        """What metrics tell apart the events of one name by."""
        return {"reason": str(self.reason)} if self.reason else {}


def _event(
    name: str,
    meaning: str,
    level: int | None = None,
    *,
    reason: Rejection | Unprotected | None = None,
) -> Event:
    return Event(name, getattr(signals, name), meaning, reason, level)


def _rejected(reason: Rejection, meaning: str, level: int | None = None) -> Event:
    return _event("request_rejected", meaning, level, reason=reason)


def _unprotected(reason: Unprotected, why: str, level: int) -> Event:
    meaning = f"A request ran unprotected despite its key: {why}"
    return _event("request_unprotected", meaning, level, reason=reason)


INFO, WARNING, ERROR = logging.INFO, logging.WARNING, logging.ERROR
EVENTS = (
    _event("key_claimed", "A key without a response was claimed; its operation runs."),
    _event(
        "key_taken_over",
        "A dead owner's key was claimed; its operation runs again.",
        WARNING,
    ),
    _event("response_replayed", "A stored response was replayed."),
    _rejected(
        Rejection.IN_FLIGHT,
        "A duplicate was asked to retry later: the first request is still running.",
    ),
    _rejected(
        Rejection.WAIT_TIMEOUT,
        "A duplicate timed out waiting for the first request, and was asked to retry"
        " later.",
        INFO,
    ),
    _rejected(
        Rejection.KEY_REUSED, "A key was sent with a different request.", WARNING
    ),
    _rejected(
        Rejection.ON_HOLD, "A request was refused because its key is on hold.", WARNING
    ),
    _rejected(
        Rejection.FORBIDDEN,
        "A caller was not allowed to see the stored response.",
        WARNING,
    ),
    _rejected(
        Rejection.NOT_ADMITTED, "A new key was not admitted: nothing was run.", INFO
    ),
    _unprotected(
        Unprotected.NO_SCOPE,
        "its caller is not a user with a primary key. If such callers are"
        " authenticated, for example by an API key, set a scope in the view's policy: a"
        " callable that takes the request and returns the id of the caller's account.",
        WARNING,
    ),
    _unprotected(
        Unprotected.NO_HANDLER,
        "the view responded without calling the handler, where the entry point is."
        " Call super().dispatch(), and let no decorator respond in its place.",
        ERROR,
    ),
    _unprotected(
        Unprotected.ASYNC_CLASS,
        "its view is an async class of REST framework, for which there is no entry"
        " point. Make it sync, or write an async view of Django.",
        ERROR,
    ),
    _unprotected(
        Unprotected.FAIL_OPEN,
        "the store can't be reached, and the policy sets fail_open.",
        ERROR,
    ),
    _event("key_completed", "A response was stored."),
    _event("key_failed", "A run failed; a retry may run again."),
    _event("key_released", "A key was released: it counts as never used."),
    _event(
        "claim_lost",
        "Another request took the key between the claim and the row lock: nothing was"
        " run.",
        INFO,
    ),
    _event(
        "stale_write_rejected",
        "An owner returned too late: its write was rejected by the fencing token.",
        WARNING,
    ),
    _event(
        "key_reaped",
        "Maintenance freed a key whose lease had lapsed, or put it on hold.",
        INFO,
    ),
    _event("operator_decided", "An operator decided about a key.", INFO),
    _event(
        "response_viewed",
        "A stored response body was shown in the admin, or exported.",
        INFO,
    ),
    _event("store_failed", "The store failed during a claim or a completion.", ERROR),
)


@dataclass(frozen=True, slots=True)
class Family:
    """Events that a wing adds. Each signal is sent once for several of them, by
    ``send_several``.

    ``name``: the wing's, in logs and statistics. ``label``: what the ``sender`` of the
    signals is, such as ``"publisher"``; metrics have a label of this name. ``titles``:
    what statistics call each event, by its name.
    """

    name: str
    label: str
    events: tuple[Event, ...]
    titles: Mapping[str, str | Promise]


families: Registry[Family] = Registry()

_by_signal: dict[Signal, list[tuple[Event, Family | None]]] = defaultdict(list)
for _one in EVENTS:
    _by_signal[_one.signal].append((_one, None))


@families.for_each
def _take_in(family: Family) -> None:
    for event in family.events:
        _by_signal[event.signal].append((event, family))


receivers: Registry[Receiver] = Registry()


@lru_cache(maxsize=256)
def _receivers_of(signal: Signal, reason: object) -> tuple[Callable[..., object], ...]:
    """Return what to call for ``signal``, but for the receivers of a project."""
    return tuple(
        partial(receive, event, family)
        for event, family in _by_signal.get(signal, ())
        if event.reason in (None, reason)
        for receive in receivers
        if receive is not log_event or event.level is not None
    )


for _registry in (families, receivers):
    _registry.for_each(lambda _item: _receivers_of.cache_clear())


def send(signal: Signal, operation: Operation, **named: Any) -> None:
    """Send ``signal``. An error in a listener or a receiver is logged and not
    raised.
    """
    _send(signal, operation.sender, {"operation": operation, **named})


def send_several(
    signal: Signal, sender: str, count: int, using: str, **named: Any
) -> None:
    """Send a wing's ``signal`` once for ``count`` events, if there are any. Errors are
    handled as by ``send``. ``named``: more arguments for receivers.
    """
    if count:
        _send(signal, sender, {"count": count, "using": using, **named})


def _send(signal: Signal, sender: object, named: dict[str, Any]) -> None:
    calls = _receivers_of(signal, named.get("reason"))
    if signal.receivers:
        calls += (signal.send_robust,)
    for call in calls:
        try:
            call(sender=sender, **named)
        except Exception as error:
            # Django logs an error with the receiver's name, and fails if it has none
            message = "error in a receiver of a signal"
            log(
                logging.ERROR,
                "receiver",
                message,
                operation=named.get("operation"),
                error=error,
            )


def log_event(
    event: Event, family: Family | None, *, sender: Any, **named: Any
) -> None:
    assert event.level is not None
    if family is not None:
        wing = (family.name, family.label, sender, event.meaning, named["count"])
        log(event.level, event.name, "%s: %s %r: %s (events: %d)", *wing)
        return
    operation: Operation = named["operation"]
    by_view = isinstance(event.reason, Unprotected)
    about = f"view {operation.view}" if by_view else f"record {operation.id}"
    # a caller can send it without end
    if event.reason and not is_due(f"{event.counted_as} {about}"):
        return
    detail = cause(named["error"]) if "error" in named else named.get("act")
    what = (about, event.meaning, f" ({detail})" if detail else "")
    fields: dict[str, Any] = {
        "operation": operation,
        "view": "" if operation.view else _route(operation.path),
        "attempt": named.get("attempt"),
        "reason": event.reason,
    }
    log(event.level, event.name, "idempotency %s: %s%s", *what, **fields)


def _route(path: str) -> str:
    """Return the route of the path that a record keeps, which has no view; empty if the
    project has none for it any more.
    """
    try:
        return str(resolve(path).route) if path else ""
    except Exception:  # importing the project's URLs may raise anything
        return ""
