"""What can be wrong with views, and with the position of their entry points."""

from __future__ import annotations

from collections.abc import Iterator
from types import FunctionType
from typing import Any

from django.db import router
from django.utils.module_loading import import_string
from django.views import View

from django_idempotency import conf
from django_idempotency.checks.project import Source
from django_idempotency.http import ninja
from django_idempotency.http.placement import (
    MARK,
    answers_in_dispatch,
    closed_over,
    layers,
)
from django_idempotency.middleware import is_covering
from django_idempotency.policy import Policy
from django_idempotency.stores.connections import aliases
from django_idempotency.values.outcomes import dotted_name

UNSAFE = ("post", "put", "patch", "delete")
API_KEY_PERMISSIONS = {"HasAPIKey"}  # of djangorestframework-api-key

# --- Views -----------------------------------------------------------------------------------------------------------


def other_database(view: Source) -> tuple[str, str] | None:
    """Return the database of the effects and those of the records, if they differ."""
    records = aliases(view.policy)
    effects = _database_of(getattr(view.of, "model_admin", view.of))
    return None if effects in (None, *records) else (repr(effects), " and ".join(map(repr, records)))


def _database_of(view: Any) -> str | None:
    queryset = getattr(view, "queryset", None)
    model = getattr(view, "model", None) or getattr(queryset, "model", None)
    if queryset is not None and queryset._db:
        return str(queryset._db)
    return None if model is None else router.db_for_write(model)


def why_callers_are_no_users(view: Source) -> str | None:
    """Return why some callers have no scope; ``None`` if all have one, or nothing is known."""
    if view.policy.scope is not None or view.policy.anonymous == "ignore":
        return None
    permissions = getattr(view.of, "permission_classes", ["unknown"])
    names = {getattr(permission, "__name__", "") for permission in permissions}
    if names <= {"AllowAny"}:
        return "lets anonymous callers in"
    if not getattr(view.of, "authentication_classes", ["unknown"]):
        return "has no authentication_classes"
    by = [*sorted(names & API_KEY_PERMISSIONS), *ninja.api_keys(view.of)]
    return f"authenticates callers by {by[0]}" if by else None


# --- Positions of entry points ---------------------------------------------------------------------------------------


def revisions_in_a_transaction(_settings: conf.Conf) -> Iterator[str]:
    """Yield django-reversion's middleware, unless a subclass has turned its transaction off."""
    for path in conf.middleware():
        bases = getattr(found := import_string(path), "__mro__", ())
        if any(base.__module__ == "reversion.middleware" for base in bases) and getattr(found, "atomic", False):
            yield path


def inside_rest_framework(cls: Any) -> str | None:
    """Return the name of a method that has an entry point, if REST framework calls it."""
    marked = _marked(cls) if any(base.__module__ == "rest_framework.views" for base in cls.__mro__) else []
    return f"{dotted_name(cls)}.{marked[0]}" if marked else None


def _marked(cls: Any) -> list[str]:
    names = [*View.http_method_names, "dispatch"]
    return [name for name in names if any(map(_is_marked, _inside(getattr(cls, name, None))))]


def _inside(handler: Any) -> Iterator[Any]:
    for layer in layers(handler):
        yield layer
        yield from closed_over(layer)


def _is_marked(part: Any) -> bool:
    return isinstance(part, FunctionType) and MARK in vars(part)


def unread_policy(cls: Any) -> str | None:
    has_policy = isinstance(getattr(cls, "idempotency_policy", None), Policy)
    return dotted_name(cls) if has_policy and not hasattr(cls, MARK) else None


def misnamed_policy(cls: Any) -> Iterator[tuple[str, str]]:
    for base in cls.__mro__:
        if not base.__module__.startswith("django_idempotency."):
            for name, value in vars(base).items():
                if isinstance(value, Policy) and name != "idempotency_policy" and not _is_ours(cls, name):
                    yield dotted_name(cls), name


def _is_ours(cls: Any, name: str) -> bool:
    """Whether a base of this package reads the attribute, as ``WebhookView`` does ``policy``."""
    return any(name in vars(base) for base in cls.__mro__ if base.__module__.startswith("django_idempotency."))


def unused_handler(cls: Any) -> tuple[str, str] | None:
    """Return the class and its handler, around which the entry point is, if ``dispatch`` never calls it."""
    unused = next((name for name in UNSAFE if hasattr(cls, name)), None)
    dispatch = answers_in_dispatch(cls) if hasattr(cls, MARK) or is_covering() else None
    if unused is None or dispatch is None:
        return None
    return None if {"getattr", *View.http_method_names} & dispatch else (dotted_name(cls), unused)
