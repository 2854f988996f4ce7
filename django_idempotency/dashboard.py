"""The dashboard in the admin: what happens to keys, how long they wait, how large the table is.

Every panel asks for little, through indexes or statistics, and has a second. One that the database does not answer, or
not in time, says so, and the others are shown all the same.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from django.core.exceptions import PermissionDenied
from django.db import Error
from django.http import HttpRequest
from django.template.response import TemplateResponse
from django.utils import timezone
from django.utils.formats import date_format
from django.utils.translation import gettext as _

from django_idempotency import figures, stats
from django_idempotency.charts import Bar, Segment, bars, level, segments, top_of
from django_idempotency.conf import conf
from django_idempotency.figures import Figure
from django_idempotency.logs import cause, log
from django_idempotency.maintenance import database
from django_idempotency.stats import DAY, HOUR, Activity, Projection, Size, Span

T = TypeVar("T")

TEMPLATE = "admin/django_idempotency/idempotencyrecord/dashboard.html"
SECONDS = 1.0  # for a panel
MOST = 10_000  # records that a panel looks at
RANGES = {"24h": DAY, "7d": 7 * DAY}
SOUND = 0.01  # the share of replays that a sound system stays under
CHARTED = ("deduplicated", "conflicts", "mismatches", "takeovers")
BESIDE = figures.NAMES.keys() - {*CHARTED, "replays"}


def dashboard(model_admin: Any, request: HttpRequest) -> TemplateResponse:
    """The page, for whoever may see the records. ``?range=`` is one of ``RANGES``."""
    if not model_admin.has_view_permission(request):
        raise PermissionDenied
    request.current_app = model_admin.admin_site.name
    chosen = request.GET.get("range", "")
    context = {
        **model_admin.admin_site.each_context(request),
        "title": _("Idempotency dashboard"),
        "opts": model_admin.opts,
        "ranges": [(name, _range(name), name == (chosen if chosen in RANGES else "24h")) for name in RANGES],
        "counts": conf().tally is not None,
        **panels(RANGES.get(chosen, DAY), using=database()),
    }
    return TemplateResponse(request, TEMPLATE, context)


def _range(name: str) -> str:
    return {"24h": _("24 hours"), "7d": _("7 days")}[name]


# --- Panels ----------------------------------------------------------------------------------------------------------


def panels(seconds: float, *, using: str) -> dict[str, Any]:
    """What the template shows, by the name of the panel; ``None`` where the database did not answer, or not in time."""
    shows: dict[str, Callable[[_Asking], Any]] = {
        "happened": lambda ask: happened(ask, seconds),
        "pending": lambda ask: figures.waiting(ask(stats.pending, most=MOST), MOST),
        "backlog": lambda ask: figures.backlog(ask(stats.due, most=MOST), MOST),
        "size": sizes,
        "rankings": rankings,
    }
    return {name: _panel(show, using) for name, show in shows.items()}


def _panel(show: Callable[[_Asking], T], using: str) -> T | None:
    try:
        return show(_Asking(using))
    except Error as error:  # DatabaseError and InterfaceError: not in time, no table, no connection any more
        log(logging.WARNING, "dashboard", "idempotency dashboard: %s", cause(error))
        return None


class _Asking:
    """Asks the statistics one question after the other, for ``SECONDS``."""

    def __init__(self, using: str) -> None:
        self.using = using
        self.ends = time.monotonic() + SECONDS

    def __call__(self, question: Callable[..., T], *args: Any, **named: Any) -> T:
        with stats.at_most(max(0.001, self.ends - time.monotonic()), self.using):
            return question(*args, **named, using=self.using)


@dataclass(frozen=True, slots=True)
class Happened:
    charts: list[Chart]
    table: Table | None
    beside: list[tuple[Figure, Figure]]


def happened(ask: _Asking, seconds: float) -> Happened:
    history = ask(stats.history, seconds, hourly=seconds > DAY)
    hour, day = ask(stats.activity, HOUR), ask(stats.activity, DAY)
    return Happened(charts(history, hour, day), table(history), beside(hour, day))


@dataclass(frozen=True, slots=True)
class Sizes:
    measures: list[Measure]
    figures: list[Figure]


def sizes(ask: _Asking) -> Sizes:
    size = ask(stats.size)
    projection = ask(stats.projection, size)
    return Sizes(measures(size, projection), figures.sizes(size, projection))


def rankings(ask: _Asking) -> list[Ranking]:
    views = ask(stats.views, DAY)
    return [busiest(views, name) for name in ("replays", "conflicts")]


# --- What they show --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Chart:
    """``width``: how many bars there is room for. ``line``: the height of a line to compare with, if there is one."""

    name: str
    title: str
    day: str
    hour: str
    description: str
    top: str
    width: int
    bars: list[Bar]
    line: str | None


def charts(history: Sequence[Span], hour: Activity, day: Activity) -> list[Chart]:
    """One for each of ``CHARTED``. Pure."""
    return [_chart(name, history, hour, day) for name in CHARTED]


def _chart(name: str, history: Sequence[Span], hour: Activity, day: Activity) -> Chart:
    is_share = name == "deduplicated"
    values = [getattr(span.activity, name) for span in history]
    top = top_of(values, least=SOUND if is_share else 4.0)
    labels = [f"{moment(span)}: {_shown(name, value)}" for span, value in zip(history, values, strict=True)]
    return Chart(
        name=name,
        title=str(figures.NAMES[name]),
        day=_shown(name, getattr(day, name)),
        hour=_shown(name, getattr(hour, name)),
        description=_described(name, history, values),
        top=_shown(name, top),
        width=max(1, len(values)),
        bars=bars(values, labels, top=top),
        line=level(SOUND, top=top) if is_share else None,
    )


def _described(name: str, history: Sequence[Span], values: Sequence[float]) -> str:
    if not any(values):
        return _("None in this time.")
    highest = max(range(len(values)), key=values.__getitem__)
    return _("At most %(value)s, from %(moment)s on.") % {
        "value": _shown(name, values[highest]),
        "moment": moment(history[highest]),
    }


@dataclass(frozen=True, slots=True)
class Table:
    """What the charts show, the latest first; ``begins``: the moment of the earliest."""

    begins: str
    columns: list[str]
    rows: list[tuple[str, list[str]]]


def table(history: Sequence[Span]) -> Table | None:
    """The charts for those who would rather read, or can't see them. Pure."""
    if not history:
        return None
    columns = ("requests", *CHARTED)
    rows = [
        (moment(span), [_shown(name, getattr(span.activity, name)) for name in columns]) for span in reversed(history)
    ]
    return Table(begins=moment(history[0]), columns=[str(figures.NAMES[name]) for name in columns], rows=rows)


