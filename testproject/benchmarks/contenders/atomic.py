from __future__ import annotations

from typing import Any

from testproject.benchmarks.contenders import Contender, behind


def protect(view: Any) -> Any:
    from django_idempotency.rest_framework import IdempotentMixin

    return behind(IdempotentMixin, view)


CONTENDER = Contender(
    title="ours, atomic", apps=["django_idempotency"], protect=protect
)
