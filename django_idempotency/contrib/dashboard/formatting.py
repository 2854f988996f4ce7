"""What happened, and what is expected, as text."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from typing import Any

from django.utils.functional import Promise
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from django_idempotency.conf import conf
from django_idempotency.contrib.dashboard import activity as activity_of
from django_idempotency.contrib.dashboard.activity import Activity, Observed, Projection
from django_idempotency.reporting.events import Family, families
from django_idempotency.stats.formatting import Figure, Section, amount, lines, mark, share, volume, width_of
from django_idempotency.stats.queries import DAY, HOUR, WEEK, size


def growth(projection: Projection) -> list[Figure]:
    """Return how large the table will be."""
    expected = amount(projection.expected_rows)
    if projection.expected_bytes is not None:
        expected += f" ({volume(projection.expected_bytes)})"
    return [
        Figure(_("responses stored a day"), amount(projection.rows_per_day)),
        Figure(_("rows at this rate"), expected),
    ]


NAMES: Mapping[str, str | Promise] = {
    "requests": gettext_lazy("requests with a key"),
    "deduplicated": gettext_lazy("deduplicated"),
    "replays": gettext_lazy("replays"),
    "conflicts": gettext_lazy("conflicts"),
    "mismatches": gettext_lazy("mismatches"),
    "takeovers": gettext_lazy("takeovers"),
    "on_hold": gettext_lazy("refused while on hold"),
    "too_old": gettext_lazy("refused as too old"),
    "forbidden": gettext_lazy("replays forbidden"),
    "not_admitted": gettext_lazy("new keys not admitted"),
    "completed": gettext_lazy("responses stored"),
    "failed": gettext_lazy("runs that failed"),
    "released": gettext_lazy("keys released"),
    "lost": gettext_lazy("claims lost to another request"),
    "stale_writes": gettext_lazy("late writes rejected"),
    "reaped": gettext_lazy("keys reaped"),
    "store_errors": gettext_lazy("store unavailable"),
}
_ALARMING = frozenset({"on_hold", "stale_writes", "store_errors"})


def happened(activity: Activity) -> list[Figure]:
    """Return what happened to keys in a span of time."""
    return [_happened(field, str(name), activity[field]) for field, name in NAMES.items()]


def happened_in(family: Family, activity: Activity) -> list[Figure]:
    """Return what happened to the events of a wing. Those that are logged as errors are alarming."""
    grave = {event.name for event in family.events if (event.level or 0) >= logging.ERROR}
    return [
        Figure(str(title), amount(count := activity.get(name, 0)), alarming=bool(count) and name in grave)
        for name, title in family.titles.items()
    ]


def _happened(field: str, name: str, value: Any) -> Figure:
    shown: Callable[[Any], str] = share if field == "deduplicated" else amount
    return Figure(name, shown(value), alarming=bool(value) and field in _ALARMING)


def busiest(views: Mapping[str, Activity], name: str) -> list[Figure]:
    """Return the views with the most ``name``, such as ``"replays"``, and of how many requests that is."""
    return [
        Figure(
            _("at %(view)s") % {"view": view},
            _("%(count)s of %(requests)s") % {"count": amount(of[name]), "requests": amount(of["requests"])},
        )
        for view, of in activity_of.busiest(views, name)
    ]


MOST_NAMED = 5


def observed(observed: Observed) -> list[Figure]:
    """Return what was observed in a week and would have been prevented; the views that matter most."""
    views = [
        Figure(_("at %(view)s") % {"view": view}, amount(count))
        for view, count in list(observed.views.items())[:MOST_NAMED]
    ]
    return [
        Figure(_("would have been prevented"), amount(observed.preventable)),
        Figure(_("of which with a key"), amount(observed.duplicates_keyed)),
        Figure(_("of which without, and likely"), amount(observed.duplicates_unkeyed)),
        *views,
        Figure(_("would have been refused"), amount(observed.refused)),
        Figure(_("would have been unprotected"), amount(observed.unprotected)),
        Figure(_("requests with a key"), amount(observed.keyed)),
        Figure(_("requests without a key"), amount(observed.unkeyed)),
    ]


# --- The sections of idempotency_stats -------------------------------------------------------------------------------


def recently(using: str) -> Section:
    """Return what happened in the last hour and day, and the size that the table is growing to."""
    views = activity_of.views(DAY, using=using)
    hour, day = (activity_of.activity(seconds, using=using) for seconds in (HOUR, DAY))
    expected = activity_of.projection(size(using=using), using=using)
    seen = activity_of.observed(WEEK, using=using) if conf().observes else None
    facts: dict[str, Any] = {
        **asdict(expected),
        "last_hour": hour,
        "last_day": day,
        "views": views,
        **({"observed_last_week": asdict(seen)} if seen else {}),
    }
    shown = [*lines("GROWTH", growth(expected)), *_what_happened(hour, day)]
    for name, title in {"replays": "MOST REPLAYS, LAST DAY", "conflicts": "MOST CONFLICTS, LAST DAY"}.items():
        if ranking := busiest(views, name):
            shown += lines(title, ranking)
    return Section(facts, [*shown, *(lines("OBSERVED, LAST WEEK", observed(seen)) if seen else [])])


def _what_happened(hour: Activity, day: Activity) -> Iterator[str]:
    yield from _beside("WHAT HAPPENED", happened(hour), happened(day))
    for family in families():
        spans = (happened_in(family, span) for span in (hour, day))
        yield from _beside(family.name.upper(), *spans)


def _beside(title: str, hour: list[Figure], day: list[Figure]) -> Iterator[str]:
    width = width_of(hour)
    yield f"{title:{width + 2}}{'last hour':>12}{'last day':>14}"
    for of_hour, of_day in zip(hour, day, strict=True):
        yield f"  {of_hour.name:{width}}{of_hour.value:>12}{of_day.value:>14}{mark(of_day)}"
