from __future__ import annotations

from typing import Any

from django.core.management.base import CommandParser

from django_idempotency.maintenance.cleaner import cleanup, drop_bodies
from django_idempotency.management.base import MaintenanceCommand


class Command(MaintenanceCommand):
    help = (
        "Deletes expired records, in small transactions. Exits with 1 if a record could"
        " not be written."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        self.add_bounds(parser)
        help = (
            "instead, drop the bodies of records that have expired but are kept for"
            " audit"
        )
        parser.add_argument("--bodies", action="store_true", help=help)

    def work(self, *, bodies: bool, **options: Any) -> bool:
        clean = drop_bodies if bodies else cleanup
        return not self.run_pass(clean, options).bad
