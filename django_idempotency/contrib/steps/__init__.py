"""Steps of an operation in lease mode, each of which is done once: ``atomic`` commits
its effects together with its result, ``call`` sends a key of its own to a provider.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from django_idempotency.values.lazily import lazily

if TYPE_CHECKING:
    from django_idempotency.contrib.steps.decisions import NOT_DONE, rename, resolve
    from django_idempotency.contrib.steps.running import aatomic, acall, atomic, call
    from django_idempotency.contrib.steps.signals import step_completed, step_held
    from django_idempotency.contrib.steps.values import StepError

__all__ = [
    "NOT_DONE",
    "StepError",
    "aatomic",
    "acall",
    "atomic",
    "call",
    "rename",
    "resolve",
    "step_completed",
    "step_held",
]

__getattr__ = lazily(
    __name__,
    {
        "StepError": f"{__name__}.values",
        **dict.fromkeys(("aatomic", "acall", "atomic", "call"), f"{__name__}.running"),
        **dict.fromkeys(("NOT_DONE", "rename", "resolve"), f"{__name__}.decisions"),
        **dict.fromkeys(("step_completed", "step_held"), f"{__name__}.signals"),
    },
)
