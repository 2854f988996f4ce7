"""Log records with fields, one for each event that is worth reporting.

Each has ``event``, ``entry_point``, ``view``, ``record_id``, ``attempt`` and
``reason``. None contains a key, a scope or the content of a request.
"""

from __future__ import annotations

import logging
import math
import time
import traceback
from typing import Any
from uuid import UUID

from django_idempotency.values.exceptions import StoreUnavailable
from django_idempotency.values.outcomes import Operation, dotted_name
from django_idempotency.values.printable import printable

logger = logging.getLogger("django_idempotency")


def log(
    level: int,
    event: str,
    message: str,
    *arguments: object,
    operation: Operation | None = None,
    view: object = "",
    record_id: UUID | None = None,
    attempt: int | None = None,
    error: BaseException | None = None,
    reason: str | None = None,
) -> None:
    """Log ``message`` with the fields of ``operation`` or a record, and with the
    traceback of ``error`` if given.

    ``view``: the view, task or consumer, or its name, if there is no operation, or
    none that knows it.

    Strings in ``arguments`` and ``reason`` are made printable. The message ends with
    the view or task, if it is known.
    """
    name = view if isinstance(view, str) else dotted_name(view)
    if operation is not None:
        name = operation.view or name
    if name and (operation is None or operation.key):
        message, arguments = f"{message} [%s]", (*arguments, name)
    id = operation.id if operation and operation.key else record_id
    fields = {
        "event": event,
        "entry_point": (
            operation and operation.entry_point and str(operation.entry_point)
        ),
        "view": name or None,
        "record_id": id and str(id),
        "attempt": attempt,
        "reason": reason and printable(str(reason)),
    }
    logger.log(level, message, *map(_shown, arguments), exc_info=error, extra=fields)


def _shown(argument: object) -> object:
    return printable(argument) if isinstance(argument, str) else argument


def log_lost_response(what: str, id: UUID, view: str, error: Exception | None) -> None:
    """Log that the response of the record ``id`` is not kept or replayed, and where
    ``error`` was raised. ``view``: its view or task, empty if unknown.

    The error's text and traceback are left out, because either may contain a part of
    the response.
    """
    raised = ""
    if error is not None:
        place = traceback.extract_tb(error.__traceback__)[-1]
        raised = f": {type(error).__name__} at {place.filename}:{place.lineno}"
    message = "the response of idempotency record %s %s%s"
    log(
        logging.ERROR,
        "response_lost",
        message,
        id,
        what,
        raised,
        record_id=id,
        view=view,
    )


# --- Messages that would be repeated --------------------------------------------------

EVERY = 60.0  # seconds
MOST = 1000
_said: dict[str, float] = {}


def is_due(what: str, *, every: float = EVERY) -> bool:
    """Return whether to log ``what`` now: ``True`` once in ``every`` seconds in this
    process.
    """
    now = time.monotonic()
    if now - _said.get(what, -math.inf) < every:
        return False
    if len(_said) >= MOST:
        _said.clear()
    _said[what] = now
    return True


# --- Error messages -------------------------------------------------------------------

_DRIVERS = ("psycopg", "psycopg2", "psycopg_pool", "MySQLdb")
_OF_MYSQLS_CLIENT = range(2000, 3000)


def cause(error: BaseException) -> str:
    """Return an error in one line, without the keys, rows and parameters that a
    database may quote in it.
    """
    if isinstance(error, StoreUnavailable):
        if error.__cause__ is None:
            return str(error)
        error = error.__cause__
    driver = error.__cause__ or error
    name, code = type(error).__name__, _code(driver)
    if code is not None:
        return f"{name} {code}"
    is_drivers_own = any(
        base.__module__.partition(".")[0] in _DRIVERS for base in type(driver).__mro__
    )
    return (
        f"{name}: {str(driver).splitlines()[0]}"
        if is_drivers_own and str(driver)
        else name
    )


def _code(error: Any) -> str | None:
    """Return the server's code for the error; ``None`` if the error is not from the
    server.
    """
    for name in ("sqlstate", "pgcode", "sqlite_errorname"):
        if code := getattr(error, name, None):
            return str(code)
    number = error.args[0] if getattr(error, "args", ()) else None
    return (
        str(number)
        if isinstance(number, int) and number not in _OF_MYSQLS_CLIENT
        else None
    )
