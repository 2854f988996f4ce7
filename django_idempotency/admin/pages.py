"""What the pages of the admin have in common, and the pages that wings add."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import parse_qs

from django.db import Error
from django.http import HttpRequest, HttpResponse
from django.template.response import SimpleTemplateResponse, TemplateResponse
from django.utils.functional import Promise
from django.utils.translation import gettext as _

from django_idempotency.reporting.logs import cause, log
from django_idempotency.stats import queries
from django_idempotency.stores.connections import databases

PARAMETER = "database"
T = TypeVar("T")

TEMPLATE = "admin/django_idempotency/idempotencyrecord/late_page.html"
SECONDS = 1.0  # for a panel
PAGE_SECONDS = 5.0  # for each statement of a page


@dataclass(frozen=True, slots=True)
class Page:
    """A page below the list of records. ``view`` gets the ``ModelAdmin`` and the request, and checks permissions.

    ``name``: that of its URL in the namespace ``admin``. ``title``: of the link above the list; empty for no link.
    """

    route: str
    view: Callable[[Any, HttpRequest], HttpResponse]
    name: str
    title: str | Promise = ""


class ReadOnly:
    """A ``ModelAdmin`` with this base adds, changes and deletes nothing by a form."""

    def _never(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    has_add_permission = has_change_permission = has_delete_permission = _never


_pages: dict[str, Page] = {}


def register(page: Page) -> None:
    """Add ``page``. Call this before the project's URLs are loaded, in the ``ready()`` of an app."""
    _pages[page.name] = page


def registered() -> list[Page]:
    return list(_pages.values())


def links() -> list[tuple[str, str | Promise]]:
    """Return the name of the URL and the title of each page that has a link."""
    return [(f"admin:{page.name}", page.title) for page in _pages.values() if page.title]


# --- The database that is shown, of those that hold records ----------------------------------------------------------


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


# --- How long the database may take for a page or a part of one ------------------------------------------------------


class Asking:
    """Asks the statistics one question after another, with ``SECONDS`` for all of them."""

    def __init__(self, using: str) -> None:
        self.using = using
        self.ends = time.monotonic() + SECONDS

    def __call__(self, question: Callable[..., T], *args: Any, **named: Any) -> T:
        with queries.at_most(max(0.001, self.ends - time.monotonic()), self.using):
            return question(*args, **named, using=self.using)


def panel(show: Callable[[Asking], T], using: str) -> T | None:
    """Return what a part of a page shows; ``None`` if the database did not respond in time."""
    try:
        return show(Asking(using))
    except Error as error:  # DatabaseError and InterfaceError: not in time, no table, connection lost
        _tell(error)
        return None


def page(model_admin: Any, request: HttpRequest, show: Callable[[], HttpResponse]) -> HttpResponse:
    """Return the page that ``show`` makes, rendered; or one that says that the database did not respond in time."""
    try:
        with queries.at_most(PAGE_SECONDS, database_of(request)):
            response = show()
            return response.render() if isinstance(response, SimpleTemplateResponse) else response
    except Error as error:
        _tell(error)
    context = {
        **model_admin.admin_site.each_context(request),
        "title": _("The database did not respond"),
        "opts": model_admin.opts,
        "databases": choices(request),
        "database_query": query_of(request),
        "links": links(),
    }
    return TemplateResponse(request, TEMPLATE, context, status=503)


def _tell(error: Error) -> None:
    log(logging.WARNING, "admin", "idempotency admin: %s", cause(error))
