"""Log records with fields, one for each event that somebody may want to hear of.

Each has ``event``, ``door``, ``view``, ``record_id`` and ``attempt``. None has a key, a scope, or what a request held.
"""

from __future__ import annotations

import logging
from typing import Any

from django.dispatch import Signal

from django_idempotency import signals
from django_idempotency.exceptions import StoreUnavailable
from django_idempotency.outcomes import Operation

logger = logging.getLogger("django_idempotency")


def log(
    level: int,
    event: str,
    message: str,
    *arguments: object,
    operation: Operation | None = None,
    attempt: int | None = None,
    error: BaseException | None = None,
) -> None:
    """Log ``message`` with the fields of ``operation``; with the traceback of ``error``, if there is one."""
    fields = {
        "event": event,
        "door": operation and operation.door and str(operation.door),
        "view": operation and operation.view,
        "record_id": operation and str(operation.id),
        "attempt": attempt,
    }
    logger.log(level, message, *arguments, exc_info=error, extra=fields)


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


def _listen(event: str, signal: Signal, level: int, message: str) -> None:
    def hear(operation: Operation, attempt: int | None = None, **_named: Any) -> None:
        log(level, event, message, operation.id, operation=operation, attempt=attempt)

    signal.connect(hear, weak=False, dispatch_uid=__name__)


def _hear_of_store_failure(operation: Operation, error: BaseException, **_named: Any) -> None:
    log(logging.ERROR, "store_error", "idempotency record %s: %s", operation.id, cause(error), operation=operation)


for _event, (_signal, _level, _message) in EVENTS.items():
    _listen(_event, _signal, _level, _message)
signals.store_failed.connect(_hear_of_store_failure, dispatch_uid=__name__)


# --- What an error may say of itself ---------------------------------------------------------------------------------

_OF_MYSQLS_CLIENT = range(2000, 3000)


def cause(error: BaseException) -> str:
    """An error in one line, without what a database quotes in it: keys, rows, parameters."""
    if isinstance(error, StoreUnavailable):
        if error.__cause__ is None:
            return str(error)
        error = error.__cause__
    driver = error.__cause__ or error
    name, code = type(error).__name__, _code(driver)
    if code is None:
        return f"{name}: {str(driver).splitlines()[0]}" if _is_a_drivers(driver) and str(driver) else name
    return f"{name} {code}"


def _is_a_drivers(error: BaseException) -> bool:
    return any(
        base.__module__.partition(".")[0] in ("psycopg", "psycopg_pool", "MySQLdb") for base in type(error).__mro__
    )


def _code(error: Any) -> str | None:
    """What the server calls the error; ``None`` if it is none of the server's."""
    for name in ("sqlstate", "sqlite_errorname"):
        if code := getattr(error, name, None):
            return str(code)
    number = error.args[0] if getattr(error, "args", ()) else None
    return str(number) if isinstance(number, int) and number not in _OF_MYSQLS_CLIENT else None
