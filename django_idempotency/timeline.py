"""What the columns of a record can tell of its life, and no more than that. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime

from django.utils.functional import Promise
from django.utils.text import format_lazy
from django.utils.translation import gettext_lazy as _
from django.utils.translation import ngettext_lazy

from django_idempotency.models import LIVE, IdempotencyRecord
from django_idempotency.policy import Mode


@dataclass(frozen=True, slots=True)
class Event:
    """``at`` is ``None`` for what happened at a time that is not kept. ``by``: the person who did it."""

    at: datetime | None
    what: str | Promise
    by: str = ""


def timeline(record: IdempotencyRecord, now: datetime) -> list[Event]:
    """The events of a record in order, what is still to come too."""
    return in_order(_events(record, now))


def in_order(events: Iterator[Event] | list[Event]) -> list[Event]:
    """By time; what has none keeps its place after what it was told after."""
    ordered: list[tuple[datetime | None, Event]] = []
    last = None
    for event in events:
        last = event.at or last
        ordered.append((last, event))
    return [event for _at, event in sorted(ordered, key=lambda pair: pair[0].timestamp() if pair[0] else 0)]


def _events(record: IdempotencyRecord, now: datetime) -> Iterator[Event]:
    yield Event(record.created_at, _("first claimed"))
    yield from _runs(record)
    if record.status in LIVE:
        yield _lease(record, now)
        return
    yield from _end(record)
    if record.replays:
        replayed = ngettext_lazy("replayed once, then", "replayed %(count)d times, last then", "count")
        yield Event(record.last_replayed_at, replayed % {"count": record.replays})
    if not record.held:
        deduplicated = _("deduplicates until then") if record.expires_at > now else _("deduplicated until then")
        yield Event(record.expires_at, deduplicated)
        yield Event(record.purge_at, _("kept until then, at least"))


def _runs(record: IdempotencyRecord) -> Iterator[Event]:
    if record.locked_at is None:
        if record.attempts > 1:
            again = ngettext_lazy("run again once", "run again %(count)d times", "count")
            yield Event(None, again % {"count": record.attempts - 1})
    elif record.attempts > 1:
        taken = _("claimed again, or taken over from a holder that was gone: attempt {number}")
        yield Event(record.locked_at, format_lazy(taken, number=record.attempts))


def _lease(record: IdempotencyRecord, now: datetime) -> Event:
    assert record.locked_until is not None  # by constraint
    if record.mode == Mode.ATOMIC:
        return Event(record.locked_until, _("claimed for so long; in atomic mode nobody renews that"))
    return Event(record.locked_until, _("the lease ran out") if record.locked_until < now else _("the lease ends"))


def _end(record: IdempotencyRecord) -> Iterator[Event]:
    if record.response_status is not None:
        answered = format_lazy(_("answered with {status}"), status=record.response_status)
        if record.response_body is None and record.updated_at >= record.expires_at:
            yield Event(None, answered)
            yield Event(record.updated_at, _("its body was dropped"))
        else:
            yield Event(record.updated_at, answered)
    elif record.held:
        yield Event(record.updated_at, format_lazy(_("held for a decision: {reason}"), reason=record.reason))
    else:
        yield Event(record.updated_at, format_lazy(_("failed, free to retry: {reason}"), reason=record.reason))
