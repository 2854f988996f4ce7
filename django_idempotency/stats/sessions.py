"""What the database's own views say about its sessions and about claims by lock, which no table shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from django.db import DatabaseError, OperationalError, connections, transaction

from django_idempotency.stores.claim_function import LOCK_HOLDERS
from django_idempotency.stores.connections import record_database

COUNT = f"""
SELECT
    count(*),
    CASE count(*) WHEN 0 THEN 0 ELSE max(extract(epoch FROM statement_timestamp() - session.xact_start)) END::float8
{LOCK_HOLDERS}
"""


@dataclass(frozen=True)
class ByLock:
    """Runs in progress whose claims are locks; ``None`` if the database does not say.

    ``pending_by_lock_oldest``: seconds since the first of their transactions began, among those that this role may see.
    """

    pending_by_lock: int | None = None
    pending_by_lock_oldest: float | None = None


def by_lock(*, using: str | None = None) -> ByLock:
    """Count PostgreSQL sessions with such a lock. ``using``: alias of the database; that of the settings by default."""
    found = ask_postgresql(COUNT, [], using=record_database(using))
    return ByLock(*found[0]) if found else ByLock()


def ask_postgresql(statement: str, parameters: Sequence[Any], *, using: str) -> list[tuple[Any, ...]] | None:
    """Return the rows; ``None`` if the database is not PostgreSQL, or if the statement fails.

    It may fail in a database that only speaks PostgreSQL's protocol, or that refuses access to a view. Raises
    ``OperationalError`` if the statement took too long or the connection was lost.
    """
    if connections[using].vendor != "postgresql":
        return None
    try:
        with transaction.atomic(using=using), connections[using].cursor() as cursor:
            cursor.execute(statement, parameters)
            return list(cursor.fetchall())
    except OperationalError:  # too slow, or the connection was lost
        raise
    except DatabaseError:
        return None
