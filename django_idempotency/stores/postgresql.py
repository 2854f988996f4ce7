"""Records in PostgreSQL: the statements of every request, written out so that each is one round trip.

What happens rarely (taking over, holding) is the portable store's.
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any, Self
from uuid import UUID
from weakref import WeakKeyDictionary

import psycopg
from django.db import IntegrityError, connections, transaction
from django.db.backends.utils import CursorWrapper

from django_idempotency.exceptions import StoreConflict
from django_idempotency.models import IdempotencyRecord, Status
from django_idempotency.outcomes import Claimed, Operation, StoredResponse
from django_idempotency.policy import Policy
from django_idempotency.stores.base import Seen
from django_idempotency.stores.database import (
    DatabaseStore,
    alias,
    holds_on_crash,
    snapshot,
    store_errors,
)

TABLE = IdempotencyRecord._meta.db_table

# One call, one row, whatever is there: the new record, or the old one with the database's time and whether its row lock
# is free. The function is in claim_function.py. With it comes the number of the server's process, which tells whether a
# pooler stands between.
CLAIM = """
SELECT pg_backend_pid(), * FROM django_idempotency_claim(
    %s, %s, %s, %s, %s, %s, %s,
    '{mode}', {hold}, interval '{lease} s', interval '{retention} s', interval '{kept} s'
)
"""

# By id and token, and the time of creation where it is known, which leads to the partition. Not by the status:
# PostgreSQL would walk the partial index of all live rows.
LOCK = f"SELECT 1 FROM {TABLE} WHERE id = %s AND token = %s{{created}} FOR NO KEY UPDATE"

COMPLETE = f"""
UPDATE {TABLE} SET
    status = %s, token = NULL, locked_at = NULL, locked_until = NULL, updated_at = statement_timestamp(),
    expires_at = statement_timestamp() + interval '{{retention}} s',
    purge_at = statement_timestamp() + interval '{{kept}} s',
    response_status = %s, response_headers = %s, response_body = %s
WHERE id = %s AND token = %s{{created}}
"""

COUNT_REPLAYS = f"""
UPDATE {TABLE} SET replays = replays + seen.count, last_replayed_at = statement_timestamp()
FROM unnest(%s::uuid[], %s::bigint[]) AS seen (id, count) WHERE {TABLE}.id = seen.id
"""


def stated(statement: str, policy: Policy, *, created: bool = False) -> str:
    """``statement`` with what the policy settles written out: fewer parameters to convert on every request."""
    lease, retention, kept = (repr(float(seconds)) for seconds in (policy.lease, policy.retention, policy.kept_for))
    return _stated(statement, str(policy.mode), holds_on_crash(policy), lease, retention, kept, created)


@lru_cache(maxsize=1024)
def _stated(statement: str, mode: str, hold: bool, lease: str, retention: str, kept: str, created: bool) -> str:
    known = " AND created_at = %s" if created else ""
    return statement.format(mode=mode, hold=hold, lease=lease, retention=retention, kept=kept, created=known)


class PreparedCursor(psycopg.Cursor[Any]):
    """A cursor whose statements are prepared at their first execution, whatever the connection's threshold."""

    def execute(self, query: Any, params: Any = None, **options: Any) -> Self:
        threshold = self.connection.prepare_threshold
        self.connection.prepare_threshold = 0
        try:
            return super().execute(query, params, **options)
        finally:
            self.connection.prepare_threshold = threshold


# How many claims on a connection were answered by the very process that it was opened to: no pooler stands between.
# One that serves a single request does not reach the threshold.
_direct: WeakKeyDictionary[psycopg.Connection[Any], int] = WeakKeyDictionary()
THRESHOLD = 2


def _cursor(policy: Policy) -> CursorWrapper:
    """Django's cursor; one that prepares, where that is safe.

    Prepared, our statements cost the server half. Behind a pooler in transaction mode they must not be: the next
    transaction may have another process. A ``prepare_threshold`` in the database's ``OPTIONS`` decides, if stated.
    """
    connection: Any = connections[alias(policy)]
    connection.close_if_health_check_failed()
    connection.ensure_connection()
    inner = connection.connection
    stated = "prepare_threshold" in connection.settings_dict["OPTIONS"]
    if inner.prepare_threshold is not None if stated else _direct.get(inner) == THRESHOLD:
        return connection._prepare_cursor(PreparedCursor(inner))  # type: ignore[no-any-return]
    return connection.cursor()  # type: ignore[no-any-return]


class PostgreSQLStore(DatabaseStore):
    def claim(self, operation: Operation, token: UUID, policy: Policy) -> Claimed | Seen | None:
        who = (operation.id, operation.scope, operation.key)
        what = (operation.method, operation.path, operation.fingerprint)
        try:
            process, created, free, *old = self._ask(stated(CLAIM, policy), (*who, *what, token), policy)
        except IntegrityError as error:
            if not isinstance(error.__cause__, psycopg.errors.UniqueViolation):
                raise
            return None  # a record that was made without the function's lock
        self._learn(process, policy)
        if created:
            return Claimed(operation, token, created=created)
        return Seen(snapshot(old), busy=free is False)  # NULL where nobody tried

    def _ask(self, statement: str, values: Any, policy: Policy) -> Any:
        if row := self._fetch(statement, values, policy):
            return row
        with store_errors(), transaction.atomic(using=alias(policy), durable=True):
            with _cursor(policy) as cursor:
                cursor.execute("SET TRANSACTION ISOLATION LEVEL READ COMMITTED")
            return self._fetch(statement, values, policy)

    @staticmethod
    def _learn(process: int, policy: Policy) -> None:
        connection = connections[alias(policy)].connection
        claims = _direct.get(connection, 0)
        if connection.info.backend_pid != process:
            _direct.pop(connection, None)
        elif claims < THRESHOLD:
            _direct[connection] = claims + 1

    def lock(self, claim: Claimed, policy: Policy) -> bool:
        try:
            return self._fetch(*_held(LOCK, claim, policy), policy) is not None
        except StoreConflict:
            return False

    def complete(self, claim: Claimed, response: StoredResponse, policy: Policy, *, failure: bool = False) -> bool:
        status = Status.FAILED if failure else Status.COMPLETED
        statement, whose = _held(COMPLETE, claim, policy)
        answer = (status.value, response.status, json.dumps(response.headers), response.body)
        with store_errors(), _cursor(policy) as cursor:
            cursor.execute(statement, (*answer, *whose))
            return bool(cursor.rowcount == 1)

    def count_replays(self, counts: dict[UUID, int], policy: Policy) -> None:
        with store_errors(), connections[alias(policy)].cursor() as cursor:
            cursor.execute(COUNT_REPLAYS, (list(counts), list(counts.values())))

    @staticmethod
    def _fetch(statement: str, values: Any, policy: Policy) -> Any:
        with store_errors(), _cursor(policy) as cursor:
            cursor.execute(statement, values)
            return cursor.fetchone()


def _held(statement: str, claim: Claimed, policy: Policy) -> tuple[str, tuple[Any, ...]]:
    """``statement`` about the record that ``claim`` holds, with its last parameters."""
    created = () if claim.created is None else (claim.created,)
    return stated(statement, policy, created=bool(created)), (claim.id, claim.token, *created)
