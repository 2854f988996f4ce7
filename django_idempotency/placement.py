"""Where in a view its door goes: around a function, around the method of a class, inside the decorators of either."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial, wraps
from inspect import iscoroutinefunction
from types import CellType, FunctionType
from typing import Any, TypeVar

from asgiref.sync import iscoroutinefunction as is_async
from django.db.transaction import Atomic
from django.http import HttpRequest
from django.http.response import HttpResponseBase
from django.views import View as ClassView

from django_idempotency.conf import resolve
from django_idempotency.doors import View, aperform, perform, take_over_atomic_requests
from django_idempotency.outcomes import Door
from django_idempotency.policy import Mode, Policy

V = TypeVar("V", bound=View)


def protect(view: V, policy: Policy) -> V:
    """``view`` behind the door that fits it."""
    door: Any
    if isinstance(view, type):
        door = _protect_class(view, policy, Door.DECORATOR)
    elif view_class(view) is not None:
        door = behind_door(view, policy)
    else:
        door = _function_behind_door(view, policy, Door.DECORATOR)
    protected: V = door
    return protected


def _function_behind_door(view: View, policy: Policy, way: Door) -> View:
    door: Any = take_over_atomic_requests(_protect_function(view, policy, way))
    door.idempotency = policy
    return door  # type: ignore[no-any-return]


def _protect_function(view: Callable[..., Any], policy: Policy, way: Door) -> Callable[..., Any]:
    non_atomic: frozenset[str] = getattr(view, "_non_atomic_requests", frozenset())
    if iscoroutinefunction(view):

        @wraps(view)
        async def adoor(request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponseBase:
            run = partial(view, request, *args, **kwargs)
            return await aperform(request, resolve(policy), run, sender=view, door=way)

        return adoor

    @wraps(view)
    def door(request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponseBase:
        run = partial(view, request, *args, **kwargs)
        return perform(request, resolve(policy), run, sender=view, door=way, non_atomic=non_atomic)

    return door


def _protect_class(view: type, policy: Policy, way: Door) -> type:
    members = {**_named_like(view), "idempotency": policy, "idempotency_door": way}
    if _is_rest_framework(view):
        from django_idempotency.rest_framework import IdempotentMixin

        return type(view.__name__, (IdempotentMixin, view), members)
    return type(view.__name__, (_IdempotentView, view), members)


def _named_like(view: type) -> dict[str, Any]:
    return {"__module__": view.__module__, "__qualname__": view.__qualname__, "__doc__": view.__doc__}


def _is_rest_framework(view: type) -> bool:
    return any(base.__module__ == "rest_framework.views" for base in view.__mro__)


class _IdempotentView(ClassView):
    """Puts the door around the method that handles the request, inside whatever ``dispatch`` checks before it."""

    idempotency: Policy = Policy()
    idempotency_door: Door = Door.DECORATOR

    @classmethod
    def as_view(cls, **initkwargs: Any) -> Any:
        return take_over_atomic_requests(super().as_view(**initkwargs))

    def dispatch(self, request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
        name = (request.method or "").lower()
        if name in self.http_method_names and (handler := getattr(self, name, None)):
            setattr(self, name, _protect_function(handler, self.idempotency, self.idempotency_door))
        return super().dispatch(request, *args, **kwargs)


def has_door(view: View, method: str | None) -> bool:
    """Whether ``view`` has a door of its own; one around its class's ``method`` alone counts."""
    cls = view_class(view)
    return any(hasattr(part, "idempotency") for part in (view, cls, getattr(cls, (method or "").lower(), None)))


def view_class(view: View) -> type | None:
    """The class behind what ``as_view()`` returned."""
    return getattr(view, "cls", None) or getattr(view, "view_class", None)


@lru_cache(maxsize=1024)
def behind_door(view: View, policy: Policy | None = None) -> View:
    """``view`` with a door at its heart: a copy of its decorators around a protected innermost view.

    What they check is checked before every replay. The door stays outside ``@transaction.atomic``, because a claim has
    to be seen by others, and outside decorators that are no closures. Without ``policy`` it is the setting's, in lease
    mode for async views.
    """
    inner = getattr(view, "__wrapped__", None)
    if inner is not None and any(content is inner for content in _closed_over(view)) and not _opens_transaction(view):
        return _rethreaded(view, inner, behind_door(inner, policy))
    way = Door.MIDDLEWARE if policy is None else Door.DECORATOR
    policy = policy or (Policy(mode=Mode.LEASE) if is_async(view) else Policy())
    behind = _class_behind_door if _made_by_as_view(view) else _function_behind_door
    return behind(view, policy, way)


def _opens_transaction(view: View) -> bool:
    return any(isinstance(content, Atomic) for content in _closed_over(view))


def _closed_over(view: Any) -> list[object]:
    return [_content(cell) for cell in view.__closure__ or ()] if isinstance(view, FunctionType) else []


def _content(cell: CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # still empty
        return None


def _rethreaded(view: Any, inner: View, replacement: View) -> View:
    closure = tuple(CellType(replacement) if _content(cell) is inner else cell for cell in view.__closure__)
    copy = FunctionType(view.__code__, view.__globals__, view.__name__, view.__defaults__, closure)
    copy.__kwdefaults__ = view.__kwdefaults__
    copy.__dict__.update(view.__dict__)
    return copy


def _made_by_as_view(view: View) -> bool:
    cls = view_class(view)
    return cls is not None and any(content is cls for content in _closed_over(view))


def _class_behind_door(view: Any, policy: Policy, way: Door) -> View:
    cls: Any = _protect_class(view_class(view), policy, way)  # type: ignore[arg-type]
    actions = getattr(view, "actions", None)
    initkwargs = getattr(view, "initkwargs", None) or getattr(view, "view_initkwargs", {})
    door: View = cls.as_view(actions, **initkwargs) if actions else cls.as_view(**initkwargs)
    return door
