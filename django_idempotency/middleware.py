"""The entry point for whole projects: gives every view that has no entry point the one that fits it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import lru_cache
from typing import Any

from asgiref.sync import async_to_sync, markcoroutinefunction, sync_to_async
from asgiref.sync import iscoroutinefunction as is_async
from django.http import HttpRequest
from django.http.response import HttpResponseBase
from django.urls import URLResolver, get_resolver
from django.utils.module_loading import import_string

from django_idempotency import ninja
from django_idempotency.conf import conf, middleware, resolve
from django_idempotency.http.observing import is_observed
from django_idempotency.http.requests import is_keyed
from django_idempotency.http.routes import routes
from django_idempotency.policy import Policy
from django_idempotency.wrapping import behind_entry_point, entry_point_policy, has_entry_point, is_exempt

View = Callable[..., Any]


class IdempotencyMiddleware:
    """Protects every view that has no entry point of its own, with the policy of the ``IDEMPOTENCY`` setting.

    The entry point goes inside the decorators of a view and inside the ``dispatch`` of a class, so that their checks
    run on replays too. Async views run in lease mode. Put it last in ``MIDDLEWARE``, because it calls the view itself.
    ``@idempotency_exempt`` and the setting ``EXEMPT_PATHS`` exclude views and paths.
    """

    sync_capable = True
    async_capable = True

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponseBase | Awaitable[HttpResponseBase]]) -> None:
        self.get_response = get_response
        if is_async(get_response):
            markcoroutinefunction(self)
            self.process_view = self.aprocess_view  # type: ignore[assignment,method-assign]
        describe_covered_operations()

    def __call__(self, request: HttpRequest) -> HttpResponseBase | Awaitable[HttpResponseBase]:
        return self.get_response(request)

    def process_view(
        self, request: HttpRequest, view: View, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> HttpResponseBase | None:
        if not _covers(request, view):
            return None
        entry_point = behind_entry_point(view)
        response: HttpResponseBase = (async_to_sync(entry_point) if is_async(entry_point) else entry_point)(
            request, *args, **kwargs
        )
        return response

    async def aprocess_view(
        self, request: HttpRequest, view: View, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> HttpResponseBase | None:
        if not _covers(request, view):
            return None
        entry_point = behind_entry_point(view)
        response: HttpResponseBase = await (entry_point if is_async(entry_point) else sync_to_async(entry_point))(
            request, *args, **kwargs
        )
        return response


def _covers(request: HttpRequest, view: View) -> bool:
    if ninja.path_view(view) is not None and (own := entry_point_policy(view, request.method)) is not None:
        return is_keyed(request, resolve(own))  # else Django would open its transactions around the claim
    if not (is_keyed(request, conf().policy) or is_observed(request, conf().policy)):
        return False
    return covers(view, request.method, request.path)


# --- What it covers --------------------------------------------------------------------------------------------------


def covers(view: View, method: str | None, path: str) -> bool:
    """Whether the middleware, if it is installed, protects ``view`` at ``path``."""
    if has_entry_point(view, method) or is_exempt(view, method):
        return False
    return (exempt := conf().exempt) is None or not exempt.search(path)


def is_covering() -> bool:
    """Whether ``IdempotencyMiddleware`` or a subclass is installed."""
    return any(map(is_ours, middleware()))


def is_ours(path: str) -> bool:
    """Whether ``path``, an entry of ``MIDDLEWARE``, is ``IdempotencyMiddleware`` or a subclass."""
    found = import_string(path)
    return isinstance(found, type) and issubclass(found, IdempotencyMiddleware)


def policy_by_path(view: View, method: str, path: str) -> Policy | None:
    """Return the policy of the view's own entry point, or of the middleware if that covers it at ``path``."""
    if (own := entry_point_policy(view, method)) is not None:
        return own
    return Policy() if is_covering() and covers(view, method, path) else None


def describe_covered_operations() -> None:
    """Make Django Ninja's OpenAPI documents, if it is installed, describe operations covered by the middleware."""
    with suppress(ImportError):  # a build tool is called ninja too
        ninja.describe_operations(_policy_of_operation)


def _policy_of_operation(operation: Any) -> Policy | None:
    route, view = _routed_operations(get_resolver()).get(operation, ("", None))
    is_covered = view is not None and is_covering() and any(covers(view, each, route) for each in operation.methods)
    return Policy() if is_covered else None


@lru_cache(maxsize=1)
def _routed_operations(_resolver: URLResolver) -> dict[Any, tuple[str, View]]:
    return {operation: (route, view) for route, view in routes() for operation in ninja.operations(view)}
