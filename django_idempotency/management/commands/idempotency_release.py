from __future__ import annotations

from typing import Any

from django.core.management.base import CommandError, CommandParser

from django_idempotency import maintenance
from django_idempotency.interventions import Act, Refused, objection, release, version
from django_idempotency.management.passes import MaintenanceCommand
from django_idempotency.models import DatabaseNow, IdempotencyRecord


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
        records: Any = IdempotencyRecord.objects.using(maintenance.database(database)).with_key(key)
        if scope is not None:
            records = records.filter(scope=scope)
        records = records.defer("response_body").annotate(now=DatabaseNow())
        found = [record for record in records if objection(record, Act.RELEASE, record.now) is None]
        if not found:
            raise CommandError("Nothing to release: no such key is held, or has outlived its lease.")
        if len(found) > 1:
            scopes = ", ".join(record.scope for record in found)
            raise CommandError(f"The key is in several scopes; state one of them with --scope: {scopes}.")
        (record,) = found
        if not dry_run:
            outcome = release(record.pk, as_seen=version(record), using=database)
            if isinstance(outcome, Refused):
                raise CommandError(f"Nothing to release: {outcome.why.label}")
        would = "would be" if dry_run else "is"
        sentence = f"The key of {record.scope} {would} free: its next request runs again."
        self.report({"released": [record.scope]}, sentence, options)
