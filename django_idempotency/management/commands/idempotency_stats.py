from __future__ import annotations

import sys
from typing import Any

from django.core.management.base import CommandParser

from django_idempotency.maintenance import formatting
from django_idempotency.maintenance.formatting import age, sections
from django_idempotency.maintenance.stats import (
    HOUR,
    MOST,
    alarms,
    alarms_of_store,
    at_most,
    due,
    pending,
    size,
)
from django_idempotency.maintenance.sweep import LONGEST
from django_idempotency.management.base import FAILURE, MaintenanceCommand, seconds
from django_idempotency.stores import Store

CHECK_SECONDS = 10.0  # for each statement of a check
# What a check is about, how long it has lasted, and the option with its limit.
LIMITS = (
    ("stuck", "stuck_oldest", "stuck_for"),
    ("on_hold", "on_hold_oldest", "on_hold_for"),
    ("behind", "lag", "behind_for"),
)
EXCEEDED, UNKNOWN = 2, 3  # exit codes, as monitoring plugins use them


class Command(MaintenanceCommand):
    works_on_stores = True
    help = (
        "Shows the state of the records, and what happened in the last hour and day."
        " Counts of records stop at a limit. Changes nothing. With --check, compares"
        " ages with limits."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument(
            "--check",
            action="store_true",
            help=(
                "for monitoring: exit with 2 if something has lasted too long, with 3"
                " if that is unknown"
            ),
        )
        parser.add_argument(
            "--stuck-for",
            type=seconds,
            default=15 * 60,
            help="for stuck keys; default: 900",
        )
        parser.add_argument(
            "--on-hold-for",
            type=seconds,
            default=HOUR,
            help="for keys on hold; default: 3600",
        )
        parser.add_argument(
            "--behind-for",
            type=seconds,
            default=HOUR,
            help="for due records; default: 3600",
        )

    def handle(self, *args: Any, **options: Any) -> None:
        self.exceeded = False
        self.unreachable = UNKNOWN if options["check"] else FAILURE
        complete = self.work_on_each(self.work, **options)
        if self.exceeded:
            sys.exit(EXCEEDED)
        if not complete:
            sys.exit(self.unreachable)

    def work(self, *, check: bool, **options: Any) -> bool:
        if check:
            self._check(options)
        elif self.store is not None:
            self._tell_of_store(self.store, options)
        else:
            with at_most(LONGEST, self.database):
                self._tell(options)
        return True

    def _tell(self, options: dict[str, Any]) -> None:
        facts: dict[str, Any] = {}
        lines: list[str] = []
        for title, measure, most in (
            ("RECORDS", size, None),
            ("PENDING", pending, MOST),
            ("CLEANING UP", due, MOST),
        ):
            found = measure(using=self.database)
            facts |= found
            lines += formatting.lines(title, formatting.figures(found, most))
        for section_of in sections:
            more, shown = section_of(self.database)
            facts |= more
            lines += shown
        self.report(facts, "\n".join(lines), options)

    def _tell_of_store(self, store: Store, options: dict[str, Any]) -> None:
        found = alarms_of_store(store.name, seconds=CHECK_SECONDS)
        lines = [
            "",
            *formatting.lines(f"STORE {store.name}", formatting.figures(found)),
        ]
        self.report(found, "\n".join(lines), options)

    def _check(self, options: dict[str, Any]) -> None:
        if self.store is not None:
            found = alarms_of_store(self.store.name, seconds=CHECK_SECONDS)
        else:
            with at_most(CHECK_SECONDS, self.database):
                found = alarms(using=self.database) | due(using=self.database)
        lasting = {
            name: (found[age], options[limit])
            for name, age, limit in LIMITS
            if age in found
        }
        exceeded = [name for name, (lasts, limit) in lasting.items() if lasts > limit]
        self.exceeded |= bool(exceeded)
        figures = ", ".join(_lasting(name, *times) for name, times in lasting.items())
        self.report(
            found | {"exceeded": exceeded},
            f"{'CRITICAL' if exceeded else 'OK'}: {figures}.",
            options,
        )


def _lasting(name: str, lasts: float, limit: float) -> str:
    text = f"{name.replace('_', ' ')} for {age(lasts)}"
    return text if lasts <= limit else f"{text} (over {age(limit)})"
