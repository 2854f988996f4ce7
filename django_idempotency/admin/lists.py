"""The lists of records that an index serves: in flight, stuck, on hold, free to retry, ended.

A list follows its index and ends after ``MOST`` records. Filtering, sorting and counting it, or anything else that is
done with it, look at no more than those. Records beyond them are found by key. The links of a list keep to the database
and the situation that are shown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from django.contrib import admin
from django.contrib.admin.views.main import PAGE_VAR, SEARCH_VAR, ChangeList
from django.db.models import QuerySet
from django.http import HttpRequest
from django.utils.functional import Promise
from django.utils.translation import gettext_lazy as _

from django_idempotency.admin.pages import PARAMETER, choices, query_of
from django_idempotency.models import (
    TERMINAL,
    IdempotencyRecord,
    RecordQuerySet,
    Status,
)

Records = QuerySet[IdempotencyRecord]

MOST = 10_000


@dataclass(frozen=True, kw_only=True)
class Situation:
    """``of`` finds the records, by an index that has them in this ``ordering``.

    ``columns`` are those that the list shows between a record's key and its request.
    """

    title: str | Promise
    help: str | Promise
    of: Callable[[Any], Records]
    ordering: str
    columns: tuple[str, ...] = ()

    def first(self, rows: Records) -> Records:
        """Return the first ``MOST`` of ``rows`` in this situation."""
        rows = self.of(rows)
        column = self.ordering.removeprefix("-")
        last = (
            rows.order_by(self.ordering)
            .values_list(column, flat=True)[MOST - 1 : MOST]
            .first()
        )
        if last is not None:
            rows = rows.filter(
                **{f"{column}__{'lte' if column == self.ordering else 'gte'}": last}
            )
        return rows


SITUATIONS = {
    "live": Situation(
        title=_("In flight"),
        help=_(
            "Claimed, but without a response yet; those whose lease ran out first come first."
        ),
        of=RecordQuerySet.live,
        ordering="locked_until",
        columns=("badge", "since"),
    ),
    "stuck": Situation(
        title=_("Lease ran out"),
        help=_(
            "In flight, past its lease, and no transaction has its row locked: its owner is gone."
        ),
        of=RecordQuerySet.abandoned,
        ordering="locked_until",
        columns=("badge", "since"),
    ),
    "on_hold": Situation(
        title=_("On hold"),
        help=_(
            "It is not known whether these took place. Find out, then allow a retry or resolve them."
        ),
        of=RecordQuerySet.awaiting_operator,
        ordering="updated_at",
        columns=("since", "shown_reason", "attempts"),
    ),
    "retryable": Situation(
        title=_("Failed, free to retry"),
        help=_("The last run failed, and the next request with the key runs again."),
        of=lambda rows: rows.filter(
            status=Status.FAILED, response_status__isnull=True, on_hold=False
        ),
        ordering="-updated_at",
        columns=("since", "shown_reason", "attempts"),
    ),
    "done": Situation(
        title=_("Ended"),
        help=_("Completed or failed; those that are kept longest come first."),
        of=lambda rows: rows.filter(status__in=TERMINAL),
        ordering="-purge_at",
        columns=("badge", "replays", "shown_created_at"),
    ),
}
USUAL = "live"


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
            query = changelist.get_query_string({self.parameter_name: alias}, ["p"])
            yield {"selected": chosen, "query_string": query, "display": alias}

    def queryset(self, request: HttpRequest, queryset: Records) -> Records:
        return queryset  # the list is read from that database already


class SituationFilter(admin.SimpleListFilter):
    """The list that is shown. One is always chosen, as no index serves them together; a search looks at all records."""

    title = _("situation")
    parameter_name = "situation"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, Any]]:
        return [(name, situation.title) for name, situation in SITUATIONS.items()]

    def choices(self, changelist: Any) -> Iterator[Any]:
        chosen = None if changelist.query else self.value() or USUAL
        for name, title in self.lookup_choices:
            query = changelist.get_query_string(
                {self.parameter_name: name}, ["q", "p", "o"]
            )
            yield {"selected": name == chosen, "query_string": query, "display": title}

    def queryset(self, request: HttpRequest, queryset: Records) -> Records:
        if term_of(request.GET.get("q", "")):
            return queryset
        return situation_of(request).first(queryset)


class RecordList(ChangeList):
    """``whole_list_qs`` leads to the list without the search."""

    def get_results(self, request: HttpRequest) -> None:
        super().get_results(request)
        # "Show all" would lead to another list: the one that opens first, of the first database.
        self.full_result_count = self.result_count
        self.whole_list_qs = self.get_query_string(
            dict.fromkeys([SEARCH_VAR, PAGE_VAR])
        )
        self.database_query = query_of(request)

    def url_for_result(self, result: Any) -> str:
        return "?".join(
            filter(None, (super().url_for_result(result), self.database_query))
        )
