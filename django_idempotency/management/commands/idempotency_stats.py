from __future__ import annotations

from dataclasses import asdict
from typing import Any

from django.core.management.base import CommandParser

from django_idempotency.management.passes import MaintenanceCommand
from django_idempotency.stats import MOST, stats, totals


class Command(MaintenanceCommand):
    help = f"Tells how the records stand. Counts end at {MOST}; ages are in seconds. Changes nothing."

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("--exact", action="store_true", help="look at every record too: slow on a large table")

    def handle(self, *args: Any, exact: bool, database: str | None, **options: Any) -> None:
        options["database"] = database
        facts = asdict(stats(using=database)) | (asdict(totals(using=database)) if exact else {})
        self.report(facts, "\n".join(f"{name:14}{_shown(value)}" for name, value in facts.items()), options)


def _shown(value: float | None) -> str:
    if value is None:
        return "unknown"
    return f"{value:.3f}" if isinstance(value, float) else str(value)
