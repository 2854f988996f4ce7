"""Database errors by code: which mean that the store is unavailable, and which that
another session blocked it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from django.db import IntegrityError, InterfaceError, OperationalError

from django_idempotency.values.exceptions import (
    StoreConflict,
    StoreRefused,
    StoreUnavailable,
)
from django_idempotency.values.registry import Registry

# PostgreSQL: there is no such function, or not for this role.
NO_FUNCTION_STATES = ("42883", "42501")
NO_FUNCTION = (
    "The function django_idempotency_claim is missing, or this role may not EXECUTE it."
    " Run manage.py migrate, or grant EXECUTE."
)

# PostgreSQL errors for which another connection may help: the server is read-only, such
# as the old primary after a failover; a transaction was idle, or lasted, for too long;
# a prepared statement is gone, because a pool sent DISCARD ALL or DEALLOCATE ALL; and a
# table was dropped while the compilation of the claim's function waited for it ("could
# not open relation with OID …", an internal error).
STALE_STATES = ("25006", "25P03", "25P04", "26000", "XX000")
# MariaDB and MySQL: an exception left the connection in the middle of a statement. The
# driver itself raises this when it closes a cursor, where Django translates no errors.
OUT_OF_SYNC = 2014
# PostgreSQL: lock not available, serialization failure, deadlock.
CONFLICT_STATES = ("55P03", "40001", "40P01")
# MariaDB and MySQL: lock wait timeout, deadlock, record changed since last read, lock
# not available.
CONFLICT_NUMBERS = (1205, 1213, 1020, 3572)
# A statement exceeded the database's own limit on its duration, or was cancelled.
TOO_LONG_STATES, TOO_LONG_NUMBERS = ("57014",), (1969, 1317, 3024)

# PostgreSQL: savepoint does not exist, no transaction. MariaDB: savepoint does not
# exist.
MISSING_SAVEPOINT_STATES, MISSING_SAVEPOINT_NUMBERS = ("3B001", "25P01"), (1305,)


UNIQUE_VIOLATION = "23505"


def sqlstate(error: Exception) -> str | None:
    """Return PostgreSQL's code for an error of Django's: psycopg 3 calls it
    ``sqlstate``, psycopg2 ``pgcode``.
    """
    driver = error.__cause__
    code: str | None = getattr(driver, "sqlstate", None) or getattr(
        driver, "pgcode", None
    )
    return code


# These say which violations of constraints don't come from a record but from what a
# wing does to it.
meanings: Registry[Callable[[IntegrityError], StoreUnavailable | None]] = Registry()


# a generator would cost more than everything else around a statement
class store_errors:
    """Turn the database's own failures inside the block into ``StoreUnavailable``."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if isinstance(error, Exception) and (failure := _as_failure(error)) is not None:
            raise failure from error


def _as_failure(error: Exception) -> StoreUnavailable | None:
    """Return what an error means for callers of a store; ``None`` if it is not one of
    the database's own failures.
    """
    match error:
        case OperationalError() | InterfaceError():
            return _kind(error)(str(error).strip())
        case IntegrityError():
            return next(filter(None, (meaning(error) for meaning in meanings)), None)
        # psycopg and libpq also raise errors of their own, which Django does not wrap
        case _:
            return StoreUnavailable(str(error).strip()) if _is_stale(error) else None


def _is_stale(error: Exception) -> bool:
    return (
        sqlstate(error) in STALE_STATES or next(iter(error.args), None) == OUT_OF_SYNC
    )


def _kind(error: Exception) -> type[StoreUnavailable]:
    if is_conflict(error):
        return StoreConflict
    return (
        StoreRefused
        if _says(error, TOO_LONG_STATES, TOO_LONG_NUMBERS)
        else StoreUnavailable
    )


def is_conflict(error: Exception) -> bool:
    """Whether ``error`` says that another transaction was in the way."""
    is_sqlites = getattr(error.__cause__, "sqlite_errorname", "").startswith(
        ("SQLITE_BUSY", "SQLITE_LOCKED")
    )
    return is_sqlites or _says(error, CONFLICT_STATES, CONFLICT_NUMBERS)


def is_missing_savepoint(error: Exception) -> bool:
    """Whether ``error`` says that a savepoint is gone, and with it the transaction in
    which it was made.
    """
    return _says(
        error, MISSING_SAVEPOINT_STATES, MISSING_SAVEPOINT_NUMBERS
    ) or "no such savepoint" in str(error)


def _says(error: Exception, states: Sequence[str], numbers: Sequence[int]) -> bool:
    return sqlstate(error) in states or next(iter(error.args), None) in numbers


def brief(error: Exception) -> str:
    """What a database said, without the details, which may quote a row."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
