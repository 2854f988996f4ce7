"""What the pages of the admin have in common, and the pages that wings add."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import parse_qs

from django.db import Error
from django.http import HttpRequest, HttpResponse
from django.utils.functional import Promise

from django_idempotency.maintenance import stats
from django_idempotency.reporting.logs import cause, log
from django_idempotency.stores.connections import databases
from django_idempotency.values.printable import printable_lines
from django_idempotency.values.registry import Registry

PARAMETER = "database"
T = TypeVar("T")

RESPONSE_BODY = "django_idempotency.view_response_idempotencyrecord"
SECONDS = 1.0  # for a panel
SHOWN = 10_000  # characters of a body


@dataclass(frozen=True, slots=True)
class Page:
    """A page below the list of records. ``view`` gets the ``ModelAdmin`` and the
    request, and checks permissions.

    ``name``: that of its URL in the namespace ``admin``. ``title``: of the link above
    the list; empty for no link.
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


registered: Registry[Page] = Registry()  # before the project's URLs are loaded


# --- The database that is shown, of those that hold records ---------------------------


def database_of(request: HttpRequest) -> str:
    """Return the alias that ``?database=`` asks for, or the first database with
    records.
    """
    filters = request.POST.get("filters") or request.GET.get("_changelist_filters", "")
    asked = [
        request.GET.get(PARAMETER),
        request.POST.get(PARAMETER),
        *parse_qs(filters).get(PARAMETER, []),
    ]
    found = databases()
    return next((alias for alias in asked if alias in found), found[0])


def query_of(request: HttpRequest) -> str:
    """Return the query string of a link to another page of the same database; empty if
    there is only one.
    """
    return f"{PARAMETER}={database_of(request)}" if len(databases()) > 1 else ""


def choices(request: HttpRequest) -> list[tuple[str, bool]]:
    """Return each alias, and whether it is the one that is shown; an empty list if
    there is only one.
    """
    found = databases()
    return (
        [(alias, alias == database_of(request)) for alias in found]
        if len(found) > 1
        else []
    )


# --- How long the database may take for a part of a page ------------------------------


Asking = Callable[..., Any]
"""Asks the statistics one question after another, with ``SECONDS`` for all of them."""


def panel(show: Callable[[Asking], T], using: str) -> T | None:
    """Return what a part of a page shows; ``None`` if the database did not respond in
    time.
    """
    ends = time.monotonic() + SECONDS

    def ask(question: Callable[..., Any], *args: Any, **named: Any) -> Any:
        with stats.at_most(max(0.001, ends - time.monotonic()), using):
            return question(*args, **named, using=using)

    try:
        return show(ask)
    except Error as error:
        # DatabaseError and InterfaceError: not in time, no table, connection lost
        log(logging.WARNING, "admin", "idempotency admin: %s", cause(error))
        return None


# --- Bodies ---------------------------------------------------------------------------


def readable(body: bytes, content_type: str) -> str:
    """Return the beginning of a body: JSON is indented, other text is as it is, and
    anything else in hexadecimal.
    """
    try:
        text = body.decode()
        if "json" in content_type.lower():
            text = json.dumps(json.loads(text), indent=2, ensure_ascii=False)
    except UnicodeDecodeError:
        text = body[:SHOWN].hex(" ")
    except (ValueError, RecursionError):  # it is not JSON
        pass
    return printable_lines(text[:SHOWN]) + "…" * (len(text) > SHOWN)
