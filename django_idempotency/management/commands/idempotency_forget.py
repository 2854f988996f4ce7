from __future__ import annotations

import sys
from dataclasses import asdict
from typing import Any
from uuid import UUID

from django.core.management.base import CommandParser

from django_idempotency.maintenance import Forgotten, forgetting
from django_idempotency.management.passes import FAILURE, MaintenanceCommand, number

IDS = 2**128


class Command(MaintenanceCommand):
    help = (
        "Erases the records of one scope: a caller who is to be forgotten. A retry of a key that is forgotten runs "
        "again. Exits with 1 if something is left, or not looked at yet."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("--scope", required=True, help='such as "user:7"')
        parser.add_argument(
            "--bodies",
            action="store_true",
            help="erase the answers' headers and bodies and the paths instead, and keep the keys: no retry runs again",
        )
        parser.add_argument("--held", action="store_true", help="held records too, which wait for a decision")
        parser.add_argument("--batch", type=number(1, int), help="records that are looked at in one transaction")
        parser.add_argument("--pause", type=number(0), help="seconds between two")
        parser.add_argument("--max-seconds", type=number(0), help="begin no further batch after that")
        parser.add_argument("--after", type=UUID, help="go on after this id, where an earlier run ended")
        parser.add_argument("--dry-run", action="store_true", help="only count, and change nothing")

    def handle(
        self,
        *args: Any,
        scope: str,
        bodies: bool,
        held: bool,
        batch: int | None,
        pause: float | None,
        max_seconds: float | None,
        after: UUID | None,
        dry_run: bool,
        database: str | None,
        verbosity: int,
        **options: Any,
    ) -> None:
        options |= {"database": database, "verbosity": verbosity}

        def sentence(forgotten: Forgotten) -> str:
            return _sentence(forgotten, "to erase" if dry_run else "emptied" if bodies else "erased")

        batches = forgetting(
            scope,
            bodies=bodies,
            held=held,
            dry_run=dry_run,
            batch=batch,
            pause=pause,
            max_seconds=max_seconds,
            after=after,
            using=database,
        )
        forgotten = self.run(batches, sentence, verbosity=verbosity)
        again = "" if bodies or dry_run or not forgotten.erased else " A retry of a forgotten key runs again."
        self.report(asdict(forgotten) | {"complete": forgotten.complete}, sentence(forgotten) + again, options)
        if not (forgotten.complete or dry_run):
            sys.exit(FAILURE)


def _sentence(forgotten: Forgotten, done: str) -> str:
    counts = {"live": forgotten.live, "held": forgotten.held, "busy": forgotten.busy}
    left = ", ".join(f"{count} {name}" for name, count in counts.items() if count) or "none"
    return f"{forgotten.erased} records {done}; left: {left}{_rest(forgotten)}."


def _rest(forgotten: Forgotten) -> str:
    if forgotten.finished or forgotten.after is None:
        return ""
    return f"; {100 * forgotten.after.int // IDS} % looked through, go on --after {forgotten.after}"
