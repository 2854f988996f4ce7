"""Log records with fields, one for each event that somebody may want to hear of.

Each has ``event``, ``door``, ``view``, ``record_id`` and ``attempt``. None has a key, a scope, or what a request held.
"""

from __future__ import annotations

import logging
from typing import Any
from uuid import UUID

from django_idempotency.exceptions import StoreUnavailable
from django_idempotency.outcomes import Operation

logger = logging.getLogger("django_idempotency")


def log(
    level: int,
    event: str,
    message: str,
    *arguments: object,
    operation: Operation | None = None,
    record_id: UUID | None = None,
    attempt: int | None = None,
    error: BaseException | None = None,
) -> None:
    """Log ``message`` with the fields of ``operation`` or a record; with ``error``, with its traceback."""
    id = operation.id if operation else record_id
    fields = {
        "event": event,
        "door": operation and operation.door and str(operation.door),
        "view": operation and operation.view,
        "record_id": id and str(id),
        "attempt": attempt,
    }
    logger.log(level, message, *arguments, exc_info=error, extra=fields)


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
