"""The entry point for whole projects: gives every view that has no entry point the one
that fits it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator
from functools import partial
from inspect import isawaitable
from typing import Any

from asgiref.sync import iscoroutinefunction as is_async
from asgiref.sync import markcoroutinefunction
from django.http import HttpRequest
from django.http.response import HttpResponseBase
from django.urls import URLPattern, URLResolver, get_resolver
from django.utils.cache import patch_cache_control
from django.utils.module_loading import import_string

from django_idempotency.conf import conf, of_project, resolve
from django_idempotency.http import ninja
from django_idempotency.http.closures import layers
from django_idempotency.http.handlers import cover_view
from django_idempotency.http.placement import (
    behind_entry_point,
    entry_point_policy,
    handler_of,
    has_entry_point,
    is_exempt,
)
from django_idempotency.http.requests import is_keyed
from django_idempotency.http.unprotected import note, reporting
from django_idempotency.values.outcomes import EntryPoint, Unprotected
from django_idempotency.values.policy import Policy

View = Callable[..., Any]

# an attribute of requests for which ``{% idempotency_key %}`` was rendered
SHOWS_KEY = "_shows_idempotency_key"


class IdempotencyMiddleware:
    """Protects every view that has no entry point of its own, with the policy of the
    ``IDEMPOTENCY`` setting.

    The entry point goes inside the decorators of a view and inside the ``dispatch`` of
    a class, so that their checks run on replays too. Async views run in lease mode.
    ``@idempotency_exempt`` and the setting ``EXEMPT_PATHS`` exclude views and paths. A
    page with ``{% idempotency_key %}`` is kept from shared caches.
    """

    sync_capable = True
    async_capable = True

    def __init__(self, get_response: Callable[[HttpRequest], Any]) -> None:
        self.get_response = get_response
        if is_async(get_response):
            markcoroutinefunction(self)

    def __call__(self, request: HttpRequest) -> Any:
        cover_view(request, _covered)
        reported = reporting(
            self.get_response(request),
            request,
            partial(_handler_of, request),
            EntryPoint.MIDDLEWARE,
        )
        if isawaitable(reported):
            return _aprivate_with_key(request, reported)
        return _private_with_key(request, reported)


async def _aprivate_with_key(
    request: HttpRequest, response: Awaitable[HttpResponseBase]
) -> HttpResponseBase:
    return _private_with_key(request, await response)


def _private_with_key(
    request: HttpRequest, response: HttpResponseBase
) -> HttpResponseBase:
    if hasattr(request, SHOWS_KEY):
        patch_cache_control(response, private=True)
    return response


def _handler_of(request: HttpRequest) -> Any:
    match = request.resolver_match
    return match and handler_of(match.func, request.method)


def _covered(request: HttpRequest, view: View) -> View:
    if not _covers(request, view):
        _expect_own(request, view)
        return view
    covered = behind_entry_point(view)
    is_behind = covered is not view
    note(request, Unprotected.NO_HANDLER if is_behind else Unprotected.ASYNC_CLASS)
    return covered


def _expect_own(request: HttpRequest, view: View) -> None:
    """Expect the view's own entry point, which notes the request's fate once the
    decorators around it have let the request in.
    """
    own = (
        entry_point_policy(view, request.method)
        if is_keyed(request, conf().policy)
        else None
    )
    if own and is_keyed(request, resolve(own)) and not is_exempt(view, request.method):
        note(request, Unprotected.NO_HANDLER)


def _covers(request: HttpRequest, view: View) -> bool:
    if (
        ninja.path_view(view) is not None
        and (own := entry_point_policy(view, request.method)) is not None
    ):
        # else Django would open its transactions around the claim
        return is_keyed(request, resolve(own))
    return is_keyed(request, conf().policy) and covers(
        view, request.method, request.path
    )


# --- What it covers -------------------------------------------------------------------


def covers(view: View, method: str | None, path: str) -> bool:
    """Whether the middleware, if it is installed, protects ``view`` at ``path``."""
    if (
        has_entry_point(view, method)
        or is_exempt(view, method)
        or _is_of_the_admin(view)
    ):
        return False
    return (exempt := conf().exempt) is None or not exempt.search(path)


def _is_of_the_admin(view: View) -> bool:
    """Whether ``view`` belongs to a site of Django's admin, whose forms send no
    header.
    """
    names = ("admin_site", "model_admin", "__self__")
    owners = (getattr(layer, name, None) for layer in layers(view) for name in names)
    return any(
        base.__module__.startswith("django.contrib.admin.")
        for owner in owners
        for base in type(owner).__mro__
    )


def is_covering() -> bool:
    installed = map(import_string, of_project("MIDDLEWARE"))
    return any(
        isinstance(found, type) and issubclass(found, IdempotencyMiddleware)
        for found in installed
    )


def policy_by_path(view: View, method: str, path: str) -> Policy | None:
    """Return the policy of the view's own entry point, or of the middleware if that
    covers it at ``path``.
    """
    if (own := entry_point_policy(view, method)) is not None:
        return own
    return Policy() if is_covering() and covers(view, method, path) else None


def routes() -> Iterator[tuple[str, Any]]:
    """Yield every path of the URLconf, with its view; none in a project that only
    consumes messages.
    """
    return _routes(get_resolver().url_patterns if of_project("ROOT_URLCONF") else [])


def _routes(
    patterns: Iterable[URLPattern | URLResolver], prefix: str = "/"
) -> Iterator[tuple[str, Any]]:
    for pattern in patterns:
        route = prefix + str(pattern.pattern).removeprefix("^")
        if isinstance(pattern, URLResolver):
            yield from _routes(pattern.url_patterns, route)
        else:
            yield route, pattern.callback
