from __future__ import annotations

from dataclasses import asdict
from typing import Any

from django.core.management.base import CommandParser
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from django_idempotency.maintenance.reaper import Reaped, reap_in_batches
from django_idempotency.maintenance.records import records
from django_idempotency.management.base import MaintenanceCommand, number, seconds
from django_idempotency.stats.queries import MOST


class Command(MaintenanceCommand):
    about = gettext_lazy(
        "Frees the keys whose owner is gone: their lease ran out. Exits with 1 if a record could not be written."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument(
            "--older-than", type=seconds(0), default=0, help=_("only if the lease ran out at least this long ago")
        )
        parser.add_argument("--batch", type=number(1, int), help=_("records in one transaction"))
        parser.add_argument("--max-seconds", type=seconds(0), help=_("begin no further batch after this time"))
        parser.add_argument("--dry-run", action="store_true", help=_("only count; change nothing"))

    def work(
        self,
        *,
        older_than: float,
        batch: int | None,
        max_seconds: float | None,
        dry_run: bool,
        verbosity: int,
        **options: Any,
    ) -> bool:
        options |= {"verbosity": verbosity}
        if dry_run:
            count = records(self.database).stuck(older_than)[:MOST].count()
            told = _("At most %(count)d to reap; owners that are alive are skipped.") % {"count": count}
            self.report({"stuck": count}, told, options)
            return True
        batches = reap_in_batches(older_than=older_than, batch=batch, max_seconds=max_seconds, using=self.database)
        reaped = self.run(batches, _sentence, verbosity=verbosity)
        self.report(asdict(reaped), _sentence(reaped), options)
        for id, error in reaped.bad.items():
            self.stderr.write(f"{id}: {error}")
        return not reaped.bad


def _sentence(reaped: Reaped) -> str:
    counts = {"free": reaped.failed, "on_hold": reaped.on_hold, "bad": len(reaped.bad)}
    if reaped.finished:
        return _("%(free)d free to retry, %(on_hold)d on hold, %(bad)d could not be written.") % counts
    return _("%(free)d free to retry, %(on_hold)d on hold, %(bad)d could not be written; there is more.") % counts
