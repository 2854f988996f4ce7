from __future__ import annotations

from dataclasses import asdict
from typing import Any

from django.core.management.base import CommandParser
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from django_idempotency.maintenance.batches import LONGEST
from django_idempotency.maintenance.cleaner import Cleaned, cleanup_in_batches, drop_bodies_in_batches
from django_idempotency.maintenance.records import records
from django_idempotency.management.base import MaintenanceCommand, number, seconds
from django_idempotency.stats.formatting import age, amount
from django_idempotency.stats.queries import MOST, at_most


class Command(MaintenanceCommand):
    about = gettext_lazy("Deletes the records that are past their time, in small transactions.")

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("--batch", type=number(1, int), help=_("records in one transaction"))
        parser.add_argument("--pause", type=seconds(0), help=_("seconds between two batches"))
        parser.add_argument("--max-seconds", type=seconds(0), help=_("begin no further batch after this time"))
        parser.add_argument(
            "--bodies",
            action="store_true",
            help=_("instead, drop the bodies of records that have expired but are kept for audit"),
        )
        parser.add_argument("--dry-run", action="store_true", help=_("only count; change nothing"))

    def work(
        self,
        *,
        batch: int | None,
        pause: float | None,
        max_seconds: float | None,
        bodies: bool,
        dry_run: bool,
        verbosity: int,
        **options: Any,
    ) -> bool:
        options |= {"verbosity": verbosity}
        if dry_run:
            rows = records(self.database)
            due = rows.with_needless_body() if bodies else rows.purgeable()
            with at_most(LONGEST, self.database):
                count = due[:MOST].count()
            self.report({"due": count}, _("%(amount)s due.") % {"amount": amount(count, MOST)}, options)
            return True
        clean = drop_bodies_in_batches if bodies else cleanup_in_batches
        batches = clean(batch=batch, pause=pause, max_seconds=max_seconds, using=self.database)
        cleaned = self.run(batches, _sentence, verbosity=verbosity, left=lambda cleaned: cleaned.lag)
        self.report(asdict(cleaned) | {"rate": cleaned.rate}, _sentence(cleaned), options)
        return True


def _sentence(cleaned: Cleaned) -> str:
    rest = _("nothing is left") if cleaned.finished else _("%(age)s behind") % {"age": age(cleaned.lag)}
    told = ngettext(
        "%(count)d record in %(age)s, %(rate)d a second; %(rest)s.",
        "%(count)d records in %(age)s, %(rate)d a second; %(rest)s.",
        cleaned.rows,
    )
    return told % {"count": cleaned.rows, "age": age(cleaned.seconds), "rate": round(cleaned.rate), "rest": rest}
