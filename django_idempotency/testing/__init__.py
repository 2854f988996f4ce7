"""Helpers for the tests of projects: they send requests as clients do in practice, and put an endpoint on trial.
``testing.stores`` has the contract of a store."""

from __future__ import annotations

from django_idempotency.testing.crashes import crash_after_effect
from django_idempotency.testing.requests import assert_idempotent, duplicates_at_once, lost_answer
from django_idempotency.testing.trials import (
    Call,
    Event,
    History,
    Kind,
    Response,
    Verdict,
    Violation,
    check,
    exercise,
    plan,
)
from django_idempotency.testing.twice import Repetition, sending_twice

__all__ = [
    "Call",
    "Event",
    "History",
    "Kind",
    "Repetition",
    "Response",
    "Verdict",
    "Violation",
    "assert_idempotent",
    "check",
    "crash_after_effect",
    "duplicates_at_once",
    "exercise",
    "lost_answer",
    "plan",
    "sending_twice",
]
