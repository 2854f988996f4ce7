"""The strip above the dashboard and the lists: what an operator should look at now, or that there is nothing."""

from __future__ import annotations

from dataclasses import dataclass

from django.utils.translation import gettext as _

from django_idempotency.admin.limits import panel
from django_idempotency.stats import formatting, queries

MOST = 10_000  # the most records of each kind that are counted


@dataclass(frozen=True, slots=True)
class Alarm:
    """``situation`` names the list that shows these records."""

    text: str
    situation: str


def alarms(using: str) -> list[Alarm] | None:
    """Return the alarms, an empty list if there are none; ``None`` if the database did not answer, or not in time."""
    return panel(lambda ask: told(ask(queries.alarms, most=MOST)), using)


def told(found: queries.Alarms) -> list[Alarm]:
    """Return the alarms that are raised, in words. Pure."""
    raised = (
        (_("%(count)s stuck, oldest %(age)s"), found.stuck, found.stuck_oldest, "stuck"),
        (_("%(count)s on hold, oldest %(age)s"), found.on_hold, found.on_hold_oldest, "on_hold"),
    )
    return [
        Alarm(text % {"count": formatting.amount(count, MOST), "age": formatting.duration(round(age))}, situation)
        for text, count, age, situation in raised
        if count
    ]
