"""Idempotency keys for Django: a request or a message runs once, and each retry gets
the first response.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from django_idempotency.values.lazily import lazily

if TYPE_CHECKING:
    from django_idempotency.engine.context import current
    from django_idempotency.http.key_sources import body_field
    from django_idempotency.http.placement import idempotency_exempt, idempotent
    from django_idempotency.http.requests import IdempotentRequest
    from django_idempotency.messages import Message, consume
    from django_idempotency.messages.once import once, run_once
    from django_idempotency.values.exceptions import (
        ClaimLost,
        Hold,
        IdempotencyError,
        NotRun,
        Rejected,
        StoreUnavailable,
        TerminalFailure,
    )
    from django_idempotency.values.policy import (
        Atomic,
        Body,
        Fingerprint,
        Key,
        Lease,
        Limits,
        Policy,
        retention_for,
    )
    from django_idempotency.values.problems import Problem

__version__ = "0.1.0"
__all__ = [
    "Atomic",
    "Body",
    "ClaimLost",
    "Fingerprint",
    "Hold",
    "IdempotencyError",
    "IdempotentRequest",
    "Key",
    "Lease",
    "Limits",
    "Message",
    "NotRun",
    "Policy",
    "Problem",
    "Rejected",
    "StoreUnavailable",
    "TerminalFailure",
    "body_field",
    "consume",
    "current",
    "idempotency_exempt",
    "idempotent",
    "once",
    "retention_for",
    "run_once",
]

_VALUES = "django_idempotency.values"
__getattr__ = lazily(
    __name__,
    {
        **dict.fromkeys(
            (
                "ClaimLost",
                "Hold",
                "IdempotencyError",
                "NotRun",
                "Rejected",
                "StoreUnavailable",
                "TerminalFailure",
            ),
            f"{_VALUES}.exceptions",
        ),
        **dict.fromkeys(
            (
                "Atomic",
                "Body",
                "Fingerprint",
                "Key",
                "Lease",
                "Limits",
                "Policy",
                "retention_for",
            ),
            f"{_VALUES}.policy",
        ),
        **dict.fromkeys(
            ("idempotency_exempt", "idempotent"), "django_idempotency.http.placement"
        ),
        **dict.fromkeys(("once", "run_once"), "django_idempotency.messages.once"),
        "Problem": f"{_VALUES}.problems",
        "IdempotentRequest": "django_idempotency.http.requests",
        "body_field": "django_idempotency.http.key_sources",
        "Message": "django_idempotency.messages.message",
        "consume": "django_idempotency.messages.consumer",
        "current": "django_idempotency.engine.context",
    },
)
