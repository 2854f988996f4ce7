from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from django.core.management.base import CommandError, CommandParser

from django_idempotency.conversion import Converted, Plan, disable, disable_plan, enable_plan, enabling
from django_idempotency.exceptions import NotConvertible, PartitionsUnsupported
from django_idempotency.management.passes import MaintenanceCommand, number
from django_idempotency.partition_layout import Interval, stamp
from django_idempotency.partitions import (
    Dropped,
    Ensured,
    Standing,
    Status,
    drop_plan,
    dropping,
    ensure_plan,
    ensuring,
    status,
)


class Command(MaintenanceCommand):
    help = (
        "Keeps the partitions of the records, on PostgreSQL. enable and disable change nothing without --yes: "
        "they print what they would run."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("action", choices=["enable", "ensure", "drop", "status", "disable"])
        parser.add_argument("--interval", choices=list(Interval), default=Interval.DAY, help="for enable; default: day")
        parser.add_argument("--ahead", type=number(1, int), help="for ensure: so many intervals to come")
        parser.add_argument("--plan", action="store_true", help="only print the statements, and change nothing")
        parser.add_argument("--yes", action="store_true", help="for enable and disable: do it")

    def handle(self, *args: Any, action: str, **options: Any) -> None:
        if options["plan"] and options["yes"]:
            raise CommandError("State --plan or --yes, not both.")
        try:
            getattr(self, f"_{action}")(options["database"], options)
        except (PartitionsUnsupported, NotConvertible) as error:
            raise CommandError(str(error)) from error

    def _enable(self, using: str | None, options: dict[str, Any]) -> None:
        interval = Interval(options["interval"])
        if not options["yes"]:
            self._show_conversion(enable_plan(interval, using=using), "partitioned", options)
            return
        converted = self.run(enabling(interval, using=using), _converted, verbosity=options["verbosity"])
        if not converted.partitioned:
            raise CommandError("Ended before it was done; nothing is changed.")
        ensured = self.run(ensuring(using=using), _ensured, verbosity=options["verbosity"])
        facts = asdict(converted) | {"covered_until": ensured.covered_until}
        self.report(facts, f"{_converted(converted)} {_ensured(ensured)}", options)

    def _disable(self, using: str | None, options: dict[str, Any]) -> None:
        if not options["yes"]:
            self._show_conversion(disable_plan(using=using), "plain", options)
            return
        converted = disable(using=using)
        self.report(asdict(converted), _converted(converted), options)

    def _ensure(self, using: str | None, options: dict[str, Any]) -> None:
        if options["plan"]:
            self._show(ensure_plan(ahead=options["ahead"], using=using), options)
            return
        steps = ensuring(ahead=options["ahead"], using=using)
        ensured = self.run(steps, _ensured, verbosity=options["verbosity"])
        self.report(asdict(ensured), _ensured(ensured), options)

    def _drop(self, using: str | None, options: dict[str, Any]) -> None:
        if options["plan"]:
            self._show(drop_plan(using=using), options)
            return
        dropped = self.run(dropping(using=using), _dropped, verbosity=options["verbosity"])
        self.report(asdict(dropped), _dropped(dropped), options)

    def _status(self, using: str | None, options: dict[str, Any]) -> None:
        found = status(using=using)
        self.report(asdict(found), _stands(found), options)

    def _show_conversion(self, plan: Plan, kind: str, options: dict[str, Any]) -> None:
        if not plan.switch:
            self.report({"statements": []}, f"The table is {kind}.", options)
            return
        self._show(plan.statements, options)
        if not options["plan"]:
            self.stderr.write("Nothing is changed yet. State --yes to run this.")

    def _show(self, statements: Sequence[str], options: dict[str, Any]) -> None:
        words = "\n".join(f"{statement};" for statement in statements) or "Nothing to do."
        self.report({"statements": statements}, words, options)


def _converted(converted: Converted) -> str:
    return (
        f"The table is {'partitioned' if converted.partitioned else 'plain'}{'' if converted.changed else ' already'}."
    )


def _ensured(ensured: Ensured) -> str:
    if not ensured.partitioned:
        return "The table is not partitioned: nothing to do."
    until = "without end" if ensured.covered_until is None else f"until {ensured.covered_until}"
    undivided = "".join(f"\n{name} stays undivided: {reason}" for name, reason in ensured.undivided.items())
    return f"{len(ensured.created)} partitions made; there are some {until}.{undivided}"


def _dropped(dropped: Dropped) -> str:
    if not dropped.partitioned:
        return "The table is not partitioned: nothing to do."
    kept = "".join(f"\n{name} stays: {reason}" for name, reason in dropped.kept.items())
    return f"{len(dropped.dropped)} partitions dropped.{kept}"


def _stands(found: Status) -> str:
    left = [f"{name} is detached, and not dropped yet: run drop." for name in found.left_behind]
    if not found.partitioned:
        halfway = " An enable was interrupted: run it again, or ensure, which takes it back." if found.halfway else ""
        return "\n".join([*left, f"The table is not partitioned.{halfway}"])
    until = "without end" if found.covered_until is None else f"until {stamp(found.covered_until)}"
    short = " That is too short: run ensure." if found.short else ""
    return "\n".join([*map(_line, found.partitions), *left, f"There are partitions {until}.{short}"])


def _line(standing: Standing) -> str:
    ends = (end and stamp(end) for end in (standing.lower, standing.upper))
    rows = "?" if standing.rows is None else standing.rows
    fate = "is being dropped: run drop" if standing.retired else standing.kept or "can be dropped"
    fate += ", a reserve" if standing.reserve else ""
    unkeyed = "" if standing.keyed else "; has no unique index on id, so every claim reads it whole"
    return (
        f"{standing.name}: {' – '.join(end or '…' for end in ends)}; {rows} rows, {standing.bytes} bytes,"
        f" {standing.live} live, {standing.held} held; {fate}{unkeyed}"
    )
