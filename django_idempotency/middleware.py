"""The entry point for whole projects: gives every view that has no entry point the one that fits it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from asgiref.sync import iscoroutinefunction as is_async
from asgiref.sync import markcoroutinefunction
from django.http import HttpRequest
from django.http.response import HttpResponseBase
from django.urls import URLPattern, URLResolver, get_resolver
from django.utils.cache import patch_cache_control
from django.utils.module_loading import import_string

from django_idempotency.conf import conf, has_urls, middleware, resolve
from django_idempotency.http import ninja
from django_idempotency.http.handlers import cover_view
from django_idempotency.http.placement import (
    apply_to,
    behind_entry_point,
    entry_point_policy,
    has_entry_point,
    is_exempt,
    layers,
)
from django_idempotency.http.requests import is_keyed
from django_idempotency.values.policy import Policy

View = Callable[..., Any]

SHOWS_KEY = "_shows_idempotency_key"  # an attribute of requests for which ``{% idempotency_key %}`` was rendered


class IdempotencyMiddleware:
    """Protects every view that has no entry point of its own, with the policy of the ``IDEMPOTENCY`` setting.

    The entry point goes inside the decorators of a view and inside the ``dispatch`` of a class, so that their checks
    run on replays too. Async views run in lease mode. ``@idempotency_exempt`` and the setting ``EXEMPT_PATHS`` exclude
    views and paths. A page with ``{% idempotency_key %}`` is kept from shared caches.
    """

    sync_capable = True
    async_capable = True

    def __init__(self, get_response: Callable[[HttpRequest], Any]) -> None:
        self.get_response = get_response
        if is_async(get_response):
            markcoroutinefunction(self)

    def __call__(self, request: HttpRequest) -> Any:
        cover_view(request, _covered)
        return apply_to(self.get_response(request), partial(_private_with_key, request))


def _private_with_key(
    request: HttpRequest, response: HttpResponseBase
) -> HttpResponseBase:
    if hasattr(request, SHOWS_KEY):
        patch_cache_control(response, private=True)
    return response


def _covered(request: HttpRequest, view: View) -> View:
    return behind_entry_point(view) if _covers(request, view) else view


def _covers(request: HttpRequest, view: View) -> bool:
    if (
        ninja.path_view(view) is not None
        and (own := entry_point_policy(view, request.method)) is not None
    ):
        return is_keyed(
            request, resolve(own)
        )  # else Django would open its transactions around the claim
    return is_keyed(request, conf().policy) and covers(
        view, request.method, request.path
    )


# --- What it covers --------------------------------------------------------------------------------------------------


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
    """Whether ``view`` belongs to a site of Django's admin, whose forms send no header."""
    names = ("admin_site", "model_admin", "__self__")
    owners = (getattr(layer, name, None) for layer in layers(view) for name in names)
    return any(
        base.__module__.startswith("django.contrib.admin.")
        for owner in owners
        for base in type(owner).__mro__
    )


def is_covering() -> bool:
    installed = map(import_string, middleware())
    return any(
        isinstance(found, type) and issubclass(found, IdempotencyMiddleware)
        for found in installed
    )


def policy_by_path(view: View, method: str, path: str) -> Policy | None:
    """Return the policy of the view's own entry point, or of the middleware if that covers it at ``path``."""
    if (own := entry_point_policy(view, method)) is not None:
        return own
    return Policy() if is_covering() and covers(view, method, path) else None


def routes() -> Iterator[tuple[str, Any]]:
    """Yield every path of the URLconf, with its view; none in a project that only consumes messages."""
    return _routes(get_resolver().url_patterns if has_urls() else [])


def _routes(
    patterns: Iterable[URLPattern | URLResolver], prefix: str = "/"
) -> Iterator[tuple[str, Any]]:
    for pattern in patterns:
        route = prefix + str(pattern.pattern).removeprefix("^")
        if isinstance(pattern, URLResolver):
            yield from _routes(pattern.url_patterns, route)
        else:
            yield route, pattern.callback
