"""The contenders: the same project and view, each with what its own README tells one to add."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

# In the order of the report. The first is what the others are measured against.
NAMES = (
    "unprotected",
    "atomic",
    "lock",
    "lease",
    "cached",
    "redis_lease",
    "drf_idempotency",
    "drf_idempotencykey",
    "idemkit_postgresql",
    "idemkit_redis",
    "django_idempotency_key",
)


def _plain(view: Any) -> Any:
    return view.as_view()


@dataclass(frozen=True, kw_only=True)
class Contender:
    """``requirements`` are installed into a virtual environment of their own; none: this one will do."""

    title: str
    requirements: Sequence[str] = ()
    apps: Sequence[str] = ()
    middleware: Sequence[str] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    protect: Callable[[Any], Any] = _plain
    prepare: Callable[[], None] = lambda: None
    redis: bool = False


def behind(mixin: type, view: Any, **attributes: Any) -> Any:
    return type("Protected", (mixin, view), attributes).as_view()  # type: ignore[attr-defined]


def load(name: str) -> Contender:
    contender: Contender = import_module(f"{__name__}.{name}").CONTENDER
    return contender
