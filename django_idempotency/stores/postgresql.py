"""Records in PostgreSQL: the statements of every request, written out so that each is one round trip.

What happens rarely (taking over, holding) is the portable store's.
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any, Self
from uuid import UUID

import psycopg
from django.db import connections
from django.db.backends.utils import CursorWrapper

from django_idempotency.exceptions import StoreConflict
from django_idempotency.models import IdempotencyRecord, Status
from django_idempotency.outcomes import Claimed, Operation, StoredResponse
from django_idempotency.policy import Mode, Policy
from django_idempotency.stores.base import Seen
from django_idempotency.stores.database import (
    COLUMNS,
    DatabaseStore,
    alias,
    holds_on_crash,
    snapshot,
    store_errors,
)

TABLE = IdempotencyRecord._meta.db_table

# One statement, one row, whatever is there: the new record, or the old one with the database's time and whether its
# row lock is free. The lock is only tried where its holder's life depends on it, and ends with the statement; the
# token says so, because with the status named PostgreSQL would walk the partial index of all live rows.
# A claim in atomic mode commits asynchronously: the completing commit is synchronous and WAL is a prefix, so a claim
# lost in a crash of the server was never completed.
# https://www.postgresql.org/docs/current/wal-async-commit.html
CLAIM = f"""
WITH fresh AS (
    INSERT INTO {TABLE} (
        id, scope, key, method, path, fingerprint, mode, hold_on_crash, created_at,
        status, token, locked_at, locked_until, updated_at, expires_at, purge_at
    )
    VALUES (
        %s, %s, %s, %s, %s, %s, '{{mode}}', {{hold}}, statement_timestamp(),
        'processing', %s, statement_timestamp(), statement_timestamp() + interval '{{lease}} s', statement_timestamp(),
        statement_timestamp() + interval '{{retention}} s', statement_timestamp() + interval '{{kept}} s'
    )
    ON CONFLICT (id) DO NOTHING
    RETURNING {{returning}}
), free AS (
    SELECT id FROM {TABLE}
    WHERE id = %s AND token IS NOT NULL AND mode = 'atomic' AND fingerprint = %s
    FOR NO KEY UPDATE SKIP LOCKED
)
SELECT EXISTS (SELECT FROM fresh), EXISTS (SELECT FROM free), {", ".join(f"old.{name}" for name in COLUMNS)},
    statement_timestamp()
FROM (VALUES (1)) AS one LEFT JOIN {TABLE} AS old ON old.id = %s
"""

ASYNCHRONOUSLY = "set_config('synchronous_commit', 'off', true)"

LOCK = f"SELECT 1 FROM {TABLE} WHERE id = %s AND token = %s FOR NO KEY UPDATE"

# By id and token only: with the status named here, PostgreSQL would walk the partial index of all live rows.
COMPLETE = f"""
UPDATE {TABLE} SET
    status = %s, token = NULL, locked_at = NULL, locked_until = NULL, updated_at = statement_timestamp(),
    expires_at = statement_timestamp() + interval '{{retention}} s',
    purge_at = statement_timestamp() + interval '{{kept}} s',
    response_status = %s, response_headers = %s, response_body = %s
WHERE id = %s AND token = %s
"""

COUNT_REPLAYS = f"""
UPDATE {TABLE} SET replays = replays + seen.count, last_replayed_at = statement_timestamp()
FROM unnest(%s::uuid[], %s::bigint[]) AS seen (id, count) WHERE {TABLE}.id = seen.id
"""


def stated(statement: str, policy: Policy) -> str:
    """``statement`` with what the policy settles written out: fewer parameters to convert on every request."""
    lease, retention, kept = (repr(float(seconds)) for seconds in (policy.lease, policy.retention, policy.kept_for))
    return _stated(statement, str(policy.mode), holds_on_crash(policy), lease, retention, kept)


@lru_cache(maxsize=1024)
def _stated(statement: str, mode: str, hold: bool, lease: str, retention: str, kept: str) -> str:
    returning = ASYNCHRONOUSLY if mode == Mode.ATOMIC else "1"
    return statement.format(returning=returning, mode=mode, hold=hold, lease=lease, retention=retention, kept=kept)


class PreparedCursor(psycopg.Cursor[Any]):
    """A cursor whose statements are prepared at their first execution, whatever the connection's threshold."""

    def execute(self, query: Any, params: Any = None, **options: Any) -> Self:
        return super().execute(query, params, **options | {"prepare": True})


def _cursor(policy: Policy) -> CursorWrapper:
    """Django's cursor; one that prepares, where the database's ``OPTIONS`` allow it by a ``prepare_threshold``.

    Prepared, our statements cost the server a third. Behind a pooler in transaction mode they must not be.
    """
    connection: Any = connections[alias(policy)]
    connection.close_if_health_check_failed()
    connection.ensure_connection()
    if connection.connection.prepare_threshold is None:
        return connection.cursor()  # type: ignore[no-any-return]
    return connection._prepare_cursor(PreparedCursor(connection.connection))  # type: ignore[no-any-return]


class PostgreSQLStore(DatabaseStore):
    def claim(self, operation: Operation, token: UUID, policy: Policy) -> Claimed | Seen | None:
        id, fingerprint = operation.id, operation.fingerprint
        new = (id, operation.scope, operation.key, operation.method, operation.path, fingerprint, token)
        try:
            fresh, free, *old = self._fetch(stated(CLAIM, policy), (*new, id, fingerprint, id), policy)
        except StoreConflict:
            return None
        if fresh:
            return Claimed(operation, token)
        if old[0] is None:
            return None
        record = snapshot(old)
        contended = record.status == Status.PROCESSING and record.mode == Mode.ATOMIC
        return Seen(record, busy=contended and not free and record.fingerprint == fingerprint)

    def lock(self, claim: Claimed, policy: Policy) -> bool:
        try:
            return self._fetch(LOCK, (claim.id, claim.token), policy) is not None
        except StoreConflict:
            return False

    def complete(self, claim: Claimed, response: StoredResponse, policy: Policy, *, failure: bool = False) -> bool:
        status = Status.FAILED if failure else Status.COMPLETED
        values: tuple[Any, ...] = (
            status.value,
            response.status,
            json.dumps(response.headers),
            response.body,
            claim.id,
            claim.token,
        )
        with store_errors(), _cursor(policy) as cursor:
            cursor.execute(stated(COMPLETE, policy), values)
            return bool(cursor.rowcount == 1)

    def count_replays(self, counts: dict[UUID, int], policy: Policy) -> None:
        with store_errors(), connections[alias(policy)].cursor() as cursor:
            cursor.execute(COUNT_REPLAYS, (list(counts), list(counts.values())))

    @staticmethod
    def _fetch(statement: str, values: Any, policy: Policy) -> Any:
        with store_errors(), _cursor(policy) as cursor:
            cursor.execute(statement, values)
            return cursor.fetchone()
