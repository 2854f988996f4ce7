from __future__ import annotations

import logging
from contextlib import suppress
from typing import Any

from django.core.management.base import CommandParser
from django.db import Error, connections

from django_idempotency.contrib.operations.running import run_operation, take
from django_idempotency.extending import cause, log
from django_idempotency.extending.operators import MaintenanceCommand, ended_by_signal
from django_idempotency.extending.stores import databases

IDLE = 1.0  # seconds between two looks while nothing is due


def run_next(using: str) -> int:
    """Run an operation that is due, if there is one; return how many there were."""
    try:
        taken = take(using)
        for each in taken:
            run_operation(each.pk, using=using)
        return len(taken)
    except Error as error:  # the database is unavailable; nothing is lost
        log(logging.WARNING, "database_unavailable", "%s: %s", using, cause(error))
        with suppress(Error):  # from a driver that has closed it already
            connections[using].close()
        return 0


class Command(MaintenanceCommand):
    help = (
        "Run deferred operations as they come due, until stopped (SIGTERM, SIGINT),"
        " then finish the one in progress."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "--database",
            choices=list(connections),
            help="alias; by default, all databases with records",
        )
        parser.add_argument(
            "--once", action="store_true", help="run what is due, then exit"
        )

    def handle(self, *, database: str | None, once: bool, **options: Any) -> None:
        count, aliases = 0, [database] if database else databases()
        with ended_by_signal() as ended:
            while not ended.is_set():
                done = sum(run_next(alias) for alias in aliases)
                count += done
                if not done and (once or ended.wait(IDLE)):
                    break
        self.stdout.write(f"{count} operations run")
