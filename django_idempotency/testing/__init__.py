"""For the tests of projects: requests as clients send them in practice, a trial of one's own endpoint, and in
``testing.stores`` the contract of a store."""

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
