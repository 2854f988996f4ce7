"""The list of records and its filters. Each uses an index, or is offered without a look at the table.

The links of the list keep to the database and the situation that are shown.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from datetime import datetime, time, timedelta
from typing import Any
from uuid import UUID

from django.contrib import admin
from django.contrib.admin.options import IncorrectLookupParameters
from django.contrib.admin.views.main import PAGE_VAR, SEARCH_VAR, ChangeList
from django.core.exceptions import SuspiciousOperation
from django.db import Error
from django.http import HttpRequest, QueryDict
from django.utils import timezone
from django.utils.formats import date_format
from django.utils.text import format_lazy
from django.utils.translation import gettext_lazy as _

from django_idempotency.admin.lists import SITUATIONS, USUAL, Records, Situation
from django_idempotency.admin.pages import PARAMETER, choices, database_of, query_of
from django_idempotency.models import IdempotencyRecord
from django_idempotency.stats import queries
from django_idempotency.values.printable import zone

METHODS = ("POST", "PUT", "PATCH", "DELETE", "MESSAGE")
MOST_DAYS = 31


def situation_of(request: HttpRequest) -> Situation:
    return SITUATIONS.get(request.GET.get("situation", USUAL), SITUATIONS[USUAL])


def term_of(search: str) -> str:
    """Return what is searched for; empty if there is no search, or for a character that no key has."""
    return "" if "\0" in search else search.strip().strip('"')


class DatabaseFilter(admin.SimpleListFilter):
    """The database whose records are shown, if there are several. One of them is always chosen."""

    title = _("database")
    parameter_name = PARAMETER

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        self.shown = choices(request)
        return [(alias, alias) for alias, _chosen in self.shown]

    def choices(self, changelist: Any) -> Iterator[Any]:
        for alias, chosen in self.shown:
            query = changelist.get_query_string({self.parameter_name: alias}, ["when", "p"])
            yield {"selected": chosen, "query_string": query, "display": alias}

    def queryset(self, request: HttpRequest, queryset: Records) -> Records:
        return queryset  # the list is read from that database already


class SituationFilter(admin.SimpleListFilter):
    """The list that is shown. One is always chosen, as no index serves them together; a search looks at all records."""

    title = _("situation")
    parameter_name = "situation"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, Any]]:
        rows = IdempotencyRecord.objects.using(database_of(request))
        return [(name, _counted(situation, rows)) for name, situation in SITUATIONS.items()]

    def choices(self, changelist: Any) -> Iterator[Any]:
        chosen = None if changelist.query else self.value() or USUAL
        for name, title in self.lookup_choices:
            query = changelist.get_query_string({self.parameter_name: name}, ["q", "when", "p", "o"])
            yield {"selected": name == chosen, "query_string": query, "display": title}

    def queryset(self, request: HttpRequest, queryset: Records) -> Records:
        if term_of(request.GET.get("q", "")):
            return queryset
        since, until = _span(request.GET.get("when", ""))
        return situation_of(request).first(queryset, since, until)


def _counted(situation: Situation, rows: Records) -> Any:
    count = situation.count(rows)
    if count is None:
        return situation.title
    return format_lazy("{title} ({count}{more})", title=situation.title, count=count, more="+" * (count >= 1000))


class TimeFilter(admin.SimpleListFilter):
    """Filter by day, then by hour, of the time that the situation's index is ordered by."""

    title: Any = _("time")
    parameter_name = "when"

    def __init__(self, request: HttpRequest, *arguments: Any) -> None:
        super().__init__(request, *arguments)
        self.title = situation_of(request).time

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        if term_of(request.GET.get("q", "")):
            return []
        span = situation_of(request).span(IdempotencyRecord.objects.using(database_of(request)))
        return [] if span is None else list(_times(*span, request.GET.get("when", "")))

    def queryset(self, request: HttpRequest, queryset: Records) -> Records:
        return queryset  # SituationFilter applies the time as well


