"""Which of the databases that hold records the admin shows: one at a time."""

from __future__ import annotations

from urllib.parse import parse_qs

from django.http import HttpRequest

from django_idempotency.stores.connections import databases

PARAMETER = "database"


def database_of(request: HttpRequest) -> str:
    """Return the alias that ``?database=`` asks for, or the first database with records."""
    filters = request.POST.get("filters") or request.GET.get("_changelist_filters", "")
    asked = [request.GET.get(PARAMETER), request.POST.get(PARAMETER), *parse_qs(filters).get(PARAMETER, [])]
    found = databases()
    return next((alias for alias in asked if alias in found), found[0])


def query_of(request: HttpRequest) -> str:
    """Return the query string of a link to another page of the same database; empty if there is only one."""
    return f"{PARAMETER}={database_of(request)}" if len(databases()) > 1 else ""


def choices(request: HttpRequest) -> list[tuple[str, bool]]:
    """Return each alias, and whether it is the one that is shown; an empty list if there is only one."""
    found = databases()
    return [(alias, alias == database_of(request)) for alias in found] if len(found) > 1 else []
