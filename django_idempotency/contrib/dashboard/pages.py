"""The dashboard in the admin: what happens to keys, how long they wait, and how large the table is.

Each panel asks for little, through indexes or statistics, and has one second. If the database does not answer a panel,
or not in time, that panel says so, and the others are shown all the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from django.core.exceptions import PermissionDenied
from django.http import HttpRequest
from django.template.response import TemplateResponse
from django.utils.functional import Promise
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from django_idempotency.admin.alarms import alarms
from django_idempotency.admin.pages import Asking, choices, database_of, panel, query_of
from django_idempotency.conf import conf
from django_idempotency.contrib.dashboard import activity as activity_of
from django_idempotency.contrib.dashboard import formatting as of_counters
from django_idempotency.contrib.dashboard.conf import options
from django_idempotency.maintenance import formatting, stats
from django_idempotency.maintenance.formatting import Figure
from django_idempotency.maintenance.stats import DAY, HOUR, WEEK

TEMPLATE = "admin/django_idempotency/idempotencyrecord/dashboard.html"
MOST = 10_000  # the most records that a panel looks at


@dataclass(frozen=True, slots=True)
class Range:
    """The last ``seconds``. ``within`` is its name beside the title of a panel."""

    seconds: int
    title: str | Promise
    within: str | Promise


RANGES: Mapping[str, Range] = {
    "1h": Range(HOUR, gettext_lazy("1 hour"), gettext_lazy("last hour")),
    "6h": Range(6 * HOUR, gettext_lazy("6 hours"), gettext_lazy("last 6 hours")),
    "24h": Range(DAY, gettext_lazy("24 hours"), gettext_lazy("last 24 hours")),
    "7d": Range(WEEK, gettext_lazy("7 days"), gettext_lazy("last 7 days")),
}
STANDARD = RANGES["24h"]


@dataclass(frozen=True, slots=True)
class Panel:
    """``figures``: ``None`` if the database did not respond in time."""

    title: str
    within: str | Promise
    figures: list[Figure] | None


def dashboard(model_admin: Any, request: HttpRequest) -> TemplateResponse:
    """Return the page for users who may see records. ``?range=`` is one of ``RANGES``."""
    if not model_admin.has_view_permission(request):
        raise PermissionDenied
    request.current_app = model_admin.admin_site.name
    chosen = RANGES.get(request.GET.get("range", ""), STANDARD)
    using, database = database_of(request), query_of(request)
    context = {
        **model_admin.admin_site.each_context(request),
        "title": _("Idempotency dashboard"),
        "opts": model_admin.opts,
        "ranges": [
            (found.title, "&".join(filter(None, (f"range={name}", database))), found is chosen)
            for name, found in RANGES.items()
        ],
        "databases": choices(request),
        "database_query": database,
        "counts": options().stats_retention is not None,
        "alarms": alarms(using),
        "panels": panels(chosen, using),
    }
    return TemplateResponse(request, TEMPLATE, context)


def panels(chosen: Range, using: str) -> list[Panel]:
    def observed(ask: Asking) -> list[Figure]:
        return of_counters.observed(ask(activity_of.observed, chosen.seconds))

    def happened(ask: Asking) -> list[Figure]:
        return of_counters.happened(ask(activity_of.activity, chosen.seconds))

    def pending(ask: Asking) -> list[Figure]:
        return formatting.waiting(ask(stats.pending, most=MOST), MOST)

    def backlog(ask: Asking) -> list[Figure]:
        return formatting.backlog(ask(stats.due, most=MOST), MOST)

    def sizes(ask: Asking) -> list[Figure]:
        return formatting.sizes(ask(stats.size))

    views = panel(lambda ask: ask(activity_of.views, chosen.seconds), using)
    rankings = {"replays": _("Most replays"), "conflicts": _("Most conflicts")}
    now = _("now")
    return [
        *([Panel(_("Observed"), chosen.within, panel(observed, using))] if conf().observes else []),
        Panel(_("What happened"), chosen.within, panel(happened, using)),
        Panel(_("Pending"), now, panel(pending, using)),
        Panel(_("Cleaning up"), now, panel(backlog, using)),
        Panel(_("Size"), now, panel(sizes, using)),
        *(
            Panel(title, chosen.within, None if views is None else of_counters.busiest(views, name))
            for name, title in rankings.items()
        ),
    ]
