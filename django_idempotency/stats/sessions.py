"""What the database's own views tell of its sessions, and of claims that are locks, which no table shows."""

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
    CASE count(*) WHEN 0 THEN 0 ELSE max(extract(epoch FROM statement_timestamp() - session.xact_start)) END
{LOCK_HOLDERS}
"""


@dataclass(frozen=True, kw_only=True)
class ByLock:
    """Runs in progress whose claims are locks; ``None`` where the database does not tell.

    ``pending_by_lock_oldest``: seconds since the first of their transactions began, of those that this role may see.
    """

    pending_by_lock: int | None = None
    pending_by_lock_oldest: float | None = None


def by_lock(*, using: str | None = None) -> ByLock:
    """Count the sessions of PostgreSQL that have such a lock. ``using``: the database's alias, or the settings'."""
    found = ask_postgresql(COUNT, [], using=record_database(using))
    if not found:
        return ByLock()
    ((count, oldest),) = found
    return ByLock(pending_by_lock=count, pending_by_lock_oldest=None if oldest is None else float(oldest))


def ask_postgresql(statement: str, parameters: Sequence[Any], *, using: str) -> list[tuple[Any, ...]] | None:
    """Return the rows; ``None`` from a database that only speaks PostgreSQL's protocol, or that refuses a view."""
    if connections[using].vendor != "postgresql":
        return None
    try:
        with transaction.atomic(using=using), connections[using].cursor() as cursor:
            cursor.execute(statement, parameters)
            return list(cursor.fetchall())
    except OperationalError:  # not in time, or the connection is lost
        raise
    except DatabaseError:
        return None
