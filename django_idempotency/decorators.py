"""The entry point for plain Django views: functions and classes, sync and async."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Generic, ParamSpec, TypeVar, overload

from django_idempotency.policy import Policy
from django_idempotency.wrapping import protect

V = TypeVar("V", bound=Callable[..., Any])
Options = ParamSpec("Options")


class _Idempotent(Generic[Options]):
    def __init__(self, policy: Callable[Options, Policy]) -> None:
        """Take ``Policy`` only for the types of its arguments."""

    @overload
    def __call__(self, view: V, /) -> V: ...
    @overload
    def __call__(self, /, *, policy: Policy) -> Callable[[V], V]: ...
    @overload
    def __call__(self, *args: Options.args, **options: Options.kwargs) -> Callable[[V], V]: ...
    def __call__(self, *args: Any, **options: Any) -> Any:
        if args:
            return protect(_only_view(args, options), Policy())
        return partial(protect, policy=_only_policy(**options) if "policy" in options else Policy(**options))


def _only_view(args: tuple[Any, ...], options: dict[str, Any]) -> Callable[..., Any]:
    view = args[0]
    if isinstance(view, Policy):
        raise TypeError("Pass a policy by keyword: @idempotent(policy=…).")
    if len(args) > 1 or options or not callable(view):
        raise TypeError(
            f"idempotent takes a view or keyword options, such as @idempotent(required=True); got {view!r}."
        )
    return view  # type: ignore[no-any-return]


def _only_policy(policy: Any, **options: Any) -> Policy:
    if not isinstance(policy, Policy):
        raise TypeError(f"policy is {policy!r}; write @idempotent(policy=Policy(…)).")
    if options:
        raise TypeError(f"policy= replaces all other options: move {', '.join(options)} into it.")
    return policy


idempotent = _Idempotent(Policy)
"""Run a view once for each idempotency key and replay its response.

Write ``@idempotent``, ``@idempotent(policy=…)``, or ``@idempotent(required=True)`` with any options of ``Policy``. Put
the decorator below decorators that authenticate, so that they run on replays too, and above ``@transaction.atomic`` and
``@api_view``. For one method, use ``@method_decorator(idempotent, name="post")`` on the class, but not under
``ATOMIC_REQUESTS``. Raises ``ImproperlyConfigured`` for an invalid option, for a method, and for a view that already
has an entry point.
"""


def idempotency_exempt(view: V) -> V:
    """Make ``IdempotencyMiddleware`` ignore ``view``: a function, a class, or a method of one. Return ``view``."""
    view.idempotency_exempt = True  # type: ignore[attr-defined]
    return view
