from __future__ import annotations

from dataclasses import asdict
from typing import Any

from django.core.management.base import CommandParser

from django_idempotency.maintenance import Cleaned, cleaning, dropping_bodies, purgeable, with_needless_body
from django_idempotency.management.passes import MaintenanceCommand, number
from django_idempotency.stats import MOST


class Command(MaintenanceCommand):
    help = "Deletes the records that are past their time, in small transactions."

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("--batch", type=number(1, int), help="records in one transaction")
        parser.add_argument("--pause", type=number(0), help="seconds between two")
        parser.add_argument("--max-seconds", type=number(0), help="begin no further batch after that")
        parser.add_argument(
            "--bodies",
            action="store_true",
            help="drop the bodies of records that have expired but stay for audit, instead",
        )
        parser.add_argument("--dry-run", action="store_true", help="only count, and change nothing")

    def handle(
        self,
        *args: Any,
        batch: int | None,
        pause: float | None,
        max_seconds: float | None,
        bodies: bool,
        database: str | None,
        dry_run: bool,
        verbosity: int,
        **options: Any,
    ) -> None:
        options |= {"database": database, "verbosity": verbosity}
        if dry_run:
            due = with_needless_body(using=database) if bodies else purgeable(using=database)
            count = due[:MOST].count()
            self.report({"due": count}, f"{count}{' or more' * (count == MOST)} due.", options)
            return
        clean = dropping_bodies if bodies else cleaning
        batches = clean(batch=batch, pause=pause, max_seconds=max_seconds, using=database)
        cleaned = self.run(batches, _sentence, verbosity=verbosity)
        self.report(asdict(cleaned) | {"rate": cleaned.rate}, _sentence(cleaned), options)


def _sentence(cleaned: Cleaned) -> str:
    rest = "nothing is left" if cleaned.finished else f"{cleaned.lag:.0f} s behind"
    return f"{cleaned.rows} records in {cleaned.seconds:.1f} s, {cleaned.rate:.0f} a second; {rest}."
