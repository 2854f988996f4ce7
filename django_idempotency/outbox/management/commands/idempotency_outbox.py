from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any
from uuid import UUID

from django.core.management.base import CommandError, CommandParser
from django.db import connections
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from django_idempotency.management.base import OneLineErrors
from django_idempotency.moments import in_zone
from django_idempotency.outbox import maintenance
from django_idempotency.outbox.models import OutboxEvent
from django_idempotency.printable import printable_lines

SHOWN = ("event_id", "topic", "key", "attempts", "error", "created_at", "finished_at")


class Command(OneLineErrors):
    about = gettext_lazy(
        "Shows the state of the outbox, and handles its dead letters and published events that were kept."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "--database", choices=list(connections), help=_("alias; by default, the database that publish writes to")
        )
        parser.add_argument("--json", action="store_true", help=_("report as JSON, one object per line"))
        actions = parser.add_subparsers(dest="action", required=True)
        actions.add_parser("status", help=_("pending, failing and dead events, and live relays, by publisher"))
        dead = actions.add_parser("dead", help=_("list dead letters, the oldest first"))
        dead.add_argument("--topic", help=_("only of this topic"))
        dead.add_argument("--limit", type=int, default=100, help=_("at most this many"))
        again = actions.add_parser("requeue", help=_("try dead letters again"))
        again.add_argument("event", nargs="*", type=UUID, help=_("ids of events"))
        again.add_argument("--topic", help=_("all of this topic"))
        again.add_argument("--all", action="store_true", help=_("all there are"))
        gone = actions.add_parser("discard", help=_("delete dead letters for good; later events of their keys go on"))
        gone.add_argument("event", nargs="+", type=UUID, help=_("ids of events"))
        clean = actions.add_parser("cleanup", help=_("delete published events that are past their retention"))
        clean.add_argument("--max-seconds", type=float, help=_("begin no further batch after this time"))

    def handle(self, *args: Any, action: str, **options: Any) -> None:
        getattr(self, f"_{action}")(options, options["database"])

    def _status(self, options: dict[str, Any], using: str | None) -> None:
        for figures in maintenance.figures(using=using):
            error = maintenance.first_failure(figures.publisher, using=using) if figures.failing else ""
            facts = {**asdict(figures), "error": error}
            told = [_("%(publisher)s: %(pending)d pending") % facts]
            if figures.oldest:
                oldest = in_zone(figures.oldest).isoformat(" ", "seconds")
                told.append(_("the oldest since %(moment)s") % {"moment": oldest})
            others = _("%(failing)d failing, %(dead)d dead, %(relays)d live relays.") % facts
            why = " " + _("The first failing event: %(error)s") % facts if error else ""
            self._report(facts, f"{', '.join(told)}; {others}{why}", options)

    def _dead(self, options: dict[str, Any], using: str | None) -> None:
        for event in maintenance.dead_letters(topic=options["topic"], using=using)[: options["limit"]]:
            facts = {name: getattr(event, name) for name in SHOWN}
            self._report(facts, _line(event), options)

    def _requeue(self, options: dict[str, Any], using: str | None) -> None:
        if not (options["event"] or options["topic"] or options["all"]):
            raise CommandError(_("Pass the ids of events, --topic or --all."))
        count = maintenance.requeue(options["event"] or None, topic=options["topic"], using=using)
        self._report({"requeued": count}, _("%(count)d requeued.") % {"count": count}, options)

    def _discard(self, options: dict[str, Any], using: str | None) -> None:
        count = maintenance.discard(options["event"], using=using)
        self._report({"discarded": count}, _("%(count)d discarded.") % {"count": count}, options)

    def _cleanup(self, options: dict[str, Any], using: str | None) -> None:
        cleaned = maintenance.cleanup(max_seconds=options["max_seconds"], using=using)
        told = _("%(count)d deleted; nothing is left.") if cleaned.finished else _("%(count)d deleted; more are due.")
        self._report(asdict(cleaned), told % {"count": cleaned.rows}, options)

    def _report(self, facts: dict[str, Any], sentence: str, options: dict[str, Any]) -> None:
        self.stdout.write(json.dumps(facts, default=str) if options["json"] else printable_lines(sentence))


def _line(event: OutboxEvent) -> str:
    key = " " + _("key %(key)s") % {"key": event.key} if event.key else ""
    attempts = ngettext("%(count)d attempt", "%(count)d attempts", event.attempts) % {"count": event.attempts}
    return f"{event.event_id} {event.topic}{key}, {attempts}: {event.error}"
