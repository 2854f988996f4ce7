"""What happened, as text."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from django.utils.functional import Promise
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from django_idempotency.contrib.dashboard import activity as activity_of
from django_idempotency.contrib.dashboard.activity import (
    DAY,
    FIGURES,
    HOUR,
    WEEK,
    Activity,
    Observed,
)
from django_idempotency.contrib.dashboard.conf import observes
from django_idempotency.contrib.dashboard.counters import OLDEST
from django_idempotency.extending import Family, families
from django_idempotency.extending.figures import Figure, age, amount, lines, share

TITLES: Mapping[str, str | Promise] = {
    "requests": gettext_lazy("requests with a key"),
    "deduplicated": gettext_lazy("deduplicated"),
    **{name: title for name, (title, _events) in FIGURES.items()},
}
MOST_NAMED = 5
WIDTH = 28  # of names
_ALARMING = frozenset({"on_hold", "stale_writes", "store_errors"})


def happened(activity: Activity) -> list[Figure]:
    """Return what happened to keys in a span of time."""
    return _figures(TITLES, _ALARMING, activity)


def happened_in(family: Family, activity: Activity) -> list[Figure]:
    """Return what happened to the events of a wing. Those that are logged as errors are
    alarming.
    """
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


@dataclass(frozen=True, slots=True)
class Line:
    """A figure over time. ``most``: the highest of the ``values``, as text."""

    name: str
    values: Sequence[float]
    texts: Sequence[str]
    most: str

    @property
    def points(self) -> str:
        """The line in a box of 100 by 20, for a ``polyline`` of SVG."""
        top, last = max(self.values) or 1, max(1, len(self.values) - 1)
        return " ".join(
            f"{100 * number / last:.1f},{19 - 18 * value / top:.1f}"
            for number, value in enumerate(self.values)
        )

    @property
    def blocks(self) -> str:
        """The line as block characters; the lowest stands for nothing at all."""
        top = max(self.values) or 1
        # divided first: 7 * value / value may be more than 7
        return "".join(
            BLOCKS[math.ceil((len(BLOCKS) - 1) * (value / top))]
            for value in self.values
        )


BLOCKS = "▁▂▃▄▅▆▇█"


def drawn(figures: Mapping[str, Sequence[float]]) -> list[Line]:
    """Return a line for each figure of a ``history``."""
    shown = []
    for name, values in figures.items():
        title = str(TITLES.get(name) or _("oldest pending key"))
        show = age if name == OLDEST else amount
        shown.append(Line(title, values, [*map(show, values)], show(max(values))))
    return shown


def busiest(
    views: Mapping[str, Activity], name: str, *, most: int = 10
) -> list[Figure]:
    """Return the views with the most ``name``, such as ``"replays"``, and of how many
    requests that is.
    """
    found = sorted(
        ((view, of) for view, of in views.items() if of[name]),
        key=lambda each: (-each[1][name], each[0]),
    )
    return [
        Figure(
            _("at %(view)s") % {"view": view},
            _("%(count)s of %(requests)s")
            % {
                "count": amount(of[name]),
                "requests": amount(of["requests"]),
            },
        )
        for view, of in found[:most]
    ]


def observed(observed: Observed) -> list[Figure]:
    """Return what was observed in a week and would have been prevented; the views that
    matter most.
    """
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


# --- The sections of idempotency_stats ------------------------------------------------


def recently(using: str) -> tuple[dict[str, Any], list[str]]:
    """Return what happened in the last hour and day, and what was observed in the last
    week.
    """
    views = activity_of.views(DAY, using=using)
    hour, day = (activity_of.activity(seconds, using=using) for seconds in (HOUR, DAY))
    facts: dict[str, Any] = {"last_hour": hour, "last_day": day, "views": views}
    shown = [*_beside("WHAT HAPPENED", happened(hour), happened(day))]
    for family in families:
        shown += _beside(
            family.name.upper(), happened_in(family, hour), happened_in(family, day)
        )
    times, by_hour = activity_of.history(DAY, using=using)
    facts["by_hour"] = {"times": times, **by_hour}
    if by_hour:
        shown.append("BY THE HOUR, LAST DAY")
    for line in drawn(by_hour):
        shown.append(f"  {line.name:{WIDTH}}{line.blocks}  at most {line.most}")
    for name, title in {
        "replays": "MOST REPLAYS, LAST DAY",
        "conflicts": "MOST CONFLICTS, LAST DAY",
    }.items():
        if ranking := busiest(views, name):
            shown += lines(title, ranking)
    if observes():
        seen = activity_of.observed(WEEK, using=using)
        facts["observed_last_week"] = asdict(seen)
        shown += lines("OBSERVED, LAST WEEK", observed(seen))
    return facts, shown


def _beside(title: str, hour: list[Figure], day: list[Figure]) -> Iterator[str]:
    width = max(WIDTH, *(len(figure.name) + 2 for figure in hour))
    yield f"{title:{width + 2}}{'last hour':>12}{'last day':>14}"
    for of_hour, of_day in zip(hour, day, strict=True):
        yield (
            f"  {of_hour.name:{width}}{of_hour.value:>12}"
            f"{of_day.value:>14}" + "  !" * of_day.alarming
        )
