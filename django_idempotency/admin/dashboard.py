"""The dashboard in the admin: what happens to keys, how long they wait, and how large the table is.

Each panel asks for little, through indexes or statistics, and has one second. If the database does not answer a panel,
or not in time, that panel says so, and the others are shown all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from django.core.exceptions import PermissionDenied
from django.http import HttpRequest
from django.template.response import TemplateResponse
from django.utils.formats import date_format
from django.utils.translation import gettext as _

from django_idempotency.admin.alarms import alarms
from django_idempotency.admin.charts import Bar, Segment, bars, level, segments, top_of
from django_idempotency.admin.figures_export import FORMATS
from django_idempotency.admin.limits import Asking, panel
from django_idempotency.admin.ranges import RANGES, Chosen
from django_idempotency.admin.shards import choices, database_of, query_of
from django_idempotency.conf import conf
from django_idempotency.moments import in_zone, zone
from django_idempotency.stats import formatting, queries
from django_idempotency.stats.formatting import Figure
from django_idempotency.stats.queries import Activity, Projection, Size, Span

TEMPLATE = "admin/django_idempotency/idempotencyrecord/dashboard.html"
MOST = 10_000  # the most records that a panel looks at
REFRESHED = 30  # seconds between refreshes, if the user turns them on
SOUND = 0.01  # a healthy system stays under this share of replays
CHARTED = ("deduplicated", "conflicts", "mismatches", "takeovers")
BESIDE = formatting.NAMES.keys() - set(CHARTED)


def dashboard(model_admin: Any, request: HttpRequest) -> TemplateResponse:
    """Return the page for users who may see records. ``?range=`` is one of ``RANGES``, ``?view=`` a view's name."""
    if not model_admin.has_view_permission(request):
        raise PermissionDenied
    request.current_app = model_admin.admin_site.name
    chosen = Chosen.of(request)
    context = {
        **model_admin.admin_site.each_context(request),
        "title": _("Idempotency dashboard"),
        "opts": model_admin.opts,
        "range": chosen.range,
        "view": chosen.view,
        "view_parts": chosen.view.split("."),
        "ranges": [(found.title, chosen.query(range=name), found == chosen.range) for name, found in RANGES.items()],
        "all_views": chosen.query(view=""),
        "exports": [(name.upper(), f"format={name}&{chosen.query()}") for name in FORMATS],
        "refreshed": REFRESHED,
        "databases": choices(request),
        "database_query": query_of(request),
        "counts": conf().stats_retention is not None,
        "observes": conf().observes,
        **panels(chosen, using=database_of(request)),
    }
    return TemplateResponse(request, TEMPLATE, context)


# --- Panels ----------------------------------------------------------------------------------------------------------


def panels(chosen: Chosen, *, using: str) -> dict[str, Any]:
    """Return what each panel shows, by its name; ``None`` if the database did not answer it, or not in time.

    For a single view there is only what happened, because records don't tell which view they belong to.
    """
    shows: dict[str, Callable[[Asking], Any]] = {"happened": lambda ask: happened(ask, chosen)}
    if not chosen.view:
        shows |= _of_all_views(chosen)
    shown: dict[str, Any] = {name: panel(show, using) for name, show in shows.items()}
    return shown | {"alarms": alarms(using)}


def _of_all_views(chosen: Chosen) -> dict[str, Callable[[Asking], Any]]:
    seconds = chosen.range.seconds
    return {
        "pending": lambda ask: formatting.waiting(ask(queries.pending, most=MOST), MOST),
        "backlog": lambda ask: formatting.backlog(ask(queries.due, most=MOST), MOST),
        "size": sizes,
        "rankings": lambda ask: rankings(ask, chosen),
        **({"observed": lambda ask: formatting.observed(ask(queries.observed, seconds))} if conf().observes else {}),
    }


@dataclass(frozen=True, slots=True)
class Happened:
    charts: list[Chart]
    table: Table | None
    beside: list[Figure]


def happened(ask: Asking, chosen: Chosen) -> Happened:
    seconds, view = chosen.range.seconds, chosen.view
    history = ask(queries.history, seconds, step=chosen.range.step, view=view)
    whole = ask(queries.activity, seconds, view=view)
    return Happened(charts(history, whole), table(history), beside(whole))


@dataclass(frozen=True, slots=True)
class Sizes:
    measures: list[Measure]
    figures: list[Figure]


def sizes(ask: Asking) -> Sizes:
    size = ask(queries.size)
    projection = ask(queries.projection, size)
    return Sizes(measures(size, projection), formatting.sizes(size, projection))


def rankings(ask: Asking, chosen: Chosen) -> list[Ranking]:
    views = ask(queries.views, chosen.range.seconds)
    return [busiest(views, name, chosen) for name in ("requests", "replays", "conflicts")]


