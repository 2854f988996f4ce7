"""The door for plain Django views: functions and classes, sync and async."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Generic, ParamSpec, TypeVar, overload

from django_idempotency.placement import protect
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
