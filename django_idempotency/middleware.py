"""The door for whole projects: puts the right door before every view that has none."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import lru_cache
from inspect import iscoroutinefunction
from types import CellType, FunctionType
from typing import Any

from asgiref.sync import async_to_sync, markcoroutinefunction, sync_to_async
from asgiref.sync import iscoroutinefunction as is_async
from django.http import HttpRequest
from django.http.response import HttpResponseBase

from django_idempotency.conf import conf
from django_idempotency.decorators import protect
from django_idempotency.doors import is_keyed
from django_idempotency.policy import Mode, Policy

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
    if has_door(view) or getattr(view, "idempotency_exempt", False):
        return False
    if (exempt := conf().exempt) is not None and exempt.search(request.path):
        return False
    return is_keyed(request, conf().policy)


def has_door(view: View) -> bool:
    """Whether ``view`` has a door of its own."""
    return any(hasattr(part, "idempotency") for part in (view, view_class(view)) if part is not None)


def view_class(view: View) -> type | None:
    """The class behind what ``as_view()`` returned."""
    return getattr(view, "cls", None) or getattr(view, "view_class", None)


@lru_cache(maxsize=1024)
def behind_door(view: View) -> View:
    """``view`` with a door at its heart: a copy of its decorators around a protected innermost view."""
    inner = getattr(view, "__wrapped__", None)
    if inner is not None and isinstance(view, FunctionType) and _cells_of(view, inner):
        return _rethreaded(view, inner, behind_door(inner))
    if _made_by_as_view(view):
        return _class_behind_door(view)
    return protect(view, Policy(mode=Mode.LEASE) if iscoroutinefunction(view) else Policy())


def _cells_of(view: FunctionType, inner: View) -> list[CellType]:
    return [cell for cell in view.__closure__ or () if _content(cell) is inner]


def _content(cell: CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # still empty
        return None


def _rethreaded(view: FunctionType, inner: View, replacement: View) -> View:
    closure = tuple(CellType(replacement) if _content(cell) is inner else cell for cell in view.__closure__ or ())
    copy = FunctionType(view.__code__, view.__globals__, view.__name__, view.__defaults__, closure)
    copy.__kwdefaults__ = view.__kwdefaults__
    copy.__dict__.update(view.__dict__)
    return copy


def _made_by_as_view(view: View) -> bool:
    cls = view_class(view)
    return (
        cls is not None and isinstance(view, FunctionType) and any(_content(c) is cls for c in view.__closure__ or ())
    )


def _class_behind_door(view: Any) -> View:
    policy = Policy(mode=Mode.LEASE) if is_async(view) else Policy()
    cls: Any = protect(view_class(view), policy)  # type: ignore[type-var]
    actions = getattr(view, "actions", None)
    initkwargs = getattr(view, "initkwargs", None) or getattr(view, "view_initkwargs", {})
    door: View = cls.as_view(actions, **initkwargs) if actions else cls.as_view(**initkwargs)
    return door
