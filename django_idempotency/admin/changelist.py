"""The list of records, whose links keep to the database and the list that are shown."""

from __future__ import annotations

from copy import copy
from typing import Any
from uuid import UUID

from django.contrib.admin.options import IncorrectLookupParameters
from django.contrib.admin.views.main import PAGE_VAR, SEARCH_VAR, ChangeList
from django.core.exceptions import SuspiciousOperation
from django.db import Error
from django.http import HttpRequest, QueryDict

from django_idempotency.admin.filters import SituationFilter
from django_idempotency.admin.shards import PARAMETER, database_of, query_of
from django_idempotency.stats import queries

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
