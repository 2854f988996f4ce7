"""Helpers for the tests of projects: they send requests as clients do in practice.
``testing.stores`` has the contract of a store.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from django_idempotency.values.lazily import lazily

if TYPE_CHECKING:
    from django_idempotency.contrib.testing.assertions import (
        assert_idempotent,
        crash_after_effect,
        duplicates_at_once,
    )
    from django_idempotency.contrib.testing.twice import Repetition, sending_twice

_ASSERTIONS = ("assert_idempotent", "crash_after_effect", "duplicates_at_once")
__all__ = [
    "Repetition",
    "assert_idempotent",
    "crash_after_effect",
    "duplicates_at_once",
    "sending_twice",
]

_KIT = "django_idempotency.contrib.testing"
__getattr__ = lazily(
    __name__,
    {
        **dict.fromkeys(_ASSERTIONS, f"{_KIT}.assertions"),
        **dict.fromkeys(("Repetition", "sending_twice"), f"{_KIT}.twice"),
    },
)
