"""Describe a record to operators: what it is, what happens by itself, what is safe to
do now, and what has happened.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from django.db import connections
from django.db.models import TextChoices
from django.utils.functional import Promise
from django.utils.text import format_lazy
from django.utils.translation import gettext, ngettext_lazy
from django.utils.translation import gettext_lazy as _

from django_idempotency.maintenance import history
from django_idempotency.maintenance.companions import companions
from django_idempotency.maintenance.formatting import age
from django_idempotency.models import LIVE, Status
from django_idempotency.values.policy import Atomic, Lease
from django_idempotency.values.printable import printable
from django_idempotency.values.rules import is_for_good


class Standing(TextChoices):
    """How a record stands, for an operator. The value is for programs, the label for
    people.
    """

    RUNNING = "running", _("running")
    LAPSED = "lapsed", _("lapsed")
    ON_HOLD = "on hold", _("on hold")
    RETRYABLE = "free to retry", _("free to retry")
    FAILED = "failed", _("failed")
    COMPLETED = "completed", _("completed")


def standing_of(record: Any) -> Standing:
    """Return how a record that was read with ``now`` and ``locked`` (``RowLocked``)
    stands. Pure.

    A locked row means that an owner is at work.
    """
    if record.status in LIVE:
        return (
            Standing.LAPSED
            if record.locked_until < record.now and not record.locked
            else Standing.RUNNING
        )
    if record.on_hold:
        return Standing.ON_HOLD
    if record.response_status is None:
        return Standing.RETRYABLE
    return Standing(record.status)


def seconds_of(record: Any) -> float:
    """Return for how many seconds the record has been in its state: since its claim, or
    since its end.
    """
    seconds: float = (
        record.now - (record.locked_at or record.updated_at)
    ).total_seconds()
    return seconds


def shown_reason(record: Any) -> str:
    """Return the reason of ``record``, printable and in the active language; empty if
    it has none.

    Reasons are stored and logged in English.
    """
    return printable(gettext(record.reason))


@dataclass(frozen=True, slots=True)
class Advice:
    """Printable sentences: ``what`` a record is, what happens ``by_itself``, and what
    is ``safe`` to do now.
    """

    what: str | Promise
    by_itself: str | Promise
    safe: str | Promise


_NEXT_RUNS = _(
    "The next request with the key runs again; without one, the reaper frees it."
)
_RETRY_IS_SAFE = _(
    "Nothing has to be done. A retry is safe as far as this database goes: what the"
    " owner wrote here was rolled back."
)
_IT_HAS_ENDED = _("Nothing has to be done, and nothing can be done: it has ended.")

# What ``advice`` says in each case. ``age`` and ``claimed`` are for how long a record
# has been so, ``left`` and ``late`` are the time until and since the end of its lease
# or of its retention, and ``lapsed`` is one of these:
ONCE_LAPSED = {
    True: _("The next request with the key, or the reaper, puts it on hold."),
    False: _NEXT_RUNS,
}
ADVICE = {
    "on hold": Advice(
        _(
            "On hold for %(age)s: it is not known whether the operation took place"
            " (%(reason)s)."
        ),
        _(
            "Nothing. It never runs again and is never deleted. Retries get 409 until"
            " an operator decides."
        ),
        _(
            "Find out whether the operation took place. If it did, resolve it with its"
            " response. If it did not, allow a retry. If it must no longer take place,"
            " mark it as failed."
        ),
    ),
    "free to retry": Advice(
        _("Free to retry: the last run failed %(age)s ago (%(reason)s)."),
        _(
            "The next request with the key runs again. Without one, the record is"
            " deleted once its retention is over."
        ),
        _(
            "Nothing has to be done. If it must never run again, mark it as failed or"
            " resolve it."
        ),
    ),
    "unfinished": Advice(
        _("Free to retry: the last run failed %(age)s ago (%(reason)s)."),
        _(
            "The next request with the key runs again. Without one, the record stays:"
            " the operation may be done in part."
        ),
        _(
            "Nothing has to be done. If it must never run again, mark it as failed or"
            " resolve it."
        ),
    ),
    "ended": Advice(
        _("It got its response, %(status)s, %(age)s ago."),
        _("Every retry gets this response for another %(left)s."),
        _IT_HAS_ENDED,
    ),
    "ended for good": Advice(
        _("It got its response, %(status)s, %(age)s ago."),
        _("Every retry gets this response, for good: the record is never deleted."),
        _IT_HAS_ENDED,
    ),
    "expired": Advice(
        _("It got its response, %(status)s, %(age)s ago."),
        _("The key has expired: the next request with it runs as new."),
        _IT_HAS_ENDED,
    ),
    "leased": Advice(
        _(
            "In flight for %(claimed)s; its lease ends in %(left)s, so its owner may be"
            " alive."
        ),
        _(
            "The owner renews the lease while it runs, and then ends. If it does not:"
            " %(lapsed)s"
        ),
        _("Wait. If the owner is well but does not renew its lease, extend the lease."),
    ),
    "lapsed": Advice(
        _(
            "Stuck: in flight for %(claimed)s, and its lease ran out %(late)s ago. Its"
            " owner is gone, or cut off."
        ),
        "%(lapsed)s",
        _(
            "If that is soon, wait for it. Before you allow a retry, resolve it or mark"
            " it as failed, find out whether the operation took place."
        ),
    ),
    "started": Advice(
        _("Accepted %(claimed)s ago, but not started."), _NEXT_RUNS, _RETRY_IS_SAFE
    ),
    "locked": Advice(
        _(
            "In flight for %(claimed)s: a transaction has its row locked, so its owner"
            " is alive."
        ),
        _(
            "When that transaction ends, the response is stored, or nothing is left of"
            " the run."
        ),
        _(
            "Wait. To stop it, end its transaction: nothing that it wrote in this"
            " database remains."
        ),
    ),
    "locked or not": Advice(
        _(
            "In flight for %(claimed)s. This database does not show whether its owner"
            " is alive."
        ),
        _(
            "If its owner is gone, the next request with the key runs again, or the"
            " reaper frees it."
        ),
        _("Wait. A retry can't be allowed while its owner has the row locked."),
    ),
    "not locked": Advice(
        _(
            "In flight for %(claimed)s, and its row is not locked: its owner is about"
            " to begin, or is gone."
        ),
        _NEXT_RUNS,
        _RETRY_IS_SAFE,
    ),
    "stuck": Advice(
        _(
            "Stuck: in flight for %(claimed)s, and its row is not locked. Its owner is"
            " gone."
        ),
        _NEXT_RUNS,
        _RETRY_IS_SAFE,
    ),
}


def advice(record: Any) -> Advice:
    """Return what an operator should know about a record that was read with ``now`` and
    ``locked``.
    """
    said, since = ADVICE[_case(record)], age(seconds_of(record))
    left = ((record.locked_until or record.expires_at) - record.now).total_seconds()
    facts = {
        "age": since,
        "claimed": since,
        "left": age(left),
        "late": age(-left),
        "reason": (shown_reason(record) or _("no reason is known")).rstrip("."),
        "status": record.response_status,
        "lapsed": ONCE_LAPSED[record.hold_on_crash],
    }
    return Advice(
        *(str(text) % facts for text in (said.what, said.by_itself, said.safe))
    )


def _case(record: Any) -> str:
    match standing_of(record):
        case Standing.RETRYABLE if _is_kept_for_good(record):
            return "unfinished"
        case Standing.ON_HOLD | Standing.RETRYABLE as stands:
            return str(stands)
        case Standing.FAILED | Standing.COMPLETED:
            if _is_kept_for_good(record):
                return "ended for good"
            return "ended" if record.expires_at > record.now else "expired"
    lapsed = record.locked_until < record.now
    if record.mode == Lease.word:
        return "lapsed" if lapsed else "leased"
    if record.status == Status.STARTED:
        return "started"
    if record.locked:
        return "locked"
    if connections[record._state.db].vendor != "postgresql":
        return "locked or not"
    return "stuck" if lapsed else "not locked"


def _is_kept_for_good(record: Any) -> bool:
    return is_for_good((record.expires_at - record.now).total_seconds())


# --- What is known of a record's life: from its columns and its history ---------------


@dataclass(frozen=True, slots=True)
class TimelineEntry:
    """An event. ``by``: the person who did it."""

    at: datetime
    what: str | Promise
    by: str = ""


def timeline(record: Any) -> list[TimelineEntry]:
    """Return the events of a record that was read with ``now``, in order, including
    those still to come.
    """
    of_wings = (
        TimelineEntry(at, what)
        for each in companions
        for at, what in each.events(record)
    )
    return sorted(
        [*_events(record), *of_wings, *_decisions(record)],
        key=lambda event: event.at.timestamp(),
    )


def _decisions(record: Any) -> Iterator[TimelineEntry]:
    for entry in history.entries_of_life(record) if history.is_kept() else ():
        yield TimelineEntry(
            entry.action_time,
            printable(entry.get_change_message()),
            by=printable(str(entry.user)),
        )


def _events(record: Any) -> Iterator[TimelineEntry]:
    yield TimelineEntry(record.created_at, _("first claimed"))
    if record.status in LIVE:
        if record.attempts > 1:
            taken = _(
                "claimed again, or taken over from an owner that was gone: attempt"
                " {number}"
            )
            yield TimelineEntry(
                record.locked_at, format_lazy(taken, number=record.attempts)
            )
        yield TimelineEntry(record.locked_until, _lease(record))
        return
    yield TimelineEntry(record.updated_at, _outcome(record))
    if record.last_replayed_at is not None:
        replayed = ngettext_lazy(
            "replayed once", "the last of %(count)d replays", "count"
        )
        yield TimelineEntry(
            record.last_replayed_at, replayed % {"count": record.replays}
        )
    if not (record.on_hold or _is_kept_for_good(record)):
        deduplicated = (
            _("deduplicates until then")
            if record.expires_at > record.now
            else _("deduplicated until then")
        )
        yield TimelineEntry(record.expires_at, deduplicated)
        yield TimelineEntry(record.purge_at, _("kept at least until then"))


def _lease(record: Any) -> str | Promise:
    if record.mode == Atomic.word:
        return _("claimed until then; atomic mode does not renew it")
    return (
        _("the lease ran out")
        if record.locked_until < record.now
        else _("the lease ends")
    )


def _outcome(record: Any) -> str | Promise:
    if record.response_status is not None:
        if record.response_body is None and record.updated_at >= record.expires_at:
            return _("its body was dropped")
        return format_lazy(
            _("ended with the response {status}"), status=record.response_status
        )
    text = (
        _("put on hold: {reason}")
        if record.on_hold
        else _("failed, free to retry: {reason}")
    )
    return format_lazy(text, reason=shown_reason(record))
