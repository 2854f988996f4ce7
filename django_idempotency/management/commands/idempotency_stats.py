from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from django.apps import apps
from django.core.management.base import CommandParser
from django.utils.functional import Promise
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from django_idempotency.conf import conf
from django_idempotency.maintenance.batches import LONGEST
from django_idempotency.management.base import FAILURE, MaintenanceCommand, seconds
from django_idempotency.stats import formatting
from django_idempotency.stats.formatting import Figure, age
from django_idempotency.stats.queries import (
    DAY,
    HOUR,
    MOST,
    WEEK,
    Activity,
    Projection,
    Stats,
    activity,
    alarms,
    at_most,
    busiest,
    due,
    observed,
    projection,
    stats,
    totals,
)
from django_idempotency.stats.queries import views as views_of_late

WIDTH = 28
CHECK_SECONDS = 10.0  # for each statement of a check
EXCEEDED, UNKNOWN = 2, 3  # exit codes, as monitoring plugins use them


class Command(MaintenanceCommand):
    about = gettext_lazy(
        "Shows the state of the records, and what happened in the last hour and day. Counts of records stop at a "
        "limit. Changes nothing. With --check, compares ages with limits."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("--exact", action="store_true", help=_("also look at every record: slow on a large table"))
        parser.add_argument(
            "--check",
            action="store_true",
            help=_("for monitoring: exit with 2 if something has lasted too long, with 3 if that is unknown"),
        )
        parser.add_argument("--stuck-for", type=seconds(0), default=15 * 60, help=_("default: 15min"))
        parser.add_argument("--on-hold-for", type=seconds(0), default=HOUR, help=_("default: 1h"))
        parser.add_argument("--behind-for", type=seconds(0), default=HOUR, help=_("default: 1h"))

    def handle(self, *args: Any, **options: Any) -> None:
        self.exceeded = False
        self.unreachable = UNKNOWN if options["check"] else FAILURE
        complete = self.work_on_each(**options)
        if self.exceeded:
            sys.exit(EXCEEDED)
        if not complete:
            sys.exit(self.unreachable)

    def work(self, *, exact: bool, check: bool, **options: Any) -> bool:
        if check:
            self._check(options)
            return True
        with at_most(LONGEST, self.database):
            self._tell(exact, options)
        return True

    def _tell(self, exact: bool, options: dict[str, Any]) -> None:
        database = self.database
        stand, views = stats(using=database), views_of_late(DAY, using=database)
        hour, day = (activity(seconds, using=database) for seconds in (HOUR, DAY))
        expected = projection(stand, using=database)
        counted = asdict(totals(using=database)) if exact else {}
        seen = observed(WEEK, using=database) if conf().observes else None
        facts = {
            **asdict(stand),
            **asdict(expected),
            **counted,
            "last_hour": asdict(hour),
            "last_day": asdict(day),
            "views": {name: asdict(of_view) for name, of_view in views.items()},
            **({"observed_last_week": asdict(seen)} if seen else {}),
        }
        lines = [*_standing(stand, expected), *_counted(counted), *_happened(_("WHAT HAPPENED"), hour, day)]
        if apps.is_installed("django_idempotency.outbox"):
            lines += _happened(_("OUTBOX"), hour, day, formatting.OUTBOX_NAMES)
        lines += _busiest(views)
        if seen:
            lines += _section(_("OBSERVED, LAST WEEK"), formatting.observed(seen))
        self.report(facts, "\n".join(lines), options)

    def _check(self, options: dict[str, Any]) -> None:
        with at_most(CHECK_SECONDS, self.database):
            raised, late = alarms(using=self.database), due(using=self.database)
        lasting = {
            "stuck": (raised.stuck_oldest, options["stuck_for"]),
            "on_hold": (raised.on_hold_oldest, options["on_hold_for"]),
            "behind": (late.lag, options["behind_for"]),
        }
        exceeded = [name for name, (lasts, limit) in lasting.items() if lasts > limit]
        self.exceeded |= bool(exceeded)
        figures = ", ".join(_lasting(name, *times) for name, times in lasting.items())
        facts = {**asdict(raised), **asdict(late), "exceeded": exceeded}
        self.report(facts, f"{'CRITICAL' if exceeded else 'OK'}: {figures}.", options)


LASTING: Mapping[str, str | Promise] = {
    "stuck": gettext_lazy("stuck for %(age)s"),
    "on_hold": gettext_lazy("on hold for %(age)s"),
    "behind": gettext_lazy("behind for %(age)s"),
}


def _lasting(name: str, lasts: float, limit: float) -> str:
    told = str(LASTING[name]) % {"age": age(lasts)}
    return told if lasts <= limit else " ".join((told, _("(over %(age)s)") % {"age": age(limit)}))


def _standing(stand: Stats, expected: Projection) -> Iterator[str]:
    yield from _section(_("RECORDS"), formatting.sizes(stand, expected))
    yield from _section(_("PENDING"), formatting.waiting(stand, MOST))
    yield from _section(_("CLEANING UP"), formatting.backlog(stand, MOST))


def _section(title: str, found: list[Figure]) -> Iterator[str]:
    yield title
    width = _width(found)
    yield from (f"  {figure.name:{width}}{figure.value}{_mark(figure)}" for figure in found)


def _width(found: list[Figure]) -> int:
    return max(WIDTH, *(len(figure.name) + 2 for figure in found))


def _mark(figure: Figure) -> str:
    return "  !" if figure.alarming else ""


def _counted(counted: dict[str, Any]) -> Iterator[str]:
    if counted:
        yield _("ALL RECORDS")
        shown = counted | {"deduplicated": formatting.share(counted["deduplicated"])}
        yield from (f"  {name:{WIDTH}}{value}" for name, value in shown.items())


def _happened(
    title: str, hour: Activity, day: Activity, names: Mapping[str, str | Promise] = formatting.NAMES
) -> Iterator[str]:
    found = formatting.happened(hour, names)
    width = _width(found)
    last_hour, last_day = _("last hour"), _("last day")
    yield f"{title:{width + 2}}{last_hour:>12}{last_day:>14}"
    for of_hour, of_day in zip(found, formatting.happened(day, names), strict=True):
        yield f"  {of_hour.name:{width}}{of_hour.value:>12}{of_day.value:>14}{_mark(of_day)}"


def _busiest(views: dict[str, Activity]) -> Iterator[str]:
    titles = {"replays": _("MOST REPLAYS, LAST DAY"), "conflicts": _("MOST CONFLICTS, LAST DAY")}
    for name, title in titles.items():
        if listed := busiest(views, name):
            yield title
            width = max(WIDTH, *(len(view) + 2 for view, _of_view in listed))
            for view, of_view in listed:
                many, requests = (formatting.amount(number) for number in (getattr(of_view, name), of_view.requests))
                told = _("%(count)s of %(requests)s") % {"count": f"{many:>12}", "requests": f"{requests:>10}"}
                yield f"  {view:{width}}{told}"