# --- What they show --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Chart:
    """``width`` is how many bars there is room for, ``line`` the height of a line to compare with, if there is one."""

    name: str
    title: str
    whole: str
    description: str
    top: str
    width: int
    bars: list[Bar]
    line: str | None


def charts(history: Sequence[Span], whole: Activity) -> list[Chart]:
    """Return a chart for each of ``CHARTED``. Pure."""
    return [_chart(name, history, whole) for name in CHARTED]


def _chart(name: str, history: Sequence[Span], whole: Activity) -> Chart:
    is_share = name == "deduplicated"
    values = [getattr(span.activity, name) for span in history]
    top = top_of(values, least=SOUND if is_share else 4.0)
    labels = [f"{moment(span)}: {_shown(name, value)}" for span, value in zip(history, values, strict=True)]
    return Chart(
        name=name,
        title=str(formatting.NAMES[name]),
        whole=_shown(name, getattr(whole, name)),
        description=_described(name, history, values),
        top=_shown(name, top),
        width=max(1, len(values)),
        bars=bars(values, labels, top=top),
        line=level(SOUND, top=top) if is_share else None,
    )


def _described(name: str, history: Sequence[Span], values: Sequence[float]) -> str:
    if not any(values):
        return _("None in this period.")
    highest = max(range(len(values)), key=values.__getitem__)
    return _("Peak: %(value)s, from %(moment)s on.") % {
        "value": _shown(name, values[highest]),
        "moment": moment(history[highest]),
    }


@dataclass(frozen=True, slots=True)
class Table:
    """What the charts show, latest first. ``begins`` is the moment of the earliest span."""

    begins: str
    columns: list[str]
    rows: list[tuple[str, list[str]]]


def table(history: Sequence[Span]) -> Table | None:
    """Return the charts as a table, for people who would rather read, or can't see charts. Pure."""
    if not history:
        return None
    columns = ("requests", *CHARTED)
    rows = [
        (moment(span), [_shown(name, getattr(span.activity, name)) for name in columns]) for span in reversed(history)
    ]
    return Table(begins=moment(history[0]), columns=[str(formatting.NAMES[name]) for name in columns], rows=rows)


def _shown(name: str, value: float) -> str:
    return formatting.share(value) if name == "deduplicated" else formatting.amount(value)


def moment(span: Span) -> str:
    """Return when the span began, with the time zone in force: ``21 Nov, 14:15 CET``."""
    # Translators: a date without the year, and the time, as Django's ``date`` filter takes it.
    shown = date_format(in_zone(span.since), _("j M, H:i"))
    return f"{shown} {zone(span.since)}"


def beside(whole: Activity) -> list[Figure]:
    """Return the figures of the whole range that have no chart. Pure."""
    return [figure for name, figure in zip(formatting.NAMES, formatting.happened(whole), strict=True) if name in BESIDE]


@dataclass(frozen=True, slots=True)
class Busy:
    """``name`` is the view's, in parts between which a line may break. ``query`` is the query string of its page."""

    name: list[str]
    query: str
    count: str
    requests: str
    segments: list[Segment]


@dataclass(frozen=True, slots=True)
class Ranking:
    """``counts_apart``: whether it counts something other than requests."""

    title: str
    name: str
    counts_apart: bool
    views: list[Busy]


def busiest(views: Mapping[str, Activity], name: str, chosen: Chosen) -> Ranking:
    """Return the views with the most ``name``. Pure."""
    found = queries.busiest(views, name)
    most = max((getattr(activity, name) for _view, activity in found), default=0)
    return Ranking(
        title={"requests": _("Most requests"), "replays": _("Most replays"), "conflicts": _("Most conflicts")}[name],
        name=str(formatting.NAMES[name]),
        counts_apart=name != "requests",
        views=[
            Busy(
                name=view.split("."),
                query=chosen.query(view=view),
                count=formatting.amount(getattr(activity, name)),
                requests=formatting.amount(activity.requests),
                segments=segments([("part", getattr(activity, name))], whole=most),
            )
            for view, activity in found
        ],
    )


@dataclass(frozen=True, slots=True)
class Measure:
    """A horizontal bar."""

    title: str
    value: str
    segments: list[Segment]


def measures(size: Size, projection: Projection) -> list[Measure]:
    """Return the size now, in its parts, and the one expected, to one scale; nothing if the size is unknown. Pure."""
    if size.bytes is None:
        return []
    expected = projection.expected_bytes or 0.0
    dead = size.dead_bytes or 0
    parts = [("table", (size.table_bytes or 0) - dead), ("dead", dead), ("indexes", size.index_bytes or 0)]
    whole = max(size.bytes, expected)
    now = Measure(_("now"), formatting.volume(size.bytes), segments(parts, whole=whole))
    if projection.expected_bytes is None:
        return [now]
    to_come = segments([("expected", expected)], whole=whole)
    return [now, Measure(_("at the last day's rate"), formatting.volume(expected), to_come)]
