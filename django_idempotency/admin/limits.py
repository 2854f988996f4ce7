"""How long the database may take for a page or a part of one, and what is shown if it takes longer."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, TypeVar

from django.db import Error
from django.http import HttpRequest, HttpResponse
from django.template.response import SimpleTemplateResponse, TemplateResponse
from django.utils.translation import gettext as _

from django_idempotency.admin import pages
from django_idempotency.admin.databases import choices, database_of, query_of
from django_idempotency.reporting.logs import cause, log
from django_idempotency.stats import queries

T = TypeVar("T")

TEMPLATE = "admin/django_idempotency/idempotencyrecord/late_page.html"
SECONDS = 1.0  # for a panel
PAGE_SECONDS = 5.0  # for each statement of a page


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
        "links": pages.links(),
    }
    return TemplateResponse(request, TEMPLATE, context, status=503)


def _tell(error: Error) -> None:
    log(logging.WARNING, "admin", "idempotency admin: %s", cause(error))
