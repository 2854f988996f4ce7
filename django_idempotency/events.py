"""What is logged when a signal tells of it."""

from __future__ import annotations

import logging
from typing import Any

from django.dispatch import Signal

from django_idempotency import signals
from django_idempotency.logs import cause, log
from django_idempotency.outcomes import Operation

EVENTS: dict[str, tuple[Signal, int, str]] = {
    "takeover": (signals.taken_over, logging.WARNING, "idempotency record %s: its holder is gone, it runs again"),
    "mismatch": (signals.mismatched, logging.WARNING, "idempotency record %s: its key came with another request"),
    "held": (signals.held, logging.WARNING, "idempotency record %s: a caller has to wait for a person's decision"),
    "stale_write_rejected": (
        signals.stale_write_rejected,
        logging.WARNING,
        "idempotency record %s: a holder came back too late and could write nothing",
    ),
    "lost_claim": (signals.claim_lost, logging.INFO, "idempotency record %s: a rival was quicker, nothing was run"),
    "pending_timeout": (signals.pending_timeout, logging.INFO, "idempotency record %s: a caller waited in vain"),
    "refused_late": (signals.refused_late, logging.INFO, "idempotency record %s: a retry came too late"),
    "reaped": (signals.reaped, logging.INFO, "idempotency record %s: its lease had run out, it was reaped"),
}


def listen() -> None:
    """Have every signal that is an event logged."""
    for event, (signal, level, message) in EVENTS.items():
        _listen(event, signal, level, message)
    signals.store_failed.connect(_hear_of_store_failure, dispatch_uid=__name__)
    signals.intervened.connect(_hear_of_intervention, dispatch_uid=__name__)


def _listen(event: str, signal: Signal, level: int, message: str) -> None:
    def hear(operation: Operation, attempt: int | None = None, **_named: Any) -> None:
        log(level, event, message, operation.id, operation=operation, attempt=attempt)

    signal.connect(hear, weak=False, dispatch_uid=__name__)


def _hear_of_store_failure(operation: Operation, error: BaseException, **_named: Any) -> None:
    log(logging.ERROR, "store_error", "idempotency record %s: %s", operation.id, cause(error), operation=operation)


def _hear_of_intervention(operation: Operation, act: str, **_named: Any) -> None:
    log(logging.INFO, "intervened", "idempotency record %s: by hand: %s", operation.id, act, operation=operation)
