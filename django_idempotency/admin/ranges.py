"""What a page of the dashboard is asked to show: a range of time, for all views or for one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlencode

from django.http import HttpRequest
from django.utils.functional import Promise
from django.utils.translation import gettext_lazy as _

from django_idempotency.admin.shards import query_of
from django_idempotency.stats.queries import DAY, HOUR, MINUTES, WEEK


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
        Range("1h", HOUR, 5 * MINUTES, _("1 hour"), _("last hour")),
        Range("6h", 6 * HOUR, 5 * MINUTES, _("6 hours"), _("last 6 hours")),
        Range("24h", DAY, 15 * MINUTES, _("24 hours"), _("last 24 hours")),
        Range("7d", WEEK, HOUR, _("7 days"), _("last 7 days")),
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
