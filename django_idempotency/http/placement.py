"""Put the entry point into a view: around a function, around the method of a class,
inside decorators.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import WRAPPER_ASSIGNMENTS, lru_cache, partial
from inspect import signature
from types import FunctionType
from typing import Any, TypeVar

from asgiref.sync import iscoroutinefunction as is_async
from django.core.exceptions import ImproperlyConfigured
from django.http import HttpRequest
from django.views import View as ClassView

from django_idempotency.conf import resolve
from django_idempotency.http import ninja
from django_idempotency.http.closures import (
    closed_over,
    innermost,
    inside,
    layers,
    opens_transaction,
    with_content,
)
from django_idempotency.http.requests import is_keyed
from django_idempotency.http.run import RequestRun, guard, running
from django_idempotency.http.transactions import (
    ProtectedClass,
    without_atomic_requests,
)
from django_idempotency.http.unprotected import note, reporting
from django_idempotency.values.outcomes import EntryPoint, Unprotected
from django_idempotency.values.policy import Decorator, Policy

View = Callable[..., Any]
V = TypeVar("V", bound=View)

MARK = "idempotency_entry_point"
# Attributes that Django and others read from a view. A copy of its decorators gets
# those of the protected view.
CARRIED = (
    "cls",
    "view_class",
    "initkwargs",
    "view_initkwargs",
    "idempotency_policy",
    MARK,
)


# --- The decorator --------------------------------------------------------------------


def protect(view: Any, policy: Policy) -> Any:
    """Return ``view`` behind the entry point that fits it.

    Raises ``ImproperlyConfigured`` for a method, and for a view that already has an
    entry point.
    """
    if ninja.is_operation(view):
        ninja.refuse_operation(view)
    _refuse_method(view)
    _refuse_second(view)
    if isinstance(view, type):
        return _protect_class(view, policy, EntryPoint.DECORATOR)
    if view_class(view) is not None or ninja.path_view(view) is not None:
        return behind_entry_point(view, policy)
    _refuse_inside_rest_framework(view)
    return _function_behind_entry_point(view, policy, EntryPoint.DECORATOR)


def _refuse_method(view: Any) -> None:
    if not isinstance(view, FunctionType) or view_class(view) is not None:
        return
    if next(iter(signature(view).parameters), None) == "self":
        raise ImproperlyConfigured(
            f"@idempotent is on the method {view.__qualname__}, but works only on"
            " functions and classes. Put "
            f'@method_decorator(idempotent, name="{view.__name__}") on the class, or'
            " @idempotent for all its methods. "
            "For a view of REST framework, make IdempotentMixin the first base of the"
            " class."
        )


def _refuse_second(view: Any) -> None:
    methods = (
        ClassView.http_method_names
        if isinstance(view, type) or view_class(view)
        else ["post"]
    )
    if any(has_entry_point(view, method) for method in methods):
        raise ImproperlyConfigured(
            f"{getattr(view, '__qualname__', view)} already has an entry point. Keep"
            " only one, and set its policy there: @idempotent(…), or"
            " idempotency_policy = Policy(…) on a class with IdempotentMixin."
        )


def _function_behind_entry_point(view: View, policy: Policy, way: EntryPoint) -> View:
    protected: Any = without_atomic_requests(_protect_function(view, policy, way))
    setattr(protected, MARK, way)
    protected.idempotency_policy = policy
    ninja.contribute(protected, view, policy, way)
    return protected  # type: ignore[no-any-return]


def _protect_function(view: View, policy: Policy, way: EntryPoint) -> View:
    def run_of(request: HttpRequest, _values: object) -> RequestRun:
        return RequestRun(request, resolve(policy), sender=view, entry_point=way)

    return guard(view, run_of, is_async=is_async(view))


idempotent = Decorator(Policy, protect, "idempotent")
"""Run a view once for each idempotency key and replay its response.

