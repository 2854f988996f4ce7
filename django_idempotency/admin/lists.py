"""The lists of records that an index serves: in flight, stuck, on hold, free to retry,
ended.

A list follows its index and ends after ``MOST`` records. Filtering, sorting and
counting it, or anything else that is done with it, look at no more than those. Records
beyond them are found by key. The links of a list keep to the database and the situation
that are shown.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from django.contrib import admin
from django.contrib.admin.options import IncorrectLookupParameters
from django.contrib.admin.views.main import PAGE_VAR, SEARCH_VAR, ChangeList
from django.db.models import QuerySet
from django.http import HttpRequest
from django.utils.functional import Promise
from django.utils.timezone import get_current_timezone_name
from django.utils.translation import gettext_lazy as _

from django_idempotency.admin.pages import PARAMETER, choices, query_of
from django_idempotency.maintenance import find
from django_idempotency.maintenance.find import Wanted, moment
from django_idempotency.models import IdempotencyRecord

Records = QuerySet[IdempotencyRecord]


@dataclass(frozen=True, kw_only=True)
class Situation:
    """``columns`` are those that the list shows between a record's key and its request.
    ``of``: the name in ``find``.
    """

    of: str
    title: str | Promise
    help: str | Promise
    columns: tuple[str, ...] = ()

    @property
    def ordering(self) -> str:
        return find.SITUATIONS[self.of].ordering

    def first(self, rows: Records) -> Records:
        first: Records = find.SITUATIONS[self.of].first(rows)
        return first


SITUATIONS = {
    "live": Situation(
        of="live",
        title=_("In flight"),
        help=_(
            "Claimed, but without a response yet; those whose lease ran out first come"
            " first."
        ),
        columns=("badge", "since"),
    ),
    "stuck": Situation(
        of="stuck",
        title=_("Lease ran out"),
        help=_(
            "In flight, past its lease, and no transaction has its row locked: its"
            " owner is gone."
        ),
        columns=("badge", "since"),
    ),
    "on_hold": Situation(
        of="on_hold",
        title=_("On hold"),
        help=_(
            "It is not known whether these took place. Find out, then allow a retry or"
            " resolve them."
        ),
        columns=("since", "shown_reason", "attempts"),
    ),
    "retryable": Situation(
        of="retryable",
        title=_("Failed, free to retry"),
        help=_("The last run failed, and the next request with the key runs again."),
        columns=("since", "shown_reason", "attempts"),
    ),
    "done": Situation(
        of="done",
        title=_("Ended"),
        help=_("Completed or failed; those that are kept longest come first."),
        columns=("badge", "replays", "shown_created_at"),
    ),
}
USUAL = "live"


def situation_of(request: HttpRequest) -> Situation:
    return SITUATIONS.get(request.GET.get("situation", USUAL), SITUATIONS[USUAL])


def term_of(search: str) -> str:
    """Return what is searched for; empty if there is no search, or for a character that
    no key has.
    """
    return "" if "\0" in search else search.strip().strip('"')


class DatabaseFilter(admin.SimpleListFilter):
    """The database whose records are shown, if there are several. One of them is always
    chosen.
    """

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
    """The list that is shown. One is always chosen, as no index serves them together; a
    search looks at all records.
    """

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


class Finder(admin.ListFilter):
    """Fields for an endpoint, a customer and a time range. They narrow the list that is
    shown, or a search.
    """

    title = _("endpoint, customer and time")
    template = "admin/django_idempotency/idempotencyrecord/finder.html"
    FIELDS: ClassVar[dict[str, tuple[Any, str]]] = {
        "endpoint": (_("endpoint, such as POST /pay/"), "text"),
        "customer": (_("customer: a whole scope"), "text"),
        "since": (_("first claimed from"), "datetime-local"),
        "until": (_("until"), "datetime-local"),
    }

    def __init__(
        self, request: HttpRequest, params: dict[str, Any], *_of_model: Any
    ) -> None:
        super().__init__(request, params, *_of_model)
        given = {name: params.pop(name, [""])[-1] for name in self.FIELDS}
        self.used_parameters = {name: text for name, text in given.items() if text}

    def has_output(self) -> bool:
        return True

    def expected_parameters(self) -> list[str | None]:
        return [*self.FIELDS]

    def choices(self, changelist: Any) -> Iterator[Any]:
        """Yield one choice: the fields, and what the form has to keep."""
        others = changelist.get_filters_params().items()
        yield {
            "fields": [
                (name, label, kind, self.used_parameters.get(name, ""))
                for name, (label, kind) in self.FIELDS.items()
            ],
            "kept": [
                (name, value)
                for name, values in (*others, (SEARCH_VAR, [changelist.query]))
                for value in values
                if name not in self.FIELDS and value
            ],
            "zone": get_current_timezone_name(),
            "none": changelist.get_query_string(remove=[*self.FIELDS, PAGE_VAR]),
        }

    def queryset(self, request: HttpRequest, queryset: Records) -> Any:
        given = {
            name: str(self.used_parameters.get(name, "")).replace("\0", "")
            for name in self.FIELDS
        }
        try:
            wanted = Wanted(
                endpoint=given["endpoint"],
                scope=given["customer"],
                since=moment(given["since"]),
                until=moment(given["until"]),
            )
        except ValueError as error:
            raise IncorrectLookupParameters(error) from error
        found: Records = wanted.among(queryset)
        return found


class RecordList(ChangeList):
    """``whole_list_qs`` leads to the list without the search."""

    def get_results(self, request: HttpRequest) -> None:
        super().get_results(request)
        # "Show all" would lead to another list: the one that opens first, of the first
        # database.
        self.full_result_count = self.result_count
        self.whole_list_qs = self.get_query_string(
            dict.fromkeys([SEARCH_VAR, PAGE_VAR])
        )
        self.database_query = query_of(request)

    def url_for_result(self, result: Any) -> str:
        return "?".join(
            filter(None, (super().url_for_result(result), self.database_query))
        )
