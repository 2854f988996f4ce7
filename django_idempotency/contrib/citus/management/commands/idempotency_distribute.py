from __future__ import annotations

from dataclasses import asdict
from typing import Any

from django.core.management.base import CommandError, CommandParser

from django_idempotency.contrib.citus.distribution import distribution_plan
from django_idempotency.exceptions import NotConvertible
from django_idempotency.management.base import MaintenanceCommand


class Command(MaintenanceCommand):
    help = "Prints what to run to distribute the tables by Citus, and changes nothing."

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        help = "print the statements that are left to run; there is no other mode"
        parser.add_argument("--plan", action="store_true", required=True, help=help)

    def work(self, **options: Any) -> bool:
        try:
            plan = distribution_plan(self.database)
        except NotConvertible as error:
            raise CommandError(str(error)) from error
        statements = [f"{statement};" for statement in plan.statements] or ["Nothing to do."]
        cautions = [f"-- {caution}" for caution in plan.cautions]
        self.report(asdict(plan), "\n".join([*cautions, *statements]), options)
        return True
