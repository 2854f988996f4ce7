"""Idempotency keys for Django: a request or a message runs once, and each retry gets the first response."""

from __future__ import annotations

from typing import TYPE_CHECKING

from django_idempotency.values.lazily import lazily

if TYPE_CHECKING:
    from django_idempotency.decorators import idempotency_exempt, idempotent
    from django_idempotency.exceptions import TerminalFailure
    from django_idempotency.messages import Message, consume
    from django_idempotency.policy import Policy
    from django_idempotency.values.option_groups import Atomic, Body, Fingerprint, Keys, Lease, Limits

__version__ = "0.1.0"
__all__ = [
    "Atomic",
    "Body",
    "Fingerprint",
    "Keys",
    "Lease",
    "Limits",
    "Message",
    "Policy",
    "TerminalFailure",
    "consume",
    "idempotency_exempt",
    "idempotent",
]

_GROUPS = "django_idempotency.values.option_groups"
__getattr__ = lazily(
    __name__,
    {
        **dict.fromkeys(("Atomic", "Body", "Fingerprint", "Keys", "Lease", "Limits"), _GROUPS),
        "Message": "django_idempotency.messages.message",
        "Policy": "django_idempotency.policy",
        "TerminalFailure": "django_idempotency.exceptions",
        "consume": "django_idempotency.messages.consumer",
        "idempotency_exempt": "django_idempotency.decorators",
        "idempotent": "django_idempotency.decorators",
    },
)
