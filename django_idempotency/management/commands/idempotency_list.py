from __future__ import annotations

from collections.abc import Callable
from itertools import chain, islice
from typing import Any

from django.core.management.base import CommandParser
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from django_idempotency.maintenance.advice import standing_of
from django_idempotency.maintenance.lock_owners import lock_owners, told_lock_owners
from django_idempotency.maintenance.reasons import told_reason
from django_idempotency.maintenance.records import Records, records
from django_idempotency.management.base import MaintenanceCommand, number
from django_idempotency.management.keys import facts_of, since
from django_idempotency.models import TERMINAL, DatabaseNow, RowLocked, Status
from django_idempotency.printable import printable
from django_idempotency.stats.formatting import age

# Each uses an index. What an operator has to decide on comes first.
SITUATIONS: dict[str, Callable[[Records], list[Records]]] = {
    "waiting": lambda rows: [rows.awaiting_operator(), rows.abandoned()],
    "on_hold": lambda rows: [rows.awaiting_operator()],
    "stuck": lambda rows: [rows.abandoned()],
    "live": lambda rows: [rows.live().order_by("locked_until")],
    "retryable": lambda rows: [
        rows.filter(status=Status.FAILED, response_status__isnull=True, on_hold=False).order_by("-updated_at")
    ],
    "ended": lambda rows: [rows.filter(status__in=TERMINAL, response_status__isnull=False).order_by("-purge_at")],
}
LINE = "{standing:14} {age:>12}  {attempts:>3}  {scope}  {key}  {method} {path}  {reason}"


class Command(MaintenanceCommand):
    about = gettext_lazy("Lists the keys that are on hold or stuck, or others with --situation. Changes nothing.")

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument(
            "--situation", choices=SITUATIONS, default="waiting", help=_("which keys; default: waiting")
        )
        parser.add_argument(
            "--limit", type=number(1, int), default=100, help=_("at most this many records; default: 100")
        )

    def work(self, *, situation: str, limit: int, **options: Any) -> bool:
        rows = records(self.database).defer("response_body").annotate(now=DatabaseNow(), locked=RowLocked())
        found = chain.from_iterable(part[: limit + 1] for part in SITUATIONS[situation](rows))
        listed = list(islice(found, limit + 1))
        shown, more = listed[:limit], len(listed) > limit
        lines = [_line(record) for record in shown] or [_("No such keys.")]
        if more:
            lines.append(_("There are more: these are the first %(limit)d; see --limit.") % {"limit": limit})
        owners = lock_owners(self.database) if situation == "live" else []
        if owners:
            lines.append("\n  ".join(told_lock_owners(owners, most=limit)))
        facts = {"records": [facts_of(record) for record in shown], "more": more, "locks": len(owners)}
        self.report(facts, "\n".join(lines), options)
        return True


def _line(record: Any) -> str:
    texts = {name: printable(getattr(record, name)) for name in ("scope", "key", "method", "path")}
    seconds = (record.now - since(record)).total_seconds()
    line = LINE.format(
        standing=str(standing_of(record).label),
        age=age(seconds),
        attempts=record.attempts,
        reason=told_reason(record),
        **texts,
    )
    return line.rstrip()
