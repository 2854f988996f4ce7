"""Checks of the place of entry points: in a wrong one, they protect nothing or fail at the first request."""

from __future__ import annotations

from collections.abc import Iterator
from types import FunctionType
from typing import Any

from django.core.checks import CheckMessage, Error, Tags, register
from django.views import View

from django_idempotency.checks.settings import Apps, are_usable
from django_idempotency.http.routes import routes
from django_idempotency.policy import Policy
from django_idempotency.wrapping import MARK, closed_over, layers, view_class


@register(Tags.urls)
def check_entry_points(app_configs: Apps, **kwargs: Any) -> list[CheckMessage]:
    """E030 to E032, for every class in the URLconf."""
    if not are_usable():
        return []
    found: dict[str, CheckMessage] = {}
    for _route, callback in routes():
        for message in _class_messages(view_class(callback)):
            found.setdefault(f"{message.id} {message.msg}", message)
    return list(found.values())


def _class_messages(cls: Any) -> Iterator[CheckMessage]:
    if cls is None:
        return
    marked = [name for name in View.http_method_names if any(map(_is_marked, _inside(getattr(cls, name, None))))]
    if marked and any(base.__module__ == "rest_framework.views" for base in cls.__mro__):
        yield Error(
            f"{_name(cls)}.{marked[0]}: @idempotent is applied inside REST framework, where there is no response yet.",
            hint="Put @idempotent above @api_view, or make IdempotentMixin the first base of the class.",
            id="django_idempotency.E030",
        )
    elif hasattr(cls, MARK) and (marked or any(map(_is_marked, layers(getattr(cls, "dispatch", None))))):
        yield Error(
            f"{_name(cls)} has two entry points: one on the class, and one on its {(marked or ['dispatch'])[0]}().",
            hint="Keep only one.",
            id="django_idempotency.E032",
        )
    if isinstance(getattr(cls, "idempotency_policy", None), Policy) and not hasattr(cls, MARK):
        yield Error(
            f"{_name(cls)} sets an idempotency_policy, but has no entry point that reads it.",
            hint="Make IdempotentMixin its first base, or put @idempotent(…) on the class.",
            id="django_idempotency.E031",
        )


def _inside(handler: Any) -> Iterator[Any]:
    for layer in layers(handler):
        yield layer
        yield from closed_over(layer)


def _is_marked(part: Any) -> bool:
    return isinstance(part, FunctionType) and MARK in vars(part)


def _name(view: Any) -> str:
    return f"{view.__module__}.{view.__qualname__}"
