"""``ATOMIC_REQUESTS``: entry points open Django's transactions themselves, because claims are made outside of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack
from typing import Any, TypeVar

from django.db import connections, transaction
from django.http import HttpRequest

from django_idempotency.policy import Policy
from django_idempotency.values.outcomes import EntryPoint

V = TypeVar("V", bound=Callable[..., Any])


class NonAtomic:
    """Set as ``_non_atomic_requests`` on an entry point, so that Django opens no transaction in any database.

    ``stated``: the databases in which the view itself wants none, by ``non_atomic_requests`` below or above the entry
    point.
    """

    def __init__(self, stated: Collection[str] = ()) -> None:
        self.stated = set(stated)

    def __contains__(self, using: str) -> bool:
        return True

    def __iter__(self) -> Iterator[str]:
        return iter(self.stated)

    def add(self, using: str) -> None:
        self.stated.add(using)


def stated_on(*views: Any) -> set[str]:
    """Return the databases in which views, or the ``dispatch`` methods of classes, want no transaction."""
    return {using for view in views for using in getattr(view, "_non_atomic_requests", ())}


def stated_on_class(cls: type) -> set[str]:
    return stated_on(*(vars(base)["dispatch"] for base in cls.__mro__ if "dispatch" in vars(base)))


def take_over_atomic_requests(entry_point: V, non_atomic: NonAtomic | None = None) -> V:
    """Keep Django from opening its transactions around ``entry_point``, which opens them itself."""
    non_atomic = NonAtomic() if non_atomic is None else non_atomic
    non_atomic.stated |= stated_on(entry_point)
    entry_point._non_atomic_requests = non_atomic  # type: ignore[attr-defined]
    return entry_point


class ProtectedClass:
    # A base of protected classes of views. ``idempotent_dispatch`` puts the entry point inside the ``dispatch`` of the
    # other bases. No docstring: schema generators would show it as the description of every view without one.

    idempotency_policy: Policy = Policy()
    idempotency_entry_point: EntryPoint
    idempotency_non_atomic = NonAtomic()
    idempotent_dispatch: Callable[..., Any]

    def __init__(self, *args: Any, idempotency_non_atomic: NonAtomic | None = None, **initkwargs: Any) -> None:
        super().__init__(*args, **initkwargs)  # a class may take only its own arguments, as graphene's does
        if idempotency_non_atomic is not None:
            self.idempotency_non_atomic = idempotency_non_atomic

    @classmethod
    def as_view(cls, *args: Any, **initkwargs: Any) -> Any:
        non_atomic = NonAtomic(stated_on_class(cls))
        view = super().as_view(*args, **initkwargs, idempotency_non_atomic=non_atomic)  # type: ignore[misc]
        if cls.dispatch is ProtectedClass.dispatch:  # Django has copied nothing from the one that it hides
            vars(view).update(vars(super().dispatch) | vars(view))  # type: ignore[misc]
        return take_over_atomic_requests(view, non_atomic)

    def dispatch(self, request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
        return self.idempotent_dispatch(super().dispatch, request, *args, **kwargs)  # type: ignore[misc]


def is_atomic_request(using: str, non_atomic: Collection[str]) -> bool:
    """Whether Django would open a transaction on ``using`` around a view."""
    return bool(connections.settings[using]["ATOMIC_REQUESTS"]) and using not in non_atomic


def open_atomic_requests(stack: ExitStack, non_atomic: Collection[str], *, but: str | None = None) -> None:
    """Open the transactions that ``ATOMIC_REQUESTS`` asks for, except in ``but``, where one is open already."""
    for using in connections:
        if using != but and is_atomic_request(using, non_atomic):
            stack.enter_context(transaction.atomic(using=using))
