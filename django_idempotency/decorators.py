"""The entry point for plain Django views: functions and classes, sync and async."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Generic, ParamSpec, TypeVar, overload

from django_idempotency.http.placement import protect
from django_idempotency.policy import Policy, policy_of

V = TypeVar("V", bound=Callable[..., Any])
Options = ParamSpec("Options")


class Decorator(Generic[Options]):
    """A decorator of views, with or without ``policy=`` or the options of ``Policy``."""

    def __init__(self, policy: Callable[Options, Policy], decorate: Callable[..., Any], name: str) -> None:
        """Take ``Policy`` only for the types of its arguments."""
        self._decorate = decorate
        self._name = name

    @overload
    def __call__(self, view: V, /) -> V: ...
    @overload
    def __call__(self, /, *, policy: Policy) -> Callable[[V], V]: ...
    @overload
    def __call__(self, *args: Options.args, **options: Options.kwargs) -> Callable[[V], V]: ...
    def __call__(self, *args: Any, **options: Any) -> Any:
        if args:
            return self._decorate(self._only_view(args, options), Policy())
        policy = policy_of(options)
        return partial(self._decorate, policy=policy)

    def _only_view(self, args: tuple[Any, ...], options: dict[str, Any]) -> Callable[..., Any]:
        view = args[0]
        if isinstance(view, Policy):
            raise TypeError(f"Pass a policy by keyword: @{self._name}(policy=…).")
        if len(args) > 1 or options or not callable(view):
            raise TypeError(
                f"{self._name} takes a view or keyword options, such as @{self._name}(required=True); got {view!r}."
            )
        return view  # type: ignore[no-any-return]


idempotent = Decorator(Policy, protect, "idempotent")
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
