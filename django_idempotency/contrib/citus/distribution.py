"""Tells the core whether Citus distributes the records by ``id``, and in which shards they are."""

from __future__ import annotations

from collections.abc import Collection
from uuid import UUID

from django.db import NotSupportedError, ProgrammingError, connections

from django_idempotency.models import IdempotencyRecord
from django_idempotency.stores.transactions import Transaction

TABLE = IdempotencyRecord._meta.db_table

ANY_ROWS = f"SELECT id FROM {TABLE} LIMIT 0 FOR NO KEY UPDATE"
# Always in the same order, so that two callers that lock these groups can't wait for each other.
BY_SHARD = f"""
SELECT array_agg(id ORDER BY id) FROM (
    SELECT id, get_shard_id_for_distribution_column('{TABLE}', id) AS shard FROM unnest(%s::uuid[]) AS id
) AS placed GROUP BY shard ORDER BY shard
"""

_distributed: dict[str, bool] = {}


def is_distributed(using: str) -> bool:
    """Return whether the rows are on several servers, so that no statement can lock arbitrary ones.

    Each process tries this once. False if there is no such table. Raises Django's ``OperationalError`` if the database
    can't be reached.
    """
    if using not in _distributed:
        _distributed[using] = connections[using].vendor == "postgresql" and not _locks_any(using)
    return _distributed[using]


def _locks_any(using: str) -> bool:
    try:
        with Transaction(using), connections[using].cursor() as cursor:
            cursor.execute(ANY_ROWS)
    except NotSupportedError:
        return False
    except ProgrammingError:  # no such table, or not for this role
        return True
    return True


def in_shards(ids: Collection[UUID], using: str) -> list[list[UUID]]:
    """Return ``ids`` in groups, each of which one statement can lock."""
    with connections[using].cursor() as cursor:
        cursor.execute(BY_SHARD, [list(ids)])
        return [found for (found,) in cursor.fetchall()]
