from __future__ import annotations

from typing import Any

from django.core.management.base import CommandParser

from django_idempotency.maintenance.reaper import reap
from django_idempotency.management.base import MaintenanceCommand, seconds


class Command(MaintenanceCommand):
    works_on_stores = True
    help = (
        "Frees the keys whose owner is gone: their lease ran out. Exits with 1 if a"
        " record could not be written."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        help = "only if the lease ran out at least this long ago"
        parser.add_argument("--older-than", type=seconds, default=0, help=help)
        self.add_bounds(parser)

    def work(self, *, older_than: float, **options: Any) -> bool:
        return not self.run_pass(reap, options, older_than=older_than).bad
