from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from django.core.management.base import CommandError, CommandParser
from django.utils.functional import Promise
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from django_idempotency.exceptions import NotConvertible, PartitionsUnsupported
from django_idempotency.management.base import MaintenanceCommand, number
from django_idempotency.partitions.conversion import (
    Converted,
    Plan,
    disable,
    disable_plan,
    enable_in_steps,
    enable_plan,
)
from django_idempotency.partitions.dropping import Dropped, drop_in_steps, drop_plan
from django_idempotency.partitions.layout import stamp
from django_idempotency.partitions.provisioning import AHEAD, Ensured, ensure_in_steps, ensure_plan
from django_idempotency.partitions.report import Standing, Status, status

PARTITIONED = gettext_lazy("The table is partitioned.")
PLAIN = gettext_lazy("The table is plain.")


class Command(MaintenanceCommand):
    about = gettext_lazy(
        "Maintains the partitions of the records on PostgreSQL. Without --yes, enable and disable change nothing: "
        "they print what they would run."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("action", choices=["enable", "ensure", "drop", "status", "disable"])
        parser.add_argument("--ahead", type=number(1, int), default=AHEAD, help=_("for ensure: how many days ahead"))
        parser.add_argument("--plan", action="store_true", help=_("only print the statements; change nothing"))
        parser.add_argument("--yes", action="store_true", help=_("for enable and disable: make the change"))

    def work(self, *, action: str, **options: Any) -> bool:
        if options["plan"] and options["yes"]:
            raise CommandError(_("Pass --plan or --yes, not both."))
        try:
            getattr(self, f"_{action}")(self.database, options)
        except (PartitionsUnsupported, NotConvertible) as error:
            raise CommandError(str(error)) from error
        return True

    def _enable(self, using: str, options: dict[str, Any]) -> None:
        if not options["yes"]:
            self._show_conversion(enable_plan(using=using), PARTITIONED, options)
            return
        converted = self.run(enable_in_steps(using=using), _converted, verbosity=options["verbosity"])
        if not converted.partitioned:
            raise CommandError(_("Ended before it was done; nothing was changed."))
        ensured = self.run(ensure_in_steps(using=using), _ensured, verbosity=options["verbosity"])
        facts = asdict(converted) | {"covered_until": ensured.covered_until}
        self.report(facts, f"{_converted(converted)} {_ensured(ensured)}", options)

    def _disable(self, using: str, options: dict[str, Any]) -> None:
        if not options["yes"]:
            self._show_conversion(disable_plan(using=using), PLAIN, options)
            return
        converted = disable(using=using)
        self.report(asdict(converted), _converted(converted), options)

    def _ensure(self, using: str, options: dict[str, Any]) -> None:
        if options["plan"]:
            self._show(ensure_plan(ahead=options["ahead"], using=using), options)
            return
        steps = ensure_in_steps(ahead=options["ahead"], using=using)
        ensured = self.run(steps, _ensured, verbosity=options["verbosity"])
        self.report(asdict(ensured), _ensured(ensured), options)

    def _drop(self, using: str, options: dict[str, Any]) -> None:
        if options["plan"]:
            self._show(drop_plan(using=using), options)
            return
        dropped = self.run(drop_in_steps(using=using), _dropped, verbosity=options["verbosity"])
        self.report(asdict(dropped), _dropped(dropped), options)

    def _status(self, using: str, options: dict[str, Any]) -> None:
        found = status(using=using)
        self.report(asdict(found), _stands(found), options)

    def _show_conversion(self, plan: Plan, already: str | Promise, options: dict[str, Any]) -> None:
        if not plan.switch:
            self.report({"statements": []}, str(already), options)
            return
        self._show(plan.statements, options)
        if not options["plan"]:
            self.stderr.write(_("Nothing has been changed yet. Pass --yes to run this."))

    def _show(self, statements: Sequence[str], options: dict[str, Any]) -> None:
        words = "\n".join(f"{statement};" for statement in statements) or _("Nothing to do.")
        self.report({"statements": statements}, words, options)


def _converted(converted: Converted) -> str:
    if converted.changed:
        return str(PARTITIONED if converted.partitioned else PLAIN)
    return _("The table is already partitioned.") if converted.partitioned else _("The table is already plain.")


def _ensured(ensured: Ensured) -> str:
    if not ensured.partitioned:
        return _("The table is not partitioned: nothing to do.")
    made = len(ensured.created)
    if ensured.covered_until is None:
        told = ngettext(
            "%(count)d partition created; partitions cover all future time.",
            "%(count)d partitions created; partitions cover all future time.",
            made,
        )
    else:
        told = ngettext(
            "%(count)d partition created; partitions cover the time until %(until)s.",
            "%(count)d partitions created; partitions cover the time until %(until)s.",
            made,
        )
    return told % {"count": made, "until": ensured.covered_until}


def _dropped(dropped: Dropped) -> str:
    if not dropped.partitioned:
        return _("The table is not partitioned: nothing to do.")
    gone = len(dropped.dropped)
    told = ngettext("%(count)d partition dropped.", "%(count)d partitions dropped.", gone) % {"count": gone}
    kept = (_("%(name)s stays: %(reason)s") % {"name": name, "reason": _why(why)} for name, why in dropped.kept.items())
    return "\n".join([told, *kept])


def _why(reason: str) -> str:
    """Return a reason in the language in force; one that counts records stays in English."""
    return reason and _(reason)


def _stands(found: Status) -> str:
    detached = _("%(name)s is detached, but not dropped yet: run drop.")
    left = [detached % {"name": name} for name in found.left_behind]
    if not found.partitioned:
        told = [_("The table is not partitioned.")]
        if found.halfway:
            told.append(_("An enable was interrupted: run it again, or run ensure, which undoes it."))
        return "\n".join([*left, " ".join(told)])
    if found.covered_until is None:
        told = [_("The partitions cover all future time.")]
    else:
        told = [_("The partitions cover the time until %(until)s.") % {"until": stamp(found.covered_until)}]
    if found.short:
        told.append(_("That is too short: run ensure."))
    return "\n".join([*map(_line, found.partitions), *left, " ".join(told)])


def _line(standing: Standing) -> str:
    ends = (end and stamp(end) for end in (standing.lower, standing.upper))
    fate = _("is being dropped: run drop") if standing.retired else _why(standing.kept) or _("can be dropped")
    unkeyed = "" if standing.keyed else _("has no unique index on id, so every claim reads it in full")
    told = _("%(name)s: %(span)s; %(rows)s rows, %(bytes)d bytes, %(live)d live, %(on_hold)d on hold; %(fate)s")
    told %= {
        "name": standing.name,
        "span": " – ".join(end or "…" for end in ends),
        "rows": "?" if standing.rows is None else standing.rows,
        "bytes": standing.bytes,
        "live": standing.live,
        "on_hold": standing.on_hold,
        "fate": fate,
    }
    return "; ".join(filter(None, (told, unkeyed)))
