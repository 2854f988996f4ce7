"""``ATOMIC_REQUESTS``: entry points open Django's transactions themselves, because
claims are made outside of them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, TypeVar

from django.db import connections, transaction
from django.http import HttpRequest

from django_idempotency.values.outcomes import EntryPoint
from django_idempotency.values.policy import Policy

V = TypeVar("V", bound=Callable[..., Any])


class NonAtomic(set[str]):
    """Set as ``_non_atomic_requests`` on an entry point, so that Django opens no
    transaction in any database.

    Its items are the databases in which the view itself wants none, by
    ``non_atomic_requests`` below or above the entry point.
    """

    def __contains__(self, using: object) -> bool:
        return True


def _stated_on(view: Any) -> set[str]:
    """Return the databases in which a view wants no transaction."""
    return set(getattr(view, "_non_atomic_requests", ()))


def without_atomic_requests(entry_point: V) -> V:
    """Keep Django from opening its transactions around ``entry_point``, which opens
    them itself.
    """
    entry_point._non_atomic_requests = NonAtomic(_stated_on(entry_point))  # type: ignore[attr-defined]
    return entry_point


class ProtectedClass:
    # A base of protected classes of views. ``idempotent_dispatch`` puts the entry point
    # inside the ``dispatch`` of the other bases. No docstring: schema generators would
    # show it as the description of every view without one.

    idempotency_policy: Policy = Policy()
    idempotency_entry_point: EntryPoint
    idempotent_dispatch: Callable[..., Any]

    @classmethod
    def as_view(cls, *args: Any, **initkwargs: Any) -> Any:
        view = super().as_view(*args, **initkwargs)  # type: ignore[misc]
        # Django has copied nothing from the one that it hides
        if cls.dispatch is ProtectedClass.dispatch:
            vars(view).update(vars(super().dispatch) | vars(view))  # type: ignore[misc]
        return without_atomic_requests(view)

    def dispatch(self, request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
        return self.idempotent_dispatch(super().dispatch, request, *args, **kwargs)  # type: ignore[misc]


def is_atomic_request(using: str, request: HttpRequest) -> bool:
    """Whether Django would open a transaction on ``using`` around the view of
    ``request``.
    """
    if not connections.settings[using]["ATOMIC_REQUESTS"]:
        return False
    match = request.resolver_match  # none if a test calls a view
    return match is None or using not in _stated_on(match.func)


def is_marked_for_rollback() -> bool:
    """Whether a transaction that ``ATOMIC_REQUESTS`` asks for will be rolled back, as
    REST framework wants for exceptions.
    """
    return any(
        each.settings_dict["ATOMIC_REQUESTS"]
        and each.in_atomic_block
        and each.get_rollback()
        for each in connections.all(initialized_only=True)
    )


def open_atomic_requests(
    stack: ExitStack, request: HttpRequest, *, but: str | None
) -> None:
    """Open the transactions that ``ATOMIC_REQUESTS`` asks for, except in ``but``, where
    one is open already.
    """
    for using in connections:
        if using != but and is_atomic_request(using, request):
            stack.enter_context(transaction.atomic(using=using))
