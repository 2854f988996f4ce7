from __future__ import annotations

from typing import Any

from django.core.management.base import CommandError, CommandParser

from django_idempotency.maintenance import releasable, release
from django_idempotency.management.passes import MaintenanceCommand


class Command(MaintenanceCommand):
    help = (
        "Leaves a key that is held, or whose holder is gone, to its next request. "
        "Find out first that the operation did not take place. Exits with 1 if there is nothing to release."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("key", help="the whole key, as the client sent it")
        parser.add_argument("--scope", help='such as "user:7"; needed if the key is stuck in several')
        parser.add_argument("--dry-run", action="store_true", help="only look, and change nothing")

    def handle(
        self, *args: Any, key: str, scope: str | None, database: str | None, dry_run: bool, **options: Any
    ) -> None:
        options["database"] = database
        found = list(releasable(key, scope=scope, using=database).values_list("scope", flat=True))
        if len(found) > 1:
            raise CommandError(f"The key is in several scopes; state one of them with --scope: {', '.join(found)}.")
        if found and not dry_run:
            found = [record.scope for record in release(key, scope=found[0], using=database)]
        if not found:
            raise CommandError("Nothing to release: no such key is held, or has outlived its lease and its holder.")
        would = "would be" if dry_run else "is"
        self.report({"released": found}, f"The key of {found[0]} {would} free: its next request runs again.", options)