Write ``@idempotent``, ``@idempotent(policy=…)``, or ``@idempotent(required=True)`` with
any options of ``Policy``. Put the decorator below decorators that authenticate, so that
they run on replays too, and above ``@transaction.atomic`` and ``@api_view``. For one
method, use ``@method_decorator(idempotent, name="post")`` on the class, but not under
``ATOMIC_REQUESTS``. Raises ``ImproperlyConfigured`` for an invalid option, for a
method, and for a view that already has an entry point.
"""


def idempotency_exempt(view: V) -> V:
    """Make ``IdempotencyMiddleware`` ignore ``view``: a function, a class, or a method
    of one. Return ``view``.
    """
    view.idempotency_exempt = True  # type: ignore[attr-defined]
    return view


# --- Classes --------------------------------------------------------------------------


def _protect_class(view: type, policy: Policy, way: EntryPoint) -> type:
    named_like = {
        "__module__": view.__module__,
        "__qualname__": view.__qualname__,
        "__doc__": view.__doc__,
    }
    members = {**named_like, "idempotency_policy": policy, MARK: way}
    if _is_rest_framework(view):
        from django_idempotency.http.rest_framework import IdempotentMixin

        return type(view.__name__, (IdempotentMixin, view), members)
    return type(view.__name__, (_IdempotentView, view), members)


def _is_rest_framework(view: type) -> bool:
    return any(base.__module__ == "rest_framework.views" for base in view.__mro__)


class _IdempotentView(ProtectedClass, ClassView):
    # Puts the entry point around the method that handles the request, so that the
    # checks of ``dispatch`` run before it.

    def idempotent_dispatch(
        self, inner: Callable[..., Any], request: HttpRequest, *args: Any, **kwargs: Any
    ) -> Any:
        cls, name = type(self), (request.method or "").lower()
        handler = getattr(self, name, None) if name in self.http_method_names else None
        own = [
            vars(base)["dispatch"] for base in cls.__mro__ if "dispatch" in vars(base)
        ]
        own = [
            dispatch
            for dispatch in own
            if dispatch not in (ProtectedClass.dispatch, ClassView.dispatch)
        ]
        # Without a handler, it may do what the view does, as GraphQL views have it.
        # Inside a transaction, no key can be claimed.
        if own and (handler is None or all(map(opens_transaction, own))):
            return self._protect(inner)(request, *args, **kwargs)
        if (
            handler is None
            and cls.http_method_not_allowed is not ClassView.http_method_not_allowed
        ):
            name, handler = "http_method_not_allowed", self.http_method_not_allowed
        if handler is not None:
            setattr(self, name, self._protect(handler))
        policy = resolve(self.idempotency_policy)
        if is_keyed(request, policy) and not running(request):
            note(request, Unprotected.NO_HANDLER)
        return reporting(
            inner(request, *args, **kwargs),
            request,
            lambda: cls,
            self.idempotency_entry_point,
            policy,
        )

    def _protect(self, handler: Callable[..., Any]) -> Callable[..., Any]:
        return _protect_function(
            handler, self.idempotency_policy, self.idempotency_entry_point
        )


def bound_to(view: Any) -> object:
    """Return the instance whose method ``method_decorator`` passes to a decorator;
    ``None`` for anything else.
    """
    while not isinstance(view, partial) and hasattr(view, "__wrapped__"):
        view = view.__wrapped__
    return getattr(view.func, "__self__", None) if isinstance(view, partial) else None


def _refuse_inside_rest_framework(view: Any) -> None:
    cls = type(bound_to(view))
    if _is_rest_framework(cls):
        raise ImproperlyConfigured(
            f"@idempotent is on {cls.__qualname__}.{view.__name__}, inside REST"
            " framework. Make IdempotentMixin the first base, or put @idempotent on"
            " the class."
        )


# --- Finding an entry point -----------------------------------------------------------


def has_entry_point(view: View, method: str | None) -> bool:
    return entry_point_policy(view, method) is not None


def entry_point_policy(view: View, method: str | None) -> Policy | None:
    """Return the policy of the outermost entry point of ``view`` for ``method``, as set
    there; ``None`` without one.
    """
    for part in _parts(view, (method or "").lower()):
        if hasattr(part, MARK):
            policy: Policy = part.idempotency_policy
            return policy
    return None


def is_exempt(view: View, method: str | None) -> bool:
    """Whether ``@idempotency_exempt`` is on ``view``, on its class, or on the function
    that handles ``method``.
    """
    parts = list(_parts(view, (method or "").lower()))
    by_api_view = [
        part
        for part in parts
        if getattr(part, "__module__", "") == "rest_framework.decorators"
    ]
    inside = (content for handler in by_api_view for content in closed_over(handler))
    return any(getattr(part, "idempotency_exempt", False) for part in (*parts, *inside))


def _parts(view: Any, method: str) -> Iterator[Any]:
    for layer in layers(view):
        yield layer
        if (cls := layer if isinstance(layer, type) else view_class(layer)) is not None:
            actions = getattr(layer, "actions", None)  # of a viewset of REST framework
            handler = (
                actions.get(method, method) if isinstance(actions, dict) else method
            )
            yield from (
                cls,
                *layers(getattr(cls, "dispatch", None)),
                *layers(getattr(cls, handler, None)),
            )
        yield from ninja.functions(layer, method)


def handler_of(view: View, method: str | None) -> Any:
    """Return the function that handles ``method``, if that can be determined; else the
    innermost view or its class.
    """
    name = (method or "").lower()
    if _is_rest_framework(cls := view_class(view) or object):
        return cls
    *_runs, function = [None, *ninja.functions(view, name)]
    return function or getattr(cls, name, innermost(view))


def view_class(view: View) -> type | None:
    """Return the class behind a view that ``as_view()`` returned; ``None`` for other
    views.
    """
    return getattr(view, "cls", None) or getattr(view, "view_class", None)


# --- Inside of decorators -------------------------------------------------------------


@lru_cache(maxsize=1024)
def behind_entry_point(view: View, policy: Policy | None = None) -> View:
    """Return ``view`` with an entry point innermost: a copy of its decorators around
    the protected innermost view.

    The decorators' checks therefore run before every replay. The entry point stays
    outside ``@transaction.atomic``, because others have to see the claim, and outside
    decorators that are not closures. Without ``policy``, the policy is that of the
    settings, in lease mode for async views, and ``view`` itself is returned if there is
    no entry point for it.
    """
    return inside(view, partial(_behind_entry_point, policy=policy), _like_entry_point)


def _behind_entry_point(view: View, policy: Policy | None) -> View:
    if policy is None and is_async_api(view):
        return view
    way = EntryPoint.MIDDLEWARE if policy is None else EntryPoint.DECORATOR
    if ninja.path_view(view) is not None:
        return ninja.behind_entry_points(view, policy, way)
    policy = policy or (Policy(mode="lease") if is_async(view) else Policy())
    behind = (
        _class_behind_entry_point
        if _made_by_as_view(view)
        else _function_behind_entry_point
    )
    return behind(view, policy, way)


def is_async_api(view: View) -> bool:
    """Whether ``view`` is an async class of REST framework, such as adrf's."""
    return is_async(view) and _is_rest_framework(view_class(view) or object)


def _like_entry_point(decorator: V, entry_point: View) -> V:
    """Have a copy of a decorator show what ``entry_point`` does, which is inside."""
    shown = vars(entry_point)
    vars(decorator).update({name: shown[name] for name in CARRIED if name in shown})
    return without_atomic_requests(decorator)


def _made_by_as_view(view: View) -> bool:
    cls = view_class(view)
    return cls is not None and any(content is cls for content in closed_over(view))


def _class_behind_entry_point(view: Any, policy: Policy, way: EntryPoint) -> View:
    """Return a copy of ``view`` that makes instances of the protected class.

    The class's ``as_view()`` is not called again: what it has made of its arguments
    need not be such arguments.
    """
    cls: Any = view_class(view)
    protected: Any = _protect_class(cls, policy, way)
    copy: Any = with_content(view, cls, protected)
    for name in WRAPPER_ASSIGNMENTS:
        setattr(copy, name, getattr(view, name))
    copy.__dict__.update(
        vars(view)
        | {name: protected for name in ("cls", "view_class") if name in vars(view)}
    )
    behind: View = without_atomic_requests(copy)
    return behind
