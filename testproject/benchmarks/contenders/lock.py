from __future__ import annotations

from typing import Any

from django_idempotency.values.policy import Atomic
from testproject.benchmarks.contenders import Contender, behind


def protect(view: Any) -> Any:
    from django_idempotency.rest_framework import IdempotentMixin
    from django_idempotency.values.policy import Policy

    return behind(
        IdempotentMixin, view, idempotency_policy=Policy(mode=Atomic(claim="lock"))
    )


CONTENDER = Contender(
    title="ours, atomic, claims by lock", apps=["django_idempotency"], protect=protect
)
