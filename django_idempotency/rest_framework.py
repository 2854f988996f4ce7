"""The entry point for Django REST framework: APIViews, generic views, viewsets and
their ``@action``s.

Put ``IdempotentMixin`` before ``APIView`` or a viewset among the bases. The unsafe
methods of the view then run once for each idempotency key. The key is claimed after
``initial()``, so authentication, permissions and throttles run first, on replays too.
Set the view's policy as ``idempotency_policy``; an action sets its own with
``@action(…, idempotency_policy=Policy(…))``.
"""

from __future__ import annotations

from django_idempotency.http.rest_framework import (
    IdempotencyProblem,
    IdempotentMixin,
    ReplayedResponse,
)

__all__ = ["IdempotencyProblem", "IdempotentMixin", "ReplayedResponse"]
