"""Handle messages once, however often a broker delivers them."""

from __future__ import annotations

from django_idempotency.consumers.base import Backoff, Consumer, aconsume, consume, current_context
from django_idempotency.consumers.messages import (
    Ack,
    AlreadyDone,
    AwaitsOperator,
    Delivery,
    Done,
    Exhausted,
    InFlightElsewhere,
    Malformed,
    MarkedFailed,
    Message,
    OutOfTurn,
    Refused,
    Reject,
    RejectMessage,
    Retry,
    RetryLater,
    StoreAway,
)
from django_idempotency.consumers.results import NOT_KEPT
from django_idempotency.engine import Context

__all__ = [
    "NOT_KEPT",
    "Ack",
    "AlreadyDone",
    "AwaitsOperator",
    "Backoff",
    "Consumer",
    "Context",
    "Delivery",
    "Done",
    "Exhausted",
    "InFlightElsewhere",
    "Malformed",
    "MarkedFailed",
    "Message",
    "OutOfTurn",
    "Refused",
    "Reject",
    "RejectMessage",
    "Retry",
    "RetryLater",
    "StoreAway",
    "aconsume",
    "consume",
    "current_context",
]
