"""The entry point for whole projects: puts the right entry point before every view that has none."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from asgiref.sync import async_to_sync, markcoroutinefunction, sync_to_async
from asgiref.sync import iscoroutinefunction as is_async
from django.http import HttpRequest
from django.http.response import HttpResponseBase

from django_idempotency.conf import conf
from django_idempotency.http.observing import is_observed
from django_idempotency.http.requests import is_keyed
from django_idempotency.wrapping import behind_entry_point, has_entry_point

View = Callable[..., Any]


class IdempotencyMiddleware:
    """Covers every view that has no entry point of its own, by the ``IDEMPOTENCY`` setting's policy.

    The entry point is put inside the decorators of a view and inside the ``dispatch`` of a class, so that what they
    check is checked on replays too. Async views are run in lease mode. Stands last in ``MIDDLEWARE``: it calls the
        view itself.
    ``@idempotency_exempt`` and the setting ``EXEMPT_PATHS`` opt out.
    """

    sync_capable = True
    async_capable = True

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponseBase | Awaitable[HttpResponseBase]]) -> None:
        self.get_response = get_response
        if is_async(get_response):
            markcoroutinefunction(self)
            self.process_view = self.aprocess_view  # type: ignore[assignment,method-assign]

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
    if has_entry_point(view, request.method) or getattr(view, "idempotency_exempt", False):
        return False
    if (exempt := conf().exempt) is not None and exempt.search(request.path):
        return False
    return is_keyed(request, conf().policy) or is_observed(request, conf().policy)
