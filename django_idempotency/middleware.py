"""The door for whole projects: puts the right door before every view that has none."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from asgiref.sync import async_to_sync, markcoroutinefunction, sync_to_async
from asgiref.sync import iscoroutinefunction as is_async
from django.http import HttpRequest
from django.http.response import HttpResponseBase

from django_idempotency.conf import conf
from django_idempotency.doors import is_keyed
from django_idempotency.placement import behind_door, has_door

View = Callable[..., Any]


class IdempotencyMiddleware:
    """Covers every view that has no door of its own, by the ``IDEMPOTENCY`` setting's policy.

    The door is put inside the decorators of a view and inside the ``dispatch`` of a class, so that what they check is
    checked on replays too. Async views are run in lease mode. Stands last in ``MIDDLEWARE``: it calls the view itself.
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
        door = behind_door(view)
        response: HttpResponseBase = (async_to_sync(door) if is_async(door) else door)(request, *args, **kwargs)
        return response

    async def aprocess_view(
        self, request: HttpRequest, view: View, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> HttpResponseBase | None:
        if not _covers(request, view):
            return None
        door = behind_door(view)
        response: HttpResponseBase = await (door if is_async(door) else sync_to_async(door))(request, *args, **kwargs)
        return response


def _covers(request: HttpRequest, view: View) -> bool:
    if has_door(view, request.method) or getattr(view, "idempotency_exempt", False):
        return False
    if (exempt := conf().exempt) is not None and exempt.search(request.path):
        return False
    return is_keyed(request, conf().policy)
