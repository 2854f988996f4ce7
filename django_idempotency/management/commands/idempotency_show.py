from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from django.core.management.base import CommandError
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from django_idempotency.log_ids import shown_id
from django_idempotency.maintenance.advice import advice, standing_of
from django_idempotency.maintenance.log_entries import entries_of_life, is_kept, told_entry
from django_idempotency.maintenance.owners import told_owner
from django_idempotency.maintenance.timeline import Event, in_order, timeline
from django_idempotency.management.keys import KeyCommand, facts_of
from django_idempotency.moments import in_zone
from django_idempotency.printable import printable
from django_idempotency.traces import Trace

WIDTH = 14


class Command(KeyCommand):
    about = gettext_lazy(
        "Shows the records of a key: what each is, what happens by itself, what is safe to do now, and what "
        "happened. Never shows responses. Exits with 1 if there is no record. Changes nothing."
    )

    def handle(self, *args: Any, **options: Any) -> None:
        for using, record in self.find(options):
            self.database = using
            events = _events(record)
            told = advice(record)
            facts = facts_of(record) | {
                "what": told.what,
                "by_itself": told.by_itself,
                "safe": told.safe,
                "owner": told_owner(record),
                "trace": asdict(trace) | {"url": trace.url} if (trace := Trace.of(record.trace)) else None,
                "events": [{"at": event.at, "what": str(event.what), "by": event.by} for event in events],
            }
            self.report(facts, "\n".join(_lines(record, events)), options)
        if not self.complete:
            raise CommandError(_("A database could not be looked at: the key may have more records there."))


def _trace(record: Any) -> str:
    trace = Trace.of(record.trace)
    return " ".join(filter(None, (trace.trace_id, trace.url))) if trace else ""


def _events(record: Any) -> list[Event]:
    entries = entries_of_life(record).select_related("user") if is_kept() else ()
    decisions = [Event(entry.action_time, told_entry(entry.get_change_message()), str(entry.user)) for entry in entries]
    return in_order([*timeline(record, record.now), *decisions])


def _lines(record: Any, events: list[Event]) -> Iterator[str]:
    told = advice(record)
    yield f"{record}: {standing_of(record).label}"
    described = {
        _("what it is"): told.what,
        _("by itself"): told.by_itself,
        _("safe to do now"): told.safe,
        _("who holds it"): told_owner(record),
        _("request"): f"{record.method} {record.path}",
        _("mode"): str(record.get_mode_display()),
        _("attempts"): str(record.attempts),
        _("trace"): _trace(record),
        _("record id"): str(record.pk),
        _("id in logs"): str(shown_id(record.pk)),
    }
    width = max(WIDTH, *map(len, described))
    for name, text in described.items():
        if text:
            yield f"  {name:{width}}  {printable(text)}"
    yield "  " + _("what happened")
    for event in events:
        at = in_zone(event.at).isoformat(" ", "seconds") if event.at else _("at a time not kept")
        by = " " + _("(by %(user)s)") % {"user": event.by} if event.by else ""
        yield printable(f"    {at}  {event.what}{by}")
