"""Operations that a request defers, each of which runs once; and the status of any
operation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from django_idempotency.values.lazily import lazily

if TYPE_CHECKING:
    from django_idempotency.contrib.operations.deferring import defer, defers
    from django_idempotency.contrib.operations.registry import DeferError, operation
    from django_idempotency.contrib.operations.running import run_operation
    from django_idempotency.contrib.operations.signals import operation_due

__all__ = [
    "DeferError",
    "defer",
    "defers",
    "operation",
    "operation_due",
    "run_operation",
]

__getattr__ = lazily(
    __name__,
    {
        **dict.fromkeys(("defer", "defers"), f"{__name__}.deferring"),
        **dict.fromkeys(("DeferError", "operation"), f"{__name__}.registry"),
        "run_operation": f"{__name__}.running",
        "operation_due": f"{__name__}.signals",
    },
)
