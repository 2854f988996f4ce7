"""What is wrong with the order of decorators: a guard inside an entry point does not run before a replay."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from types import FunctionType
from typing import Any

from django.contrib.auth.mixins import AccessMixin

from django_idempotency import conf
from django_idempotency.http.placement import MARK, closed_over, entry_point_policy, innermost, layers, view_class
from django_idempotency.middleware import covers, is_covering
from django_idempotency.policy import Policy
from django_idempotency.values.outcomes import dotted_name

PACKAGE = "django_idempotency."
# Modules whose decorators let callers in or refuse them, and do nothing else.
GUARDS = frozenset(
    {
        "django.contrib.auth.decorators",
        "guardian.decorators",
        "oauth2_provider.decorators",
        "rules.contrib.views",
    }
)
METHOD_DECORATOR = "django.utils.decorators"
Found = tuple[str, str]  # the guard inside an entry point, and where it is


def guards_inside(route: tuple[str, Any]) -> Iterator[Found]:
    """Yield authentication and permissions inside an entry point, so a replay comes before them."""
    path, view = route
    policy = _policy(path, view)
    if policy is not None and policy.may_replay is None:
        yield from _inside(view, policy)


def _policy(route: str, view: Any) -> Policy | None:
    """Return the policy in force for the view of ``route``; ``None`` if no entry point covers it."""
    for method in ("post", "put", "patch", "delete"):
        if (stated := entry_point_policy(view, method)) is not None:
            return conf.resolve(stated)
    return conf.conf().policy if is_covering() and covers(view, "POST", route) else None


def _inside(view: Any, policy: Policy) -> Iterator[Found]:
    cls = view_class(view)
    if cls is not None:
        yield from _inside_class(cls, policy)
    elif any(map(_is_entry_point, layers(view))):
        yield from _after_entry_point(layers(view), dotted_name(view))
    else:
        covered = innermost(view)
        yield from ((guard, dotted_name(view)) for part in layers(covered) if (guard := guard_of(part)))


def _inside_class(cls: Any, policy: Policy) -> Iterator[Found]:
    on_dispatch = False
    for base in cls.__mro__:
        if (dispatch := vars(base).get("dispatch")) is None:
            continue
        if on_dispatch and issubclass(base, AccessMixin):
            yield base.__name__, dotted_name(cls)
        parts = list(_parts(dispatch))
        yield from _after_entry_point(parts, f"{dotted_name(cls)}.dispatch", inside=on_dispatch)
        on_dispatch = on_dispatch or any(map(_is_decorator_of_ours, parts))
    for method in sorted(policy.methods):
        parts = list(_parts(getattr(cls, method.lower(), None)))
        has_own = any(map(_is_decorator_of_ours, parts))
        is_inside = on_dispatch or hasattr(cls, MARK) or (is_covering() and not has_own)
        yield from _after_entry_point(parts, f"{dotted_name(cls)}.{method.lower()}", inside=is_inside)


def _after_entry_point(parts: Iterable[Any], where: str, *, inside: bool = False) -> Iterator[Found]:
    """Yield the guards that come after the entry point among ``parts``, which are ordered from the outermost."""
    for part in parts:
        if inside and (guard := guard_of(part)):
            yield guard, where
        inside = inside or _is_entry_point(part)


def _parts(method: Any) -> Iterator[Any]:
    """Yield a method and its decorators, from the outermost; for ``method_decorator``, the decorators given to it."""
    for layer in layers(method):
        lists = [part for part in closed_over(layer) if isinstance(part, list | tuple)]
        if lists and _module(layer) == METHOD_DECORATOR:
            yield from reversed(lists[0])  # the first one is applied first, so it is the innermost
        else:
            yield layer


def _is_entry_point(part: Any) -> bool:
    return _module(part).startswith(PACKAGE) or _is_decorator_of_ours(part)


def _is_decorator_of_ours(part: Any) -> bool:
    """Whether ``part`` is ``@idempotent``, with or without arguments."""
    made = part.func if isinstance(part, partial) else type(part)
    return str(getattr(made, "__module__", "")).startswith(PACKAGE)


def guard_of(part: Any) -> str | None:
    """Return the name of the guard, which lets callers in or refuses them; ``None`` for any other part of a view."""
    module = _module(part)
    return f"a decorator of {module}" if module in GUARDS else None


def _module(part: Any) -> str:
    """Return the module in which a function was written; ``functools.wraps`` changes only its ``__module__``."""
    return str(part.__globals__.get("__name__", "")) if isinstance(part, FunctionType) else ""
