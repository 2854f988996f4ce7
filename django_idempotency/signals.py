"""What happened to a key, or to events of the outbox, for metrics and logs.

Every signal of a key is sent with ``sender`` (the view or the consumer), ``operation`` and what its comment names, once
the fact stands: ``key_completed`` after COMMIT. Those of the outbox are sent once for several events, with the alias of
their publisher as ``sender``. Receivers' errors are logged, never raised.
"""

from __future__ import annotations

import logging
from typing import Any

from django.dispatch import Signal

from django_idempotency.logs import log
from django_idempotency.outcomes import Operation

key_claimed = Signal()  # attempt
key_taken_over = Signal()  # attempt
key_completed = Signal()  # response, seconds: how long the run took by the process's clock, until this was written
key_failed = Signal()  # reason, seconds
key_released = Signal()  # seconds; the key is as if never used
response_replayed = Signal()  # response; trace: of the run that it is of, as bytes, or None
request_rejected = Signal()  # reason, a Rejection; with some of them retry_after, hold_reason, age
key_reaped = Signal()  # on_hold, reason; its lease had lapsed, and maintenance freed the key or put it on hold
operator_decided = Signal()  # act: allow_retry, fail, resolve, extend; by: a user or a name; digest
response_viewed = Signal()  # user, who was shown the stored body in the admin; None: it was exported
claim_lost = Signal()  # attempt; a rival was quicker between claim and row lock: nothing was run, and it is a duplicate
stale_write_rejected = Signal()  # attempt; an owner came back too late: the fencing token kept it from writing
store_failed = Signal()  # error
request_observed = Signal()  # keyed, client, comparable; with OBSERVE, of a request that ran whatever its key

outbox_published = Signal()  # count: how many events their publisher confirmed; using: the alias of their database
outbox_failed = Signal()  # count, using; the publisher refused them, and they are tried again later
outbox_dead_lettered = Signal()  # count, using; they are tried no more until an operator requeues them
outbox_requeued = Signal()  # count, using; an operator had these dead letters tried again


def send(signal: Signal, operation: Operation, **named: Any) -> None:
    """Send ``signal``; an error in a receiver is logged, and it does no harm."""
    _send(signal, operation.sender, operation, {"operation": operation, **named})


def send_of_outbox(signal: Signal, publisher: str, count: int, using: str) -> None:
    """Send ``signal`` for ``count`` events of one publisher, unless there are none. Errors: as for ``send``."""
    if count:
        _send(signal, publisher, None, {"count": count, "using": using})


def _send(signal: Signal, sender: object, operation: Operation | None, named: dict[str, Any]) -> None:
    if signal.receivers:
        try:
            signal.send_robust(sender=sender, **named)
        except Exception as error:  # Django's log of an error names the receiver, and fails if that has no name
            log(logging.ERROR, "receiver", "error in a receiver of a signal", operation=operation, error=error)
