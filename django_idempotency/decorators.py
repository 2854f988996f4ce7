"""The entry point for plain Django views: functions and classes, sync and async."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from django_idempotency.http.placement import protect
from django_idempotency.policy import Decorator, Policy

V = TypeVar("V", bound=Callable[..., Any])


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
