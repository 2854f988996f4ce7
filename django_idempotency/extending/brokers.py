"""Messages: publishers, runners and consumers. Unstable until 1.0."""

from __future__ import annotations

from django_idempotency.messages.consumer import Caller
from django_idempotency.messages.message import ORIGINAL_ID
from django_idempotency.messages.publisher import (
    Confirmed,
    ConnectionLost,
    Event,
    NotSent,
    Outcome,
    Postponed,
    Publisher,
    PublisherUnavailable,
    Refused,
)
from django_idempotency.messages.results import PLAIN_JSON, final
from django_idempotency.messages.runner import NothingHeard, NotTaken, Runner

__all__ = [
    "ORIGINAL_ID",
    "PLAIN_JSON",
    "Caller",
    "Confirmed",
    "ConnectionLost",
    "Event",
    "NotSent",
    "NotTaken",
    "NothingHeard",
    "Outcome",
    "Postponed",
    "Publisher",
    "PublisherUnavailable",
    "Refused",
    "Runner",
    "final",
]
