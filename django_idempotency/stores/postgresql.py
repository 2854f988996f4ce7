"""Records in PostgreSQL: the statements of every request, written out so that each is one round trip.

What happens rarely (taking over, holding) is the portable store's.
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any
from uuid import UUID

import psycopg
from django.db import IntegrityError, connections, transaction

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
from django_idempotency.stores.prepared import execute, learn

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
# PostgreSQL would walk the partial index of all live rows. And first by the place where the claim put the row: that
# reads no index, in whose pages serializable transactions with different keys would meet.
LOCK = f"SELECT 1 FROM {TABLE} WHERE id = %s AND token = %s{{known}} FOR NO KEY UPDATE"

COMPLETE = f"""
UPDATE {TABLE} SET
    status = %s, token = NULL, locked_at = NULL, locked_until = NULL, updated_at = statement_timestamp(),
    expires_at = statement_timestamp() + interval '{{retention}} s',
    purge_at = statement_timestamp() + interval '{{kept}} s',
    response_status = %s, response_headers = %s, response_body = %s
WHERE id = %s AND token = %s{{known}}
"""

COUNT_REPLAYS = f"""
UPDATE {TABLE} SET replays = replays + seen.count, last_replayed_at = statement_timestamp()
FROM unnest(%s::uuid[], %s::bigint[]) AS seen (id, count) WHERE {TABLE}.id = seen.id
"""


def stated(statement: str, policy: Policy, *known: str) -> str:
    """``statement`` with what the policy settles written out: fewer parameters to convert on every request.

    ``known``: columns that are to be equal to further parameters.
    """
    lease, retention, kept = (repr(float(seconds)) for seconds in (policy.lease, policy.retention, policy.kept_for))
    return _stated(statement, str(policy.mode), holds_on_crash(policy), lease, retention, kept, known)


@lru_cache(maxsize=1024)
def _stated(
    statement: str, mode: str, hold: bool, lease: str, retention: str, kept: str, columns: tuple[str, ...]
) -> str:
    known = "".join(f" AND {column} = %s" for column in columns)
    return statement.format(mode=mode, hold=hold, lease=lease, retention=retention, kept=kept, known=known)


class PostgreSQLStore(DatabaseStore):
    def claim(self, operation: Operation, token: UUID, policy: Policy) -> Claimed | Seen | None:
        who = (operation.id, operation.scope, operation.key)
        what = (operation.method, operation.path, operation.fingerprint)
        try:
            process, created, place, free, *old = self._ask(stated(CLAIM, policy), (*who, *what, token), policy)
        except IntegrityError as error:
            if not isinstance(error.__cause__, psycopg.errors.UniqueViolation):
                raise
            return None  # a record that was made without the function's lock
        learn(process, alias(policy))
        if created:
            return Claimed(operation, token, created=created, place=place)
        return Seen(snapshot(old), busy=free is False)  # NULL where nobody tried

    @staticmethod
    def _ask(statement: str, values: Any, policy: Policy) -> Any:
        using = alias(policy)
        with store_errors():
            if row := execute(statement, values, using).row:
                return row
            with transaction.atomic(using=using):
                with connections[using].cursor() as cursor:
                    cursor.execute("SET TRANSACTION ISOLATION LEVEL READ COMMITTED")
                return execute(statement, values, using).row

    def lock(self, claim: Claimed, policy: Policy) -> bool:
        try:
            return self._held(LOCK, (), claim, policy)
        except StoreConflict:
            return False

    def complete(self, claim: Claimed, response: StoredResponse, policy: Policy, *, failure: bool = False) -> bool:
        status = Status.FAILED if failure else Status.COMPLETED
        answer = (status.value, response.status, json.dumps(response.headers), response.body)
        return self._held(COMPLETE, answer, claim, policy)

    def count_replays(self, counts: dict[UUID, int], policy: Policy) -> None:
        with store_errors(), connections[alias(policy)].cursor() as cursor:
            cursor.execute(COUNT_REPLAYS, (list(counts), list(counts.values())))

    @staticmethod
    def _held(statement: str, values: tuple[Any, ...], claim: Claimed, policy: Policy) -> bool:
        """Whether ``statement`` met the record, still held by ``claim``: at its place, or where a write put it."""
        created = {"created_at": claim.created} if claim.created else {}
        with store_errors():
            for known in [{"ctid": claim.place, **created}, created] if claim.place else [created]:
                held = (*values, claim.id, claim.token, *known.values())
                if execute(stated(statement, policy, *known), held, alias(policy)).rows:
                    return True
        return False
