"""What happened, as text."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict
from typing import Any

from django.utils.functional import Promise
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from django_idempotency.conf import conf
from django_idempotency.contrib.dashboard import activity as activity_of
from django_idempotency.contrib.dashboard.activity import FIGURES, Activity, Observed
from django_idempotency.maintenance.formatting import (
    Figure,
    Section,
    amount,
    lines,
    mark,
    share,
    width_of,
)
from django_idempotency.maintenance.stats import DAY, HOUR, WEEK
from django_idempotency.reporting.events import Family, families

TITLES: Mapping[str, str | Promise] = {
    "requests": gettext_lazy("requests with a key"),
    "deduplicated": gettext_lazy("deduplicated"),
    **{name: title for name, (title, _events) in FIGURES.items()},
}
MOST_NAMED = 5
_ALARMING = frozenset({"on_hold", "stale_writes", "store_errors"})


def happened(activity: Activity) -> list[Figure]:
    """Return what happened to keys in a span of time."""
    return _figures(TITLES, _ALARMING, activity)


def happened_in(family: Family, activity: Activity) -> list[Figure]:
    """Return what happened to the events of a wing. Those that are logged as errors are alarming."""
    grave = {
        event.name for event in family.events if (event.level or 0) >= logging.ERROR
    }
    return _figures(family.titles, grave, activity)


def _figures(
    titles: Mapping[str, str | Promise], grave: Collection[str], activity: Activity
) -> list[Figure]:
    return [
        Figure(
            str(title),
            share(activity[name]) if name == "deduplicated" else amount(activity[name]),
            alarming=bool(activity[name]) and name in grave,
        )
        for name, title in titles.items()
    ]


def busiest(
    views: Mapping[str, Activity], name: str, *, most: int = 10
) -> list[Figure]:
    """Return the views with the most ``name``, such as ``"replays"``, and of how many requests that is."""
    found = sorted(
        ((view, of) for view, of in views.items() if of[name]),
        key=lambda each: (-each[1][name], each[0]),
    )
    return [
        Figure(
            _("at %(view)s") % {"view": view},
            _("%(count)s of %(requests)s")
            % {"count": amount(of[name]), "requests": amount(of["requests"])},
        )
        for view, of in found[:most]
    ]


def observed(observed: Observed) -> list[Figure]:
    """Return what was observed in a week and would have been prevented; the views that matter most."""
    views = [
        Figure(_("at %(view)s") % {"view": view}, amount(count))
        for view, count in observed.views.items()
    ]
    return [
        Figure(_("would have been prevented"), amount(observed.preventable)),
        Figure(_("of which with a key"), amount(observed.duplicates_keyed)),
        Figure(_("of which without, and likely"), amount(observed.duplicates_unkeyed)),
        *views[:MOST_NAMED],
        Figure(_("would have been refused"), amount(observed.refused)),
        Figure(_("would have been unprotected"), amount(observed.unprotected)),
        Figure(_("requests with a key"), amount(observed.keyed)),
        Figure(_("requests without a key"), amount(observed.unkeyed)),
    ]


# --- The sections of idempotency_stats -------------------------------------------------------------------------------


def recently(using: str) -> Section:
    """Return what happened in the last hour and day, and what was observed in the last week."""
    views = activity_of.views(DAY, using=using)
    hour, day = (activity_of.activity(seconds, using=using) for seconds in (HOUR, DAY))
    facts: dict[str, Any] = {"last_hour": hour, "last_day": day, "views": views}
    shown = [*_beside("WHAT HAPPENED", happened(hour), happened(day))]
    for family in families:
        shown += _beside(
            family.name.upper(), happened_in(family, hour), happened_in(family, day)
        )
    for name, title in {
        "replays": "MOST REPLAYS, LAST DAY",
        "conflicts": "MOST CONFLICTS, LAST DAY",
    }.items():
        if ranking := busiest(views, name):
            shown += lines(title, ranking)
    if conf().observes:
        seen = activity_of.observed(WEEK, using=using)
        facts["observed_last_week"] = asdict(seen)
        shown += lines("OBSERVED, LAST WEEK", observed(seen))
    return Section(facts, shown)


def _beside(title: str, hour: list[Figure], day: list[Figure]) -> Iterator[str]:
    width = width_of(hour)
    yield f"{title:{width + 2}}{'last hour':>12}{'last day':>14}"
    for of_hour, of_day in zip(hour, day, strict=True):
        yield f"  {of_hour.name:{width}}{of_hour.value:>12}{of_day.value:>14}{mark(of_day)}"
