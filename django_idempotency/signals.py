"""What happened to a key, for metrics and logs.

Every signal is sent with ``sender`` (the view or the consumer), ``operation`` and what its comment names, once the fact
stands: ``completed`` after COMMIT. Receivers' errors are logged, never raised.
"""

from __future__ import annotations

import logging
from typing import Any

from django.dispatch import Signal

from django_idempotency.logs import log
from django_idempotency.outcomes import Operation

claimed = Signal()  # attempt
taken_over = Signal()  # attempt
completed = Signal()  # response, seconds; how long the run took by the process's clock, until this was written
failed = Signal()  # reason, seconds
released = Signal()  # seconds; the key is as if never used
replayed = Signal()  # response
in_flight = Signal()  # retry_after
pending_timeout = Signal()  # retry_after
mismatched = Signal()  # the key came with another request
held = Signal()  # reason
reaped = Signal()  # held, reason; its lease had run out, and maintenance freed the key or set it aside
intervened = Signal()  # act; what a person did to the record: release, fail, resolve, extend
refused_late = Signal()  # age; a retry so old that its operation is no longer known
claim_lost = Signal()  # attempt; a rival was quicker between claim and row lock: nothing was run, and it is a duplicate
stale_write_rejected = Signal()  # attempt; a holder that came back too late: the fencing token kept it from writing
store_failed = Signal()  # error


def send(signal: Signal, operation: Operation, **named: Any) -> None:
    """Send ``signal``; an error in a receiver is logged, and it does no harm."""
    if signal.receivers:
        try:
            signal.send_robust(sender=operation.sender, operation=operation, **named)
        except Exception as error:  # Django's log of an error names the receiver, and fails if that has no name
            log(logging.ERROR, "receiver", "error in a receiver of a signal", operation=operation, error=error)
