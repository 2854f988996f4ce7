from __future__ import annotations

import sys
from dataclasses import asdict
from typing import Any

from django.core.management.base import CommandParser

from django_idempotency.maintenance import Reaped, reaping, stuck
from django_idempotency.management.passes import FAILURE, MaintenanceCommand, number
from django_idempotency.stats import MOST


class Command(MaintenanceCommand):
    help = "Frees the keys whose holder is gone: their lease ran out. Exits with 1 if a record could not be written."

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("--older-than", type=number(0), default=0, help="seconds since the lease ran out")
        parser.add_argument("--batch", type=number(1, int), help="records in one transaction")
        parser.add_argument("--max-seconds", type=number(0), help="begin no further batch after that")
        parser.add_argument("--dry-run", action="store_true", help="only count, and change nothing")

    def handle(
        self,
        *args: Any,
        older_than: float,
        batch: int | None,
        max_seconds: float | None,
        database: str | None,
        dry_run: bool,
        verbosity: int,
        **options: Any,
    ) -> None:
        options |= {"database": database, "verbosity": verbosity}
        if dry_run:
            count = stuck(older_than=older_than, using=database)[:MOST].count()
            self.report({"stuck": count}, f"{count} to reap at most; holders that live are passed over.", options)
            return
        batches = reaping(older_than=older_than, batch=batch, max_seconds=max_seconds, using=database)
        reaped = self.run(batches, _sentence, verbosity=verbosity)
        self.report(asdict(reaped), _sentence(reaped), options)
        for id, error in reaped.bad.items():
            self.stderr.write(f"{id}: {error}")
        if reaped.bad:
            sys.exit(FAILURE)


def _sentence(reaped: Reaped) -> str:
    rest = "" if reaped.finished else "; there is more"
    return f"{reaped.failed} free to retry, {reaped.held} held, {len(reaped.bad)} could not be written{rest}."
