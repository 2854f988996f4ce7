"""The door for plain Django views: functions and classes, sync and async."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from inspect import iscoroutinefunction
from typing import Any, Generic, ParamSpec, TypeVar, overload

from django.http import HttpRequest
from django.http.response import HttpResponseBase
from django.views import View

from django_idempotency.conf import resolve
from django_idempotency.doors import aperform, perform, take_over_atomic_requests
from django_idempotency.policy import Policy

V = TypeVar("V", bound=Callable[..., Any])
Options = ParamSpec("Options")


class _Idempotent(Generic[Options]):
    def __init__(self, policy: Callable[Options, Policy]) -> None:
        """Takes ``Policy`` for the types of its arguments."""

    @overload
    def __call__(self, view: V, /) -> V: ...
    @overload
    def __call__(self, *args: Options.args, **options: Options.kwargs) -> Callable[[V], V]: ...
    def __call__(self, *args: Any, **options: Any) -> Any:
        if args:
            (view,) = args
            return protect(view, Policy())
        return partial(protect, policy=Policy(**options))


idempotent = _Idempotent(Policy)
"""Run a view once for each idempotency key and replay its answer: ``@idempotent`` or ``@idempotent(required=True)``.

Takes what ``Policy`` takes. Stands below decorators that authenticate, so that they run on replays too, and above
``@transaction.atomic``. Raises ``ImproperlyConfigured`` for an option that can't be meant.
"""


def idempotency_exempt(view: V) -> V:
    """Have ``IdempotencyMiddleware`` leave this view alone."""
    view.idempotency_exempt = True  # type: ignore[attr-defined]
    return view


def protect(view: V, policy: Policy) -> V:
    """``view`` behind the door that fits it."""
    door: Any
    if isinstance(view, type):
        door = _protect_class(view, policy)
    else:
        door = take_over_atomic_requests(_protect_function(view, policy))
        door.idempotency = policy
    protected: V = door
    return protected


def _protect_function(view: Callable[..., Any], policy: Policy) -> Callable[..., Any]:
    non_atomic: frozenset[str] = getattr(view, "_non_atomic_requests", frozenset())
    if iscoroutinefunction(view):

        @wraps(view)
        async def adoor(request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponseBase:
            return await aperform(request, resolve(policy), partial(view, request, *args, **kwargs), sender=view)

        return adoor

    @wraps(view)
    def door(request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponseBase:
        run = partial(view, request, *args, **kwargs)
        return perform(request, resolve(policy), run, sender=view, non_atomic=non_atomic)

    return door


def _protect_class(view: type, policy: Policy) -> type:
    if _is_rest_framework(view):
        from django_idempotency.rest_framework import IdempotentMixin

        return type(view.__name__, (IdempotentMixin, view), {**_named_like(view), "idempotency": policy})
    return type(view.__name__, (_IdempotentView, view), {**_named_like(view), "idempotency": policy})


def _named_like(view: type) -> dict[str, Any]:
    return {"__module__": view.__module__, "__qualname__": view.__qualname__, "__doc__": view.__doc__}


def _is_rest_framework(view: type) -> bool:
    return any(base.__module__ == "rest_framework.views" for base in view.__mro__)


class _IdempotentView(View):
    """Puts the door around the method that handles the request, inside whatever ``dispatch`` checks before it."""

    idempotency: Policy = Policy()

    @classmethod
    def as_view(cls, **initkwargs: Any) -> Any:
        return take_over_atomic_requests(super().as_view(**initkwargs))

    def dispatch(self, request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
        name = (request.method or "").lower()
        if name in self.http_method_names and (handler := getattr(self, name, None)):
            setattr(self, name, _protect_function(handler, self.idempotency))
        return super().dispatch(request, *args, **kwargs)
