"""Idempotency keys for Django: a request or a message runs once, and each retry gets the first response."""

from __future__ import annotations

from typing import TYPE_CHECKING

from django_idempotency.values.lazily import lazily

if TYPE_CHECKING:
    from django_idempotency.http.placement import idempotency_exempt, idempotent
    from django_idempotency.messages import Message, consume
    from django_idempotency.values.exceptions import (
        ClaimLost,
        IdempotencyError,
        StoreUnavailable,
        TerminalFailure,
    )
    from django_idempotency.values.policy import (
        Atomic,
        Body,
        Fingerprint,
        Keys,
        Lease,
        Limits,
        Policy,
        retention_for,
    )

__version__ = "0.1.0"
__all__ = [
    "Atomic",
    "Body",
    "ClaimLost",
    "Fingerprint",
    "IdempotencyError",
    "Keys",
    "Lease",
    "Limits",
    "Message",
    "Policy",
    "StoreUnavailable",
    "TerminalFailure",
    "consume",
    "idempotency_exempt",
    "idempotent",
    "retention_for",
]

_VALUES = "django_idempotency.values"
__getattr__ = lazily(
    __name__,
    {
        **dict.fromkeys(
            ("ClaimLost", "IdempotencyError", "StoreUnavailable", "TerminalFailure"),
            f"{_VALUES}.exceptions",
        ),
        **dict.fromkeys(
            (
                "Atomic",
                "Body",
                "Fingerprint",
                "Keys",
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
        "Message": "django_idempotency.messages.message",
        "consume": "django_idempotency.messages.consumer",
    },
)
