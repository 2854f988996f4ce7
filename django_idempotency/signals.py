"""What happened to a key, for metrics and logs.

Every signal is sent with ``sender`` (the view or the consumer), ``operation`` and the arguments that its
comment names. It is sent when the fact is certain: ``key_completed``, for example, after COMMIT. Receivers'
errors are logged, never raised.
"""

from __future__ import annotations

import logging
from typing import Any

from django.dispatch import Signal

from django_idempotency.reporting.logs import log
from django_idempotency.values.outcomes import Operation

key_claimed = Signal()  # attempt
key_taken_over = Signal()  # attempt
key_completed = Signal()  # response, seconds: how long the run took until this was written, by the process's clock
key_failed = Signal()  # reason, seconds
key_released = Signal()  # seconds; the record is deleted, so the key is free
response_replayed = Signal()  # response; trace: that of the original run, as bytes, or None
request_rejected = Signal()  # reason, a Rejection; for some of them also retry_after, hold_reason, age
key_reaped = Signal()  # on_hold, reason; its lease had lapsed, and maintenance freed the key or put it on hold
operator_decided = Signal()  # act: allow_retry, fail, resolve, extend; by: a user or a name; digest
response_viewed = Signal()  # user, who saw the stored body in the admin; None if it was exported
claim_lost = Signal()  # attempt; a rival was quicker between claim and row lock: nothing was run, and it is a duplicate
stale_write_rejected = Signal()  # attempt; an owner came back too late: the fencing token kept it from writing
store_failed = Signal()  # error


def send(signal: Signal, operation: Operation, **named: Any) -> None:
    """Send ``signal``. An error in a receiver is logged and not raised."""
    _send(signal, operation.sender, operation, {"operation": operation, **named})


def send_several(signal: Signal, sender: str, count: int, using: str) -> None:
    """Send a wing's ``signal`` once for ``count`` events, if there are any. Errors are handled as by ``send``."""
    if count:
        _send(signal, sender, None, {"count": count, "using": using})


def _send(signal: Signal, sender: object, operation: Operation | None, named: dict[str, Any]) -> None:
    if signal.receivers:
        try:
            signal.send_robust(sender=sender, **named)
        except Exception as error:  # Django logs an error with the receiver's name, and fails if it has none
            log(logging.ERROR, "receiver", "error in a receiver of a signal", operation=operation, error=error)
