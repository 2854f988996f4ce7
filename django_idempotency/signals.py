"""What happened to a key, for metrics and logs.

Every signal is sent with ``sender`` (the view or the consumer), ``operation`` and what its comment names, once the fact
stands: ``completed`` after COMMIT. Receivers' errors are logged, never raised.
"""

from __future__ import annotations

from typing import Any

from django.dispatch import Signal

from django_idempotency.outcomes import Operation

claimed = Signal()  # attempt
taken_over = Signal()  # attempt
completed = Signal()  # response
failed = Signal()  # reason
released = Signal()  # the key is as if never used
replayed = Signal()  # response
in_flight = Signal()  # retry_after
pending_timeout = Signal()  # retry_after
mismatched = Signal()  # the key came with another request
held = Signal()  # reason
reaped = Signal()  # held, reason; its lease had run out, and maintenance freed the key or set it aside
refused_late = Signal()  # age; a retry so old that its operation is no longer known
claim_lost = Signal()  # a holder that came back too late: its write was rejected
store_failed = Signal()  # error


def send(signal: Signal, operation: Operation, **named: Any) -> None:
    """Send ``signal``; Django logs an error in a receiver, and it does no harm."""
    if signal.receivers:
        signal.send_robust(sender=operation.sender, operation=operation, **named)