def _shown(name: str, value: float) -> str:
    return figures.share(value) if name == "deduplicated" else figures.amount(value)


def moment(span: Span) -> str:
    """When the span began, in the time zone in force: ``21 Nov, 14:15``."""
    return date_format(timezone.localtime(span.since), "j M, H:i")


def beside(hour: Activity, day: Activity) -> list[tuple[Figure, Figure]]:
    """What has no chart, of the last hour and the last day. Pure."""
    pairs = zip(figures.NAMES, figures.happened(hour), figures.happened(day), strict=True)
    return [(of_hour, of_day) for name, of_hour, of_day in pairs if name in BESIDE]


@dataclass(frozen=True, slots=True)
class Busy:
    """``name``: of the view, in the parts between which it may be broken."""

    name: list[str]
    count: str
    requests: str
    segments: list[Segment]


@dataclass(frozen=True, slots=True)
class Ranking:
    title: str
    name: str
    views: list[Busy]


def busiest(views: Mapping[str, Activity], name: str) -> Ranking:
    """The views with the most ``name``. Pure."""
    found = stats.busiest(views, name)
    most = max((getattr(activity, name) for _view, activity in found), default=0)
    return Ranking(
        title={"replays": _("Most replays"), "conflicts": _("Most conflicts")}[name],
        name=str(figures.NAMES[name]),
        views=[
            Busy(
                name=view.split("."),
                count=figures.amount(getattr(activity, name)),
                requests=figures.amount(activity.requests),
                segments=segments([("part", getattr(activity, name))], whole=most),
            )
            for view, activity in found
        ],
    )


@dataclass(frozen=True, slots=True)
class Measure:
    """A bar that lies."""

    title: str
    value: str
    segments: list[Segment]


def measures(size: Size, projection: Projection) -> list[Measure]:
    """The size now, in its parts, and the one to come, to one scale; none if the size is unknown. Pure."""
    if size.bytes is None:
        return []
    expected = projection.expected_bytes or 0.0
    dead = size.dead_bytes or 0
    parts = [("table", (size.table_bytes or 0) - dead), ("dead", dead), ("indexes", size.index_bytes or 0)]
    whole = max(size.bytes, expected)
    now = Measure(_("now"), figures.volume(size.bytes), segments(parts, whole=whole))
    if projection.expected_bytes is None:
        return [now]
    to_come = segments([("expected", expected)], whole=whole)
    return [now, Measure(_("at the last day's rate"), figures.volume(expected), to_come)]
