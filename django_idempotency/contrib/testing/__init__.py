"""Helpers for the tests of projects: they send requests as clients do in practice. ``testing.stores`` has the contract
of a store."""

from __future__ import annotations

from typing import TYPE_CHECKING

from django_idempotency.values.lazily import lazily

if TYPE_CHECKING:
    from django_idempotency.contrib.testing.assertions import (
        assert_idempotent,
        crash_after_effect,
    )
    from django_idempotency.contrib.testing.twice import Repetition, sending_twice

__all__ = ["Repetition", "assert_idempotent", "crash_after_effect", "sending_twice"]

_KIT = "django_idempotency.contrib.testing"
__getattr__ = lazily(
    __name__,
    {
        **dict.fromkeys(
            ("assert_idempotent", "crash_after_effect"), f"{_KIT}.assertions"
        ),
        **dict.fromkeys(("Repetition", "sending_twice"), f"{_KIT}.twice"),
    },
)
