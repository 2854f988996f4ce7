from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from django.core.management.base import CommandError, CommandParser

from django_idempotency.contrib.partitions.conversion import Converted, disable, disable_plan, enable, enable_plan
from django_idempotency.contrib.partitions.dropping import Dropped, drop, drop_plan
from django_idempotency.contrib.partitions.layout import stamp
from django_idempotency.contrib.partitions.provisioning import AHEAD, Ensured, ensure, ensure_plan
from django_idempotency.contrib.partitions.report import Standing, Status, status
from django_idempotency.management.base import MaintenanceCommand, number

PLANS: dict[str, Callable[..., Sequence[str]]] = {
    "enable": lambda using, ahead: enable_plan(using=using).statements,
    "disable": lambda using, ahead: disable_plan(using=using).statements,
    "ensure": lambda using, ahead: ensure_plan(using=using, ahead=ahead),
    "drop": lambda using, ahead: drop_plan(using=using),
}


class Command(MaintenanceCommand):
    help = (
        "Maintains the partitions of the records on PostgreSQL. Without --yes, enable and disable change nothing: "
        "they print what they would run."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("action", choices=["enable", "ensure", "drop", "status", "disable"])
        parser.add_argument("--ahead", type=number, default=AHEAD, help="for ensure: how many days ahead")
        parser.add_argument("--plan", action="store_true", help="only print the statements; change nothing")
        parser.add_argument("--yes", action="store_true", help="for enable and disable: make the change")

    def work(self, *, action: str, **options: Any) -> bool:
        if options["plan"] and options["yes"]:
            raise CommandError("Pass --plan or --yes, not both.")
        needs_yes = action in ("enable", "disable") and not options["yes"]
        if action in PLANS and (options["plan"] or needs_yes):
            self._show_plan(action, options)
            return True
        return getattr(self, f"_{action}")(options) is not False

    def _show_plan(self, action: str, options: dict[str, Any]) -> None:
        statements = PLANS[action](self.database, options["ahead"])
        words = "\n".join(f"{statement};" for statement in statements) or "Nothing to do."
        self.report({"statements": statements}, words, options)
        if statements and not options["plan"]:
            self.stderr.write("Nothing has been changed yet. Pass --yes to run this.")

    def _enable(self, options: dict[str, Any]) -> None:
        converted = self.run(enable.in_steps(**self.where), _converted, verbosity=options["verbosity"])
        if not converted.partitioned:
            raise CommandError("Stopped before it was done; nothing was changed.")
        ensured = self.run(ensure.in_steps(**self.where), _ensured, verbosity=options["verbosity"])
        facts = asdict(converted) | {"covered_until": ensured.covered_until}
        self.report(facts, f"{_converted(converted)} {_ensured(ensured)}", options)

    def _disable(self, options: dict[str, Any]) -> None:
        converted = disable(**self.where)
        self.report(asdict(converted), _converted(converted), options)

    def _ensure(self, options: dict[str, Any]) -> bool:
        steps = ensure.in_steps(ahead=options["ahead"], **self.where)
        ensured = self.run(steps, _ensured, verbosity=options["verbosity"])
        self.report(asdict(ensured), _ensured(ensured), options)
        return not ensured.why_short

    def _drop(self, options: dict[str, Any]) -> None:
        dropped = self.run(drop.in_steps(**self.where), _dropped, verbosity=options["verbosity"])
        self.report(asdict(dropped), _dropped(dropped), options)

    def _status(self, options: dict[str, Any]) -> None:
        found = status(**self.where)
        self.report(asdict(found), _stands(found), options)


def _converted(converted: Converted) -> str:
    already = "" if converted.changed else "already "
    return f"The table is {already}{'partitioned' if converted.partitioned else 'plain'}."


def _ensured(ensured: Ensured) -> str:
    if not ensured.partitioned:
        return "The table is not partitioned: nothing to do."
    until = "all future time" if ensured.covered_until is None else f"the time until {ensured.covered_until}"
    sentence = f"{_amount(len(ensured.created))} created; partitions cover {until}."
    return f"{sentence} That is too short: {ensured.why_short}" if ensured.why_short else sentence


def _amount(count: int) -> str:
    return "1 partition" if count == 1 else f"{count} partitions"


def _dropped(dropped: Dropped) -> str:
    if not dropped.partitioned:
        return "The table is not partitioned: nothing to do."
    kept = (f"{name} stays: {why}" for name, why in dropped.kept.items())
    return "\n".join([f"{_amount(len(dropped.dropped))} dropped.", *kept])


def _stands(found: Status) -> str:
    left = [f"{name} is detached, but not dropped yet: run drop." for name in found.left_behind]
    if not found.partitioned:
        sentences = ["The table is not partitioned."]
        if found.halfway:
            sentences.append("An enable was interrupted: run it again, or run ensure, which undoes it.")
        return "\n".join([*left, " ".join(sentences)])
    if found.covered_until is None:
        sentences = ["The partitions cover all future time."]
    else:
        sentences = [f"The partitions cover the time until {stamp(found.covered_until)}."]
    if found.short:
        sentences.append("That is too short: run ensure.")
    return "\n".join([*map(_line, found.partitions), *left, " ".join(sentences)])


def _line(standing: Standing) -> str:
    ends = (end and stamp(end) for end in (standing.lower, standing.upper))
    fate = "is being dropped: run drop" if standing.retired else standing.kept or "can be dropped"
    unkeyed = "" if standing.keyed else "has no unique index on id, so every claim reads it in full"
    span = " – ".join(end or "…" for end in ends)
    rows = "?" if standing.rows is None else standing.rows
    sizes = f"{rows} rows, {standing.bytes} bytes, {standing.live} live, {standing.on_hold} on hold"
    text = f"{standing.name}: {span}; {sizes}; {fate}"
    return "; ".join(filter(None, (text, unkeyed)))
