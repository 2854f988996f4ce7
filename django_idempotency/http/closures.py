"""Replace what is inside the decorators of a view or of a method."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from types import CellType, FunctionType, MethodType
from typing import Any

from asgiref.sync import iscoroutinefunction as is_async
from asgiref.sync import markcoroutinefunction
from django.db import transaction

View = Callable[..., Any]
METHOD_DECORATOR = "django.utils.decorators"


# Note [Inside the decorators of a view]
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
# A replay must pass the checks of the view's decorators (login_required, csrf_protect),
# so the entry point goes inside those of a method, and the middleware's inside those of
# a function. A decorator that uses functools.wraps is a closure over the function that
# it calls; inside() follows __wrapped__ inwards as long as that function is in a cell
# of the closure. It replaces the innermost function, and on the way out it copies each
# decorator's function with a cell that holds the replacement. The view itself is not
# changed, because it may be used elsewhere. The search stops at a decorator that is not
# a closure, because there is nothing to replace, and at transaction.atomic, because no
# other session would see a claim inside it.
#
# method_decorator() is such a closure, too: over the method, and its decorators. One
# that opens a transaction among others is taken for two: what comes before the
# transaction is outside of the entry point, and the rest inside.


def inside(
    view: View,
    replace: Callable[[View], View],
    finish: Callable[[FunctionType, View], View] = lambda decorator, _inner: decorator,
) -> View:
    """Return a copy of the decorators of ``view`` around ``replace(innermost(view))``,
    or ``view`` itself if that replaces nothing.

    ``finish``: gets each copy, with what is inside it.
    """
    decorator, inner = _opened(view)
    if inner is None:
        return replace(view)
    replacement = inside(inner, replace, finish)
    if replacement is inner:
        return view
    copy = with_content(decorator, inner, replacement)
    copy.__dict__.update(vars(decorator) | {"__wrapped__": replacement})
    return finish(copy, replacement)


def inside_method(handler: View, replace: Callable[[View], View]) -> View:
    """Return ``inside(handler, replace)`` for the handler of a class, which is bound to
    its view.
    """
    if not isinstance(handler, MethodType) or _opened(handler.__func__)[1] is None:
        return replace(handler)

    def unbound(function: Any) -> View:
        @wraps(function)
        def method(view: object, *args: Any, **kwargs: Any) -> Any:
            return replace(MethodType(function, view))(*args, **kwargs)

        return markcoroutinefunction(method) if is_async(function) else method

    return MethodType(inside(handler.__func__, unbound), handler.__self__)


def innermost(view: View) -> View:
    """Return the part of ``view`` that ``inside`` replaces."""
    while (inner := _opened(view)[1]) is not None:
        view = inner
    return view


def _opened(view: View) -> tuple[Any, Any]:
    """Return a decorator and the function in its closure that it calls, which may be
    replaced; ``None`` in its place if there is none, or if it is in a transaction.
    """
    inner = getattr(view, "__wrapped__", None)
    contents = closed_over(view)
    if inner is None or not any(content is inner for content in contents):
        return view, None
    if not opens_transaction(view):
        return view, inner
    given = decorators_of(view)
    last = max(
        (n for n, part in enumerate(given, 1) if _is_transaction(part)), default=0
    )
    if last in (0, len(given)):
        return view, None
    within = with_content(view, given, given[:last])
    vars(within).update(vars(view))
    around = with_content(with_content(view, given, given[last:]), inner, within)
    vars(around).update(vars(view))
    return around, within


def decorators_of(view: Any) -> Sequence[Any]:
    """Return those given to the ``method_decorator`` that made ``view``, from the
    innermost; nothing if it was made otherwise.
    """
    written_in = getattr(view, "__globals__", {}).get("__name__")
    contents = closed_over(view) if written_in == METHOD_DECORATOR else []
    return next((part for part in contents if isinstance(part, list | tuple)), [])


def opens_transaction(view: View) -> bool:
    """Whether ``view`` is decorated with ``transaction.atomic``."""
    return any(
        _is_transaction(part)
        for content in closed_over(view)
        for part in (content if isinstance(content, list | tuple) else [content])
    )


def _is_transaction(part: object) -> bool:
    return isinstance(part, transaction.Atomic) or part is transaction.atomic


def closed_over(view: Any) -> list[Any]:
    return (
        [_content(cell) for cell in view.__closure__ or ()]
        if isinstance(view, FunctionType)
        else []
    )


def _content(cell: CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # still empty
        return None


def with_content(view: Any, content: object, replacement: object) -> FunctionType:
    """Return a copy of a function's code, with ``replacement`` in place of ``content``
    in its closure.
    """
    closure = tuple(
        CellType(replacement) if _content(cell) is content else cell
        for cell in view.__closure__
    )
    copy = FunctionType(
        view.__code__, view.__globals__, view.__name__, view.__defaults__, closure
    )
    copy.__kwdefaults__ = view.__kwdefaults__
    return copy


def layers(view: Any) -> Iterator[Any]:
    """Yield ``view`` and what is inside its decorators, as far as they use
    ``functools.wraps``.
    """
    seen: list[Any] = []
    while view is not None and view not in seen:
        seen.append(view)
        yield view
        view = getattr(view, "__wrapped__", None)