def _times(first: datetime, last: datetime, chosen: str) -> Iterator[tuple[str, str]]:
    first, last = timezone.localtime(first), timezone.localtime(last)
    for days in range(min((last.date() - first.date()).days + 1, MOST_DAYS)):
        day = last.date() - timedelta(days=days)
        yield f"{day}", date_format(day, "DATE_FORMAT")
        if chosen.startswith(f"{day}"):
            for hour in range(24):
                begins = timezone.make_aware(datetime.combine(day, time(hour)))
                yield f"{day}T{hour:02}", f"{hour:02}:00–{hour:02}:59 {zone(begins)}"


def _span(when: str) -> tuple[datetime | None, datetime | None]:
    try:
        since = timezone.make_aware(datetime.fromisoformat(when))
        return since, since + (timedelta(hours=1) if "T" in when else timedelta(days=1))
    except (ValueError, OverflowError):
        return None, None


class MethodFilter(admin.SimpleListFilter):
    """Filter by one of a fixed set of methods: to find out which ones occur, every record would have to be read."""

    title = _("method")
    parameter_name = "method"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        return [(method, method) for method in METHODS]

    def queryset(self, request: HttpRequest, queryset: Records) -> Records:
        return queryset.filter(method=self.value()) if self.value() else queryset


class PathFilter(admin.SimpleListFilter):
    """Filter by what the path starts with, which the user types in."""

    title = _("path")
    parameter_name = "path"
    template = "admin/django_idempotency/idempotencyrecord/path_filter.html"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        return [("", "")]

    def choices(self, changelist: Any) -> Iterator[Any]:
        others = [(name, value) for name, values in changelist.filter_params.items() for value in values]
        kept = [pair for pair in others if pair[0] != self.parameter_name]
        if changelist.query:
            kept.append(("q", changelist.query))
        without = changelist.get_query_string(remove=[self.parameter_name, "p"])
        yield {"selected": bool(self.value()), "value": self.value() or "", "others": kept, "without": without}

    def queryset(self, request: HttpRequest, queryset: Records) -> Records:
        beginning = self.value()
        if not beginning:
            return queryset
        return queryset.none() if "\0" in beginning else queryset.filter(path__startswith=beginning)


# --- The list with its filters ---------------------------------------------------------------------------------------

KEPT = (PARAMETER, SituationFilter.parameter_name)  # they choose the list, rather than filter it


class RecordList(ChangeList):
    """``whole_list_qs`` leads to the list without the search; "Clear all filters" to the list without filters."""

    def get_queryset(self, request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
        rows = super().get_queryset(request, *args, **kwargs)
        filters = set(self.get_filters_params()) - {*KEPT}
        self.has_active_filters = bool(filters)
        self.clear_all_filters_qs = self.get_query_string(dict.fromkeys([*filters, PAGE_VAR]))
        self.whole_list_qs = self.get_query_string(dict.fromkeys([SEARCH_VAR, PAGE_VAR]))
        return rows

    def get_results(self, request: HttpRequest) -> None:
        super().get_results(request)
        # "Show all" would lead to another list: the one that opens first, of the first database.
        self.full_result_count = self.result_count
        self.database_query = query_of(request)

    def url_for_result(self, result: Any) -> str:
        return "?".join(filter(None, (super().url_for_result(result), self.database_query)))


SECONDS = 2.0  # for each statement of the search for the next record


def next_record(model_admin: Any, request: HttpRequest, filters: str, *, without: UUID) -> Any:
    """Return the first record of the list ``filters`` but ``without``; ``None`` if there is none, or not in time."""
    shown = copy(request)
    shown.GET = QueryDict(filters)
    try:
        with queries.at_most(SECONDS, database_of(request)):
            listed = model_admin.get_changelist_instance(shown).result_list
            return next((record for record in listed if record.pk != without), None)
    except (Error, IncorrectLookupParameters, SuspiciousOperation):
        return None
