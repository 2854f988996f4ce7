"""The dashboard in the admin: what happens to keys, how long they wait, and how large
the table is.

Each panel asks for little, through indexes or statistics, and has one second. If the
database does not answer a panel, or not in time, that panel says so, and the others are
shown all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from django.core.exceptions import PermissionDenied
from django.http import HttpRequest
from django.template.response import TemplateResponse
from django.utils.functional import Promise
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from django_idempotency.contrib.dashboard import activity as activity_of
from django_idempotency.contrib.dashboard import formatting as of_counters
from django_idempotency.contrib.dashboard.activity import DAY, HOUR, WEEK
from django_idempotency.contrib.dashboard.conf import observes, options
from django_idempotency.extending.admin import (
    Page,
    alarms,
    choices,
    database_of,
    panel,
    query_of,
)
from django_idempotency.extending.figures import Figure, due, figures, pending, size

TEMPLATE = "admin/django_idempotency/idempotencyrecord/dashboard.html"
MOST = 10_000  # the most records that a panel looks at


# By the value of ``?range=``: the seconds, the title of its link, and its name beside
# the title of a panel.
RANGES: Mapping[str, tuple[int, str | Promise, str | Promise]] = {
    "1h": (HOUR, gettext_lazy("1 hour"), gettext_lazy("last hour")),
    "6h": (6 * HOUR, gettext_lazy("6 hours"), gettext_lazy("last 6 hours")),
    "24h": (DAY, gettext_lazy("24 hours"), gettext_lazy("last 24 hours")),
    "7d": (WEEK, gettext_lazy("7 days"), gettext_lazy("last 7 days")),
}
STANDARD = "24h"


# the title of a panel, when, and its figures
Shown = tuple[str, str | Promise, Callable[[Callable[..., Any]], list[Figure]]]


@dataclass(frozen=True, slots=True)
class Panel:
    """``figures``: ``None`` if the database did not respond in time."""

    title: str
    within: str | Promise
    figures: list[Figure] | None


def dashboard(model_admin: Any, request: HttpRequest) -> TemplateResponse:
    """Return the page for users who may see records."""
    if not model_admin.has_view_permission(request):
        raise PermissionDenied
    request.current_app = model_admin.admin_site.name
    chosen = next(
        (name for name in RANGES if name == request.GET.get("range")), STANDARD
    )
    seconds, _title, within = RANGES[chosen]
    using, database = database_of(request), query_of(request)
    context = {
        **model_admin.admin_site.each_context(request),
        "title": _("Idempotency dashboard"),
        "opts": model_admin.opts,
        "ranges": [
            (title, "&".join(filter(None, (f"range={name}", database))), name == chosen)
            for name, (_seconds, title, _within) in RANGES.items()
        ],
        "databases": choices(request),
        "database_query": database,
        "counts": options().stats_retention is not None,
        "alarms": alarms(using),
        "lines": panel(lambda ask: _lines(ask(activity_of.history, seconds)), using),
        "within": within,
        "panels": panels(seconds, within, using),
    }
    return TemplateResponse(request, TEMPLATE, context)


def _lines(history: activity_of.History) -> dict[str, Any]:
    """Return the lines, and the same as a table, for screen readers."""
    lines = of_counters.drawn(history[1])
    columns = zip(*(line.texts for line in lines), strict=True)
    return {"lines": lines, "table": [*zip(history[0], columns, strict=True)]}


def panels(seconds: int, within: str | Promise, using: str) -> list[Panel]:
    views = panel(lambda ask: ask(activity_of.views, seconds), using)
    observed: Shown = (
        _("Observed"),
        within,
        lambda ask: of_counters.observed(ask(activity_of.observed, seconds)),
    )
    shown: list[Shown] = [
        *([observed] if observes() else []),
        (
            _("What happened"),
            within,
            lambda ask: of_counters.happened(ask(activity_of.activity, seconds)),
        ),
        (
            _("Pending"),
            _("now"),
            lambda ask: figures(ask(pending, most=MOST), MOST),
        ),
        (
            _("Cleaning up"),
            _("now"),
            lambda ask: figures(ask(due, most=MOST), MOST),
        ),
        (_("Size"), _("now"), lambda ask: figures(ask(size))),
    ]
    rankings = {"replays": _("Most replays"), "conflicts": _("Most conflicts")}
    return [
        *(Panel(title, when, panel(figures, using)) for title, when, figures in shown),
        *(
            Panel(
                title,
                within,
                None if views is None else of_counters.busiest(views, name),
            )
            for name, title in rankings.items()
        ),
    ]


PAGE = Page(
    "dashboard/", dashboard, "django_idempotency_dashboard", gettext_lazy("Dashboard")
)
