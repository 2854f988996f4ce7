"""Errors of databases, by their codes: which mean that the store is away, and which that another session blocked it."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from django.db import IntegrityError, InterfaceError, InternalError, OperationalError, ProgrammingError

from django_idempotency.exceptions import StoreConflict, StoreRefused, StoreUnavailable
from django_idempotency.logs import cause, log

# The CHECKs of partitioning: of a table before it becomes the first partition, and of a partition that is to go.
UNTIL, RETIRED = "idempotency_record_until", "idempotency_record_retired"
NO_PARTITION = "There is no partition for a new record. Run manage.py idempotency_partitions ensure, and schedule it."

# PostgreSQL, where another connection may help: a server that only reads, such as the primary before a failover; a
# transaction that was idle, or lasted, for too long; a prepared statement that is gone, because a pool sent
# DISCARD ALL or DEALLOCATE ALL; and a table that was dropped while the claim's function was compiled, which waited for
# it: "could not open relation with OID …", an internal error.
STALE_STATES = ("25006", "25P03", "25P04", "26000", "XX000")
# MariaDB and MySQL: a connection that an exception left in the middle of a statement. The driver itself raises this, in
# closing a cursor, where Django translates no errors.
OUT_OF_SYNC = 2014
# PostgreSQL: lock not available, serialization failure, deadlock.
CONFLICT_STATES = ("55P03", "40001", "40P01")
# MariaDB and MySQL: lock wait timeout, deadlock, record changed since last read, lock not available.
CONFLICT_NUMBERS = (1205, 1213, 1020, 3572)
# A limit of the database's own on how long a statement may take; or it was cancelled.
TOO_LONG_STATES, TOO_LONG_NUMBERS = ("57014",), (1969, 1317, 3024)

# PostgreSQL: savepoint does not exist, no transaction. MariaDB: savepoint does not exist.
MISSING_SAVEPOINT_STATES, MISSING_SAVEPOINT_NUMBERS = ("3B001", "25P01"), (1305,)


UNIQUE_VIOLATION, CHECK_VIOLATION = "23505", "23514"


def sqlstate(error: Exception) -> str | None:
    """Return PostgreSQL's code for an error of Django's: psycopg 3 calls it ``sqlstate``, psycopg2 ``pgcode``."""
    driver = error.__cause__
    code: str | None = getattr(driver, "sqlstate", None) or getattr(driver, "pgcode", None)
    return code


@contextmanager
def store_errors() -> Iterator[None]:
    """Turn the database's own failures into ``StoreUnavailable``."""
    try:
        yield
    except (OperationalError, InterfaceError) as error:
        raise _kind(error)(str(error).strip()) from error
    except (InternalError, ProgrammingError) as error:
        if not _is_stale(error):
            raise
        raise StoreUnavailable(str(error).strip()) from error
    except IntegrityError as error:
        violated = _violated_check(error)
        if violated == RETIRED:  # a statement as old as what is being dropped: the next one goes elsewhere
            raise StoreConflict(str(error).strip()) from error
        if violated in ("", UNTIL):
            log(logging.CRITICAL, "no_partition", "%s (%s)", NO_PARTITION, cause(error))
            raise StoreRefused(NO_PARTITION) from error
        raise
    except Exception as error:  # psycopg and libpq raise their own, which Django does not wrap
        if not _is_stale(error):
            raise
        raise StoreUnavailable(str(error).strip()) from error


def _is_stale(error: Exception) -> bool:
    return sqlstate(error) in STALE_STATES or next(iter(error.args), None) == OUT_OF_SYNC


def _kind(error: Exception) -> type[StoreUnavailable]:
    if is_conflict(error):
        return StoreConflict
    return StoreRefused if _says(error, TOO_LONG_STATES, TOO_LONG_NUMBERS) else StoreUnavailable


def _violated_check(error: IntegrityError) -> str | None:
    """The name of a CHECK in PostgreSQL; empty where there was no partition for a row, which counts as one.

    ``None`` for one that is not named, nor its table: another server passed the error on, as Citus does for its own.
    """
    driver: Any = error.__cause__
    if sqlstate(error) != CHECK_VIOLATION:
        return None
    return driver.diag.constraint_name or ("" if driver.diag.table_name else None)


def is_conflict(error: Exception) -> bool:
    """Whether ``error`` says that another transaction was in the way."""
    is_sqlites = getattr(error.__cause__, "sqlite_errorname", "").startswith(("SQLITE_BUSY", "SQLITE_LOCKED"))
    return is_sqlites or _says(error, CONFLICT_STATES, CONFLICT_NUMBERS)


def is_missing_savepoint(error: Exception) -> bool:
    """Whether ``error`` says that a savepoint is gone, and with it the transaction in which it was made."""
    return _says(error, MISSING_SAVEPOINT_STATES, MISSING_SAVEPOINT_NUMBERS) or "no such savepoint" in str(error)


def _says(error: Exception, states: Sequence[str], numbers: Sequence[int]) -> bool:
    return sqlstate(error) in states or next(iter(error.args), None) in numbers


def told(error: Exception) -> str:
    """What a database said, without the details, which may quote a row."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
