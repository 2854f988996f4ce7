"""Handle messages once, however often a broker delivers them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from django_idempotency.values.lazily import lazily

if TYPE_CHECKING:
    from django_idempotency.engine import Context
    from django_idempotency.messages.attempt import Backoff, current_context
    from django_idempotency.messages.consumer import Consumer, consume
    from django_idempotency.messages.message import (
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
    from django_idempotency.messages.results import NOT_KEPT

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
    "consume",
    "current_context",
]

_MESSAGES = "django_idempotency.messages"
__getattr__ = lazily(
    __name__,
    {
        **dict.fromkeys(__all__, f"{_MESSAGES}.message"),
        **dict.fromkeys(("Backoff", "current_context"), f"{_MESSAGES}.attempt"),
        **dict.fromkeys(("Consumer", "consume"), f"{_MESSAGES}.consumer"),
        "Context": "django_idempotency.engine",
        "NOT_KEPT": f"{_MESSAGES}.results",
    },
)
