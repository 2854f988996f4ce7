from __future__ import annotations

from dataclasses import asdict
from typing import Any

from django.core.management.base import CommandParser

from django_idempotency.contrib.partitions.conversion import enable, enable_plan
from django_idempotency.contrib.partitions.layout import stamp
from django_idempotency.contrib.partitions.upkeep import (
    AHEAD,
    Dropped,
    Ensured,
    PartitionStatus,
    Standing,
    drop,
    ensure,
    status,
)
from django_idempotency.extending.operators import MaintenanceCommand, number

PLAIN = "The table is not partitioned: nothing to do."


class Command(MaintenanceCommand):
    help = (
        "Maintains the partitions of the records on PostgreSQL. Without --yes, enable"
        " changes nothing: it prints what it would run."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("action", choices=["enable", "ensure", "drop", "status"])
        parser.add_argument(
            "--ahead",
            type=number,
            default=AHEAD,
            help="for ensure: how many days ahead",
        )
        parser.add_argument(
            "--yes", action="store_true", help="for enable: make the change"
        )

    def work(self, *, action: str, **options: Any) -> bool:
        return getattr(self, f"_{action}")(options) is not False

    def _enable(self, options: dict[str, Any]) -> None:
        if options["yes"]:
            changed, ensured = enable(**self.where), ensure(**self.where)
            already = "" if changed else "already "
            self.report(
                {"changed": changed, **asdict(ensured)},
                f"The table is {already}partitioned. {_ensured(ensured)}",
                options,
            )
            return
        statements = enable_plan(**self.where)
        words = (
            "\n".join(f"{statement};" for statement in statements) or "Nothing to do."
        )
        self.report({"statements": statements}, words, options)
        if statements:
            self.stderr.write("Nothing has been changed yet. Pass --yes to run this.")

    def _ensure(self, options: dict[str, Any]) -> bool:
        ensured = ensure(ahead=options["ahead"], **self.where)
        self.report(asdict(ensured), _ensured(ensured), options)
        return not ensured.short

    def _drop(self, options: dict[str, Any]) -> None:
        dropped = self.run(drop, _dropped, options["verbosity"])
        self.report(asdict(dropped), _dropped(dropped), options)

    def _status(self, options: dict[str, Any]) -> None:
        found = status(**self.where)
        self.report(asdict(found), _stands(found), options)


def _ensured(ensured: Ensured) -> str:
    if not ensured.partitioned:
        return PLAIN
    short = " That is too short: see status." if ensured.short else ""
    return (
        f"{_amount(len(ensured.created))} created."
        f" {_covered(ensured.covered_until)}{short}"
    )


def _covered(until: str | None) -> str:
    return (
        "Partitions cover"
        f" {'all future time' if until is None else f'the time until {until}'}."
    )


def _amount(count: int) -> str:
    return "1 partition" if count == 1 else f"{count} partitions"


def _dropped(dropped: Dropped) -> str:
    if not dropped.partitioned:
        return PLAIN
    kept = (f"{name} stays: {why}" for name, why in dropped.kept.items())
    return "\n".join([f"{_amount(len(dropped.dropped))} dropped.", *kept])


def _stands(found: PartitionStatus) -> str:
    left = [
        f"{name} is detached, but not dropped yet: run drop."
        for name in found.left_behind
    ]
    if not found.partitioned:
        return "\n".join([*left, "The table is not partitioned."])
    until = stamp(found.covered_until) if found.covered_until else None
    short = " That is too short: run ensure." if found.short else ""
    return "\n".join(
        [*map(_line, found.partitions), *left, f"{_covered(until)}{short}"]
    )


def _line(standing: Standing) -> str:
    lower, upper = (end and stamp(end) for end in (standing.lower, standing.upper))
    fate = (
        "is being dropped: run drop"
        if standing.retired
        else standing.kept or "can be dropped"
    )
    return f"{standing.name}: {lower or '…'} – {upper or '…'}; {fate}"
