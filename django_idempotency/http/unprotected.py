"""Report requests whose keys have protected nothing.

``request.idempotency`` of a request without a claim holds the reason. It is set when an
entry point is expected, changed with the fate of the key, and reported when the
response leaves an entry point or the middleware.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import isawaitable
from typing import Any
from urllib.parse import parse_qsl, unquote

from asgiref.sync import sync_to_async
from django.core.exceptions import ImproperlyConfigured
from django.http import HttpRequest

from django_idempotency import signals
from django_idempotency.conf import conf
from django_idempotency.engine import Unclaimed
from django_idempotency.http.key_sources import has_key
from django_idempotency.http.requests import context_of
from django_idempotency.reporting.events import send
from django_idempotency.values.outcomes import (
    EntryPoint,
    Operation,
    Unprotected,
    dotted_name,
)
from django_idempotency.values.policy import Policy


def note(
    request: HttpRequest,
    reason: Unprotected | None,
    operation: Operation | None = None,
) -> None:
    """Note why the request is unprotected, or that it is not, unless it is being run by
    an entry point.
    """
    if isinstance(seen := context_of(request), Unclaimed):
        seen.unprotected, seen.operation = reason, operation


def is_unprotected(request: HttpRequest, response: Any) -> bool:
    """Whether the request is accepted, and its key has protected nothing."""
    status = getattr(response, "status_code", 0)
    return (
        isinstance(seen := context_of(request), Unclaimed)
        and seen.unprotected is not None
        and 200 <= status < 400
        and not (status >= 300 and _leads_back(request, response))
    )


def _leads_back(request: HttpRequest, response: Any) -> bool:
    """Whether this is a redirect as to a login page, which leads back here."""
    location = response.headers.get("Location", "")
    query = location.partition("#")[0].partition("?")[2]
    places = (unquote(value.partition("?")[0]) for _name, value in parse_qsl(query))
    return any(place.endswith(request.path) for place in places)


def report(
    request: HttpRequest,
    response: Any,
    view: object,
    entry_point: EntryPoint,
    policy: Policy | None = None,
) -> None:
    """Send ``request_unprotected`` if that is what the request was, once.

    ``policy``: of an entry point. Where a key is required, that raises
    ``ImproperlyConfigured`` if the view has not called the handler.
    """
    seen = context_of(request)
    if not isinstance(seen, Unclaimed) or not is_unprotected(request, response):
        return
    reason, operation = seen.unprotected, seen.operation
    if policy and policy.required and reason is Unprotected.NO_HANDLER:
        raise ImproperlyConfigured(
            f"{dotted_name(view)} ran unprotected: its dispatch() returned a response"
            f" to {request.method} without calling a handler, where the entry point"
            " is. Call super().dispatch(). A class that is not a REST framework view"
            " needs no handler."
        )
    note(request, None, operation)
    if has_key(request, policy or conf().policy):
        keyless = Operation("", "", b"", sender=view, entry_point=entry_point)
        send(signals.request_unprotected, operation or keyless, reason=reason)


def reporting(
    result: Any,
    request: HttpRequest,
    view: Callable[[], object],
    entry_point: EntryPoint,
    policy: Policy | None = None,
) -> Any:
    """Return ``result``, a response or what an async view has returned, reported."""

    async def awaited() -> Any:
        response = await result
        if is_unprotected(request, response):
            await sync_to_async(report)(request, response, view(), entry_point, policy)
        return response

    if isawaitable(result):
        return awaited()
    if is_unprotected(request, result):
        report(request, result, view(), entry_point, policy)
    return result
