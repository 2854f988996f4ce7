from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from django.core.management.base import CommandParser

from django_idempotency import figures
from django_idempotency.figures import Figure
from django_idempotency.management.passes import MaintenanceCommand
from django_idempotency.stats import (
    DAY,
    HOUR,
    MOST,
    Activity,
    Projection,
    Stats,
    activity,
    busiest,
    projection,
    stats,
    totals,
)
from django_idempotency.stats import views as views_of_late

WIDTH = 28


class Command(MaintenanceCommand):
    help = (
        "Tells how the records stand, and what happened in the last hour and day. "
        f"Counts of records end at {MOST}; ages are in seconds. Changes nothing."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("--exact", action="store_true", help="look at every record too: slow on a large table")

    def handle(self, *args: Any, exact: bool, database: str | None, **options: Any) -> None:
        options["database"] = database
        stand, views = stats(using=database), views_of_late(DAY, using=database)
        hour, day = (activity(seconds, using=database) for seconds in (HOUR, DAY))
        expected = projection(stand, using=database)
        counted = asdict(totals(using=database)) if exact else {}
        facts = {
            **asdict(stand),
            **asdict(expected),
            **counted,
            "last_hour": asdict(hour),
            "last_day": asdict(day),
            "views": {name: asdict(of_view) for name, of_view in views.items()},
        }
        lines = [*_standing(stand, expected), *_counted(counted), *_happened(hour, day), *_busiest(views)]
        self.report(facts, "\n".join(lines), options)


def _standing(stand: Stats, expected: Projection) -> Iterator[str]:
    yield from _section("RECORDS", figures.sizes(stand, expected))
    yield from _section("PENDING", figures.waiting(stand, MOST))
    yield from _section("CLEANING UP", figures.backlog(stand, MOST))


def _section(title: str, found: list[Figure]) -> Iterator[str]:
    yield title
    yield from (f"  {figure.name:{WIDTH}}{figure.value}{_mark(figure)}" for figure in found)


def _mark(figure: Figure) -> str:
    return "  !" if figure.alarming else ""


def _counted(counted: dict[str, Any]) -> Iterator[str]:
    if counted:
        yield "ALL RECORDS"
        shown = counted | {"deduplicated": figures.share(counted["deduplicated"])}
        yield from (f"  {name:{WIDTH}}{value}" for name, value in shown.items())


def _happened(hour: Activity, day: Activity) -> Iterator[str]:
    yield f"{'WHAT HAPPENED':{WIDTH + 2}}{'last hour':>12}{'last day':>14}"
    for of_hour, of_day in zip(figures.happened(hour), figures.happened(day), strict=True):
        yield f"  {of_hour.name:{WIDTH}}{of_hour.value:>12}{of_day.value:>14}{_mark(of_day)}"


def _busiest(views: dict[str, Activity]) -> Iterator[str]:
    for name in ("replays", "conflicts"):
        if listed := busiest(views, name):
            yield f"MOST {name.upper()}, LAST DAY"
            width = max(WIDTH, *(len(view) + 2 for view, _of_view in listed))
            for view, of_view in listed:
                yield f"  {view:{width}}{getattr(of_view, name):>12,} of {of_view.requests:>10,}"
