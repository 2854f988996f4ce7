"""The dashboard in the admin: what happens to keys, how long they wait, and how large the table is.

Each panel asks for little, through indexes or statistics, and has one second. If the database does not answer a panel,
or not in time, that panel says so, and the others are shown all the same.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

from django.core.exceptions import PermissionDenied
from django.http import Http404, HttpRequest, HttpResponse, JsonResponse
from django.template.response import TemplateResponse
from django.utils.formats import date_format
from django.utils.functional import Promise
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from django_idempotency.admin.alarms import alarms
from django_idempotency.admin.pages import Asking, choices, database_of, panel, query_of
from django_idempotency.conf import conf
from django_idempotency.contrib.dashboard import activity as activity_of
from django_idempotency.contrib.dashboard import formatting as of_counters
from django_idempotency.contrib.dashboard.activity import Activity, Projection, Span
from django_idempotency.contrib.dashboard.charts import bars, level, segments, top_of
from django_idempotency.contrib.dashboard.conf import options
from django_idempotency.stats import formatting, queries
from django_idempotency.stats.formatting import Figure
from django_idempotency.stats.queries import DAY, HOUR, MINUTES, WEEK, Size
from django_idempotency.values.printable import in_zone, zone

TEMPLATE = "admin/django_idempotency/idempotencyrecord/dashboard.html"
MOST = 10_000  # the most records that a panel looks at
REFRESHED = 30  # seconds between refreshes, if the user turns them on
SOUND = 0.01  # a healthy system stays under this share of replays
CHARTED = ("deduplicated", "conflicts", "mismatches", "takeovers")
BESIDE = of_counters.NAMES.keys() - set(CHARTED)


# --- What is asked ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Range:
    """The last ``seconds``, in spans of ``step`` seconds. ``within`` is its name beside a figure."""

    name: str
    seconds: int
    step: int
    title: str | Promise
    within: str | Promise


RANGES: Mapping[str, Range] = {
    found.name: found
    for found in (
        Range("1h", HOUR, 5 * MINUTES, gettext_lazy("1 hour"), gettext_lazy("last hour")),
        Range("6h", 6 * HOUR, 5 * MINUTES, gettext_lazy("6 hours"), gettext_lazy("last 6 hours")),
        Range("24h", DAY, 15 * MINUTES, gettext_lazy("24 hours"), gettext_lazy("last 24 hours")),
        Range("7d", WEEK, HOUR, gettext_lazy("7 days"), gettext_lazy("last 7 days")),
    )
}
STANDARD = RANGES["24h"]


@dataclass(frozen=True, slots=True)
class Chosen:
    """``view`` is the dotted name of one view; empty for all. ``database`` is its part of the query string."""

    range: Range
    view: str
    database: str

    @classmethod
    def of(cls, request: HttpRequest) -> Chosen:
        chosen = RANGES.get(request.GET.get("range", ""), STANDARD)
        return cls(chosen, request.GET.get("view", "").replace("\0", ""), query_of(request))

    def query(self, *, range: str | None = None, view: str | None = None) -> str:
        """Return the query string of a link to the same page for another range, or for another view."""
        asked = {"range": range or self.range.name, "view": self.view if view is None else view}
        return "&".join(filter(None, (urlencode({name: text for name, text in asked.items() if text}), self.database)))


# --- The pages -------------------------------------------------------------------------------------------------------


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
        "counts": options().stats_retention is not None,
        "observes": conf().observes,
        **panels(chosen, using=database_of(request)),
    }
    return TemplateResponse(request, TEMPLATE, context)


def figures(model_admin: Any, request: HttpRequest) -> HttpResponse:
    """Return the file, for users who may see the dashboard. ``?format=`` is one of ``FORMATS``."""
    if not model_admin.has_view_permission(request):
        raise PermissionDenied
    written = FORMATS.get(request.GET.get("format", ""))
    if written is None:
        raise Http404
    chosen, using = Chosen.of(request), database_of(request)
    history = activity_of.history(chosen.range.seconds, step=chosen.range.step, view=chosen.view, using=using)
    response = written(chosen, using, history)
    name = f"idempotency-{chosen.range.name}.{request.GET['format']}"
    response.headers["Content-Disposition"] = f'attachment; filename="{name}"'
    return response


def _as_csv(_chosen: Chosen, _using: str, history: Sequence[Span]) -> HttpResponse:
    response = HttpResponse(content_type="text/csv; charset=utf-8")
    writer = csv.writer(response)
    writer.writerow(["since", *activity_of.figures_of({})])
    for span in history:
        writer.writerow([span.since.isoformat(), *span.activity.values()])
    return response


def _as_json(chosen: Chosen, using: str, history: Sequence[Span]) -> HttpResponse:
    spans = [{"since": span.since.isoformat(), **span.activity} for span in history]
    asked = {"database": using, "view": chosen.view or None, "range": chosen.range.name}
    return JsonResponse({**asked, "seconds_in_span": chosen.range.step, "spans": spans})


FORMATS: Mapping[str, Callable[[Chosen, str, Sequence[Span]], HttpResponse]] = {"csv": _as_csv, "json": _as_json}


# --- Panels ----------------------------------------------------------------------------------------------------------


def panels(chosen: Chosen, *, using: str) -> dict[str, Any]:
    """Return what each panel shows, by its name; ``None`` if the database did not respond in time.

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
        **(
            {"observed": lambda ask: of_counters.observed(ask(activity_of.observed, seconds))}
            if conf().observes
            else {}
        ),
    }


