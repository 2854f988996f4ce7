"""The contenders: the same project and view, each with what its own README says to
add.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

# In the order of the report. The others are measured against the first.
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
ON_REQUEST = ("cached_in_process", "statements_by_record", "statements_by_lock")


def _plain(view: Any) -> Any:
    return view.as_view()


@dataclass(frozen=True, kw_only=True)
class Contender:
    """``requirements`` are installed into a virtual environment of their own. Without
    any, this one is used.
    """

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
    """Load the module ``name`` of this package."""
    contender: Contender = import_module(f"{__name__}.{name}").CONTENDER
    return contender
