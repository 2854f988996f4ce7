"""A consumer of messages in a process of its own. Its parent acts as the broker: one
line is one delivery.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import django


def main() -> None:
    django.setup()
    from testproject import faults

    faults.install()
    for line in sys.stdin:
        order = json.loads(line)
        with faults.armed(order.pop("faults")):
            answer = _delivered(**order)
            faults.reach("respond")
        print(json.dumps(answer, default=str), flush=True)


def _delivered(key: str, mode: str, payment: dict[str, Any], fails: bool) -> list[Any]:
    """A status as HTTP would have it, and the result."""
    from django_idempotency.messages import (
        Ack,
        Message,
        Reject,
        Retry,
        RetryLater,
        consume,
    )
    from django_idempotency.values.policy import Policy

    try:
        message = Message("faults", key, json.dumps(payment).encode())
        delivery = consume(
            message,
            _failing if fails else _pay,
            policy=Policy(mode=mode),
            max_attempts=1_000_000,
        )
    except Exception as error:
        return [500, repr(error)]
    match delivery:
        case Ack(result):
            return [200, result]
        case Retry(reason=reason):
            return [500, reason]
        case RetryLater():
            return [409, None]
        case Reject():
            return [422, None]


def _pay(message: Any, context: Any) -> dict[str, str]:
    """In lease mode it may run again after a crash: a child key makes it one entry all
    the same.
    """
    from django.contrib.auth.models import User

    from testproject.models import LedgerEntry

    operation = None if context.policy.is_atomic else context.child_key("ledger")
    payment = {
        "user": User.objects.get(username="alice"),
        "kind": "transfer",
        **json.loads(message.body),
    }
    return {"id": LedgerEntry.objects.record(operation=operation, **payment).pk.hex}


def _failing(message: Any, context: Any) -> None:
    _pay(message, context)
    raise ArithmeticError


if __name__ == "__main__":
    main()