def happened(ask: Asking, chosen: Chosen) -> dict[str, Any]:
    seconds, view = chosen.range.seconds, chosen.view
    history = ask(activity_of.history, seconds, step=chosen.range.step, view=view)
    whole = ask(activity_of.activity, seconds, view=view)
    return {"charts": charts(history, whole), "table": table(history), "beside": beside(whole)}


def sizes(ask: Asking) -> dict[str, Any]:
    size = ask(queries.size)
    projection = ask(activity_of.projection, size)
    figures = [*formatting.sizes(size), *of_counters.growth(projection)]
    return {"measures": measures(size, projection), "figures": figures}


def rankings(ask: Asking, chosen: Chosen) -> list[Shown]:
    views = ask(activity_of.views, chosen.range.seconds)
    return [busiest(views, name, chosen) for name in ("requests", "replays", "conflicts")]


# --- What they show --------------------------------------------------------------------------------------------------

Shown = dict[str, Any]  # what the template reads, by name


def charts(history: Sequence[Span], whole: Activity) -> list[Shown]:
    """Return a chart for each of ``CHARTED``. Pure."""
    return [_chart(name, history, whole) for name in CHARTED]


def _chart(name: str, history: Sequence[Span], whole: Activity) -> Shown:
    is_share = name == "deduplicated"
    values = [span.activity[name] for span in history]
    top = top_of(values, least=SOUND if is_share else 4.0)
    labels = [f"{moment(span)}: {_shown(name, value)}" for span, value in zip(history, values, strict=True)]
    return {
        "name": name,
        "title": str(of_counters.NAMES[name]),
        "whole": _shown(name, whole[name]),
        "description": _described(name, history, values),
        "top": _shown(name, top),
        "width": max(1, len(values)),  # how many bars there is room for
        "bars": bars(values, labels, top=top),
        "line": level(SOUND, top=top) if is_share else None,  # to compare with
    }


def _described(name: str, history: Sequence[Span], values: Sequence[float]) -> str:
    if not any(values):
        return _("None in this period.")
    highest = max(range(len(values)), key=values.__getitem__)
    return _("Peak: %(value)s, from %(moment)s on.") % {
        "value": _shown(name, values[highest]),
        "moment": moment(history[highest]),
    }


def table(history: Sequence[Span]) -> Shown | None:
    """Return the charts as a table, for people who would rather read, or can't see charts. Pure."""
    if not history:
        return None
    columns = ("requests", *CHARTED)
    rows = [(moment(span), [_shown(name, span.activity[name]) for name in columns]) for span in reversed(history)]
    return {"begins": moment(history[0]), "columns": [str(of_counters.NAMES[name]) for name in columns], "rows": rows}


def _shown(name: str, value: float) -> str:
    return formatting.share(value) if name == "deduplicated" else formatting.amount(value)


def moment(span: Span) -> str:
    """Return when the span began, with the time zone in force: ``21 Nov, 14:15 CET``."""
    # Translators: a date without the year, and the time, as Django's ``date`` filter takes it.
    shown = date_format(in_zone(span.since), _("j M, H:i"))
    return f"{shown} {zone(span.since)}"


def beside(whole: Activity) -> list[Figure]:
    """Return the figures of the whole range that have no chart. Pure."""
    return [
        figure for name, figure in zip(of_counters.NAMES, of_counters.happened(whole), strict=True) if name in BESIDE
    ]


def busiest(views: Mapping[str, Activity], name: str, chosen: Chosen) -> Shown:
    """Return the views with the most ``name``. Pure."""
    found = activity_of.busiest(views, name)
    most = max((activity[name] for _view, activity in found), default=0)
    titles = {"requests": _("Most requests"), "replays": _("Most replays"), "conflicts": _("Most conflicts")}
    return {
        "title": titles[name],
        "name": str(of_counters.NAMES[name]),
        "counts_apart": name != "requests",  # something other than requests
        "views": [
            {
                "name": view.split("."),  # in parts between which a line may break
                "query": chosen.query(view=view),
                "count": formatting.amount(activity[name]),
                "requests": formatting.amount(activity["requests"]),
                "segments": segments([("part", activity[name])], whole=most),
            }
            for view, activity in found
        ],
    }


def measures(size: Size, projection: Projection) -> list[Shown]:
    """Return the size now, in its parts, and the one expected, to one scale; nothing if the size is unknown. Pure."""
    if size.bytes is None:
        return []
    expected = projection.expected_bytes or 0.0
    dead = size.dead_bytes or 0
    parts = [("table", (size.table_bytes or 0) - dead), ("dead", dead), ("indexes", size.index_bytes or 0)]
    whole = max(size.bytes, expected)
    shown: list[tuple[str, float, list[tuple[str, float]]]] = [(_("now"), size.bytes, [*parts])]
    if projection.expected_bytes is not None:
        shown.append((_("at the last day's rate"), expected, [("expected", expected)]))
    return [
        {"title": title, "value": formatting.volume(bytes), "segments": segments(of, whole=whole)}
        for title, bytes, of in shown
    ]
