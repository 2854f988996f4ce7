"""Handle messages once, however often a broker delivers them."""

from __future__ import annotations

from django_idempotency.engine import Context
from django_idempotency.messages.consumer import Consumer, consume
from django_idempotency.messages.handling import Backoff
from django_idempotency.messages.message import (
    Ack,
    AlreadyDone,
    AwaitsOperator,
    AwaitsStore,
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
)
from django_idempotency.messages.results import NOT_KEPT

__all__ = [
    "NOT_KEPT",
    "Ack",
    "AlreadyDone",
    "AwaitsOperator",
    "AwaitsStore",
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
    "consume",
]
