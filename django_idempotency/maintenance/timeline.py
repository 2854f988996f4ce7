"""What is known of a record's life: from its columns and its history."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime

from django.utils.functional import Promise
from django.utils.text import format_lazy
from django.utils.translation import gettext_lazy as _
from django.utils.translation import ngettext_lazy

from django_idempotency.maintenance import history
from django_idempotency.maintenance.advice import shown_reason
from django_idempotency.models import LIVE, IdempotencyRecord
from django_idempotency.policy import Mode
from django_idempotency.values.printable import printable


@dataclass(frozen=True, slots=True)
class Event:
    """An event. ``at`` is ``None`` if its time is not kept. ``by``: the person who did it."""

    at: datetime | None
    what: str | Promise
    by: str = ""


def timeline(record: IdempotencyRecord, now: datetime) -> list[Event]:
    """Return the events of a record in order, including those still to come."""
    return _in_order([*_events(record, now), *_decisions(record)])


def _decisions(record: IdempotencyRecord) -> Iterator[Event]:
    for entry in history.entries_of_life(record) if history.is_kept() else ():
        yield Event(entry.action_time, printable(entry.get_change_message()), by=printable(str(entry.user)))


def _in_order(events: list[Event]) -> list[Event]:
    """Sort ``events`` by time. An event without a time keeps its place after the one before it."""
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
    if not record.on_hold:
        deduplicated = _("deduplicates until then") if record.expires_at > now else _("deduplicated until then")
        yield Event(record.expires_at, deduplicated)
        yield Event(record.purge_at, _("kept at least until then"))


def _runs(record: IdempotencyRecord) -> Iterator[Event]:
    if record.locked_at is None:
        if record.attempts > 1:
            again = ngettext_lazy("run again once", "run again %(count)d times", "count")
            yield Event(None, again % {"count": record.attempts - 1})
    elif record.attempts > 1:
        taken = _("claimed again, or taken over from an owner that was gone: attempt {number}")
        yield Event(record.locked_at, format_lazy(taken, number=record.attempts))


def _lease(record: IdempotencyRecord, now: datetime) -> Event:
    assert record.locked_until is not None  # by constraint
    if record.mode == Mode.ATOMIC:
        return Event(record.locked_until, _("claimed until then; atomic mode does not renew it"))
    return Event(record.locked_until, _("the lease ran out") if record.locked_until < now else _("the lease ends"))


def _end(record: IdempotencyRecord) -> Iterator[Event]:
    if record.response_status is not None:
        ended = format_lazy(_("ended with the response {status}"), status=record.response_status)
        if record.response_body is None and record.updated_at >= record.expires_at:
            yield Event(None, ended)
            yield Event(record.updated_at, _("its body was dropped"))
        else:
            yield Event(record.updated_at, ended)
    elif record.on_hold:
        yield Event(record.updated_at, format_lazy(_("put on hold: {reason}"), reason=shown_reason(record)))
    else:
        yield Event(record.updated_at, format_lazy(_("failed, free to retry: {reason}"), reason=shown_reason(record)))
