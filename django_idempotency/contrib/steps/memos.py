"""The memos of one operation: which of its steps are done, and their results.

A memo is the fence, too. It is inserted from the record, found by its id and token,
whose row stays locked until COMMIT. Once another attempt has taken over, there is no
such row: the statement fails, and so does the transaction that it was to end.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeGuard

from django.core.exceptions import ImproperlyConfigured
from django.db import DataError

from django_idempotency import ClaimLost, StoreUnavailable
from django_idempotency.contrib.steps.models import Step
from django_idempotency.contrib.steps.values import StepError
from django_idempotency.extending import FOR_GOOD
from django_idempotency.extending.operators import is_sharded
from django_idempotency.extending.stores import (
    TRANSACTION,
    Binding,
    IdempotencyRecord,
    PostgreSQLStore,
    Store,
    StoredResponse,
    TransactionEnded,
    decoded,
    encrypted,
    execute,
    sqlstate,
    store_errors,
)

if TYPE_CHECKING:
    from django_idempotency.messages import Context

RECORD, STEP = IdempotencyRecord._meta.db_table, Step._meta.db_table
OWN = (
    f"SELECT id, created_at FROM {RECORD} WHERE id = %s AND token = %s"
    " FOR NO KEY UPDATE"
)
# The first memo: an operation that is half done must not expire, because its next life
# would do its steps again.
KEPT = f"""
UPDATE {RECORD} SET expires_at = statement_timestamp() + interval '{FOR_GOOD} s',
    purge_at = statement_timestamp() + interval '{FOR_GOOD} s'
WHERE id = %s AND token = %s RETURNING id, created_at
"""
# Without a row, this asks for the square root of -1, an error with a code of its own.
WRITE = f"""
WITH own AS ({{own}}), written AS (
    INSERT INTO {STEP} (record_id, generation, name, token, attempt, started_at,
        finished_at, headers, result)
    SELECT id, created_at, %s::text, %s::uuid, %s::int,
        statement_timestamp() - %s::float8 * interval '1 s',
        CASE WHEN %s::bool THEN statement_timestamp() END, %s::jsonb, %s::bytea
    FROM own
    ON CONFLICT (record_id, generation, name) DO UPDATE SET token = EXCLUDED.token,
        attempt = EXCLUDED.attempt, finished_at = EXCLUDED.finished_at,
        headers = EXCLUDED.headers, result = EXCLUDED.result
    WHERE {STEP}.finished_at IS NULL OR {STEP}.token = EXCLUDED.token
    RETURNING 1
)
SELECT sqrt(count(*) - 1){{also}} FROM written
"""
CLAIM_LOST, OTHER_TRANSACTION = "2201F", "22012"
OWN_TRANSACTION = f"SELECT {TRANSACTION}"
# division by zero, if code has ended the transaction without Django knowing
SAME = f", 1 / ({TRANSACTION} = %s)::int"
# If the server loses the memo of a call, the call is repeated with its own key. The
# next synchronous commit flushes the log in order, and this memo with it.
LATER = ", set_config('synchronous_commit', 'off', true)"
LOAD = f"""
SELECT record.created_at, step.name, step.finished_at IS NOT NULL, step.headers::text,
    step.result, coalesce(step.optional, false)
FROM {RECORD} AS record LEFT JOIN {STEP} AS step
    ON step.record_id = record.id AND step.generation = record.created_at
WHERE record.id = %s AND record.token = %s
"""
# Once the row is free, the server is done with the transaction that had it locked.
IS_WRITTEN = f"""
WITH own AS ({OWN})
SELECT EXISTS (SELECT FROM {STEP} JOIN own ON record_id = id
    AND generation = created_at WHERE name = %s AND token = %s)
FROM own
"""


@dataclass(frozen=True, slots=True)
class Memo:
    """``is_done``: false if the step was begun, may run at most once, and was
    interrupted. ``result``: JSON; ``None`` if it can't be read. ``optional``: as
    ``Step`` has it.
    """

    is_done: bool
    result: bytes | None
    optional: bool


def is_fit(store: Store) -> TypeGuard[PostgreSQLStore]:
    return isinstance(store, PostgreSQLStore) and not is_sharded(store.name)


class Memos:
    """Reads and writes the memos of the operation that ``context`` runs."""

    def __init__(self, context: Context) -> None:
        store = context.store
        if not is_fit(store):
            raise ImproperlyConfigured(
                f"Steps can't be kept beside a record in the store {store.name!r}: a"
                " step's effects and its memo have to be committed together. Keep the"
                " records of this policy in the effects' PostgreSQL database."
            )
        self.store = store
        self.policy = context.policy
        self.claim = context.claim
        self.is_kept = False  # whether the record is kept for good

    @cached_property
    def generation(self) -> datetime:
        """When the record was made, or began anew."""
        created = self.store.created_at(self.claim)
        if created is None:
            record = self.store.read(self.claim.id)
            if record is None:
                raise ClaimLost
            created = record.created_at
        return created

    def load(self) -> dict[str, Memo]:
        """Return the memos of earlier attempts. Raises ``ClaimLost``."""
        if self.claim.attempt == 1:
            return {}
        with store_errors(), self.store.connection.cursor() as cursor:
            cursor.execute(LOAD, (self.claim.id, self.claim.token))
            rows = cursor.fetchall()
        if not rows:
            raise ClaimLost
        self.generation = rows[0][0]
        found = {
            name: Memo(is_done, self._opened(name, headers, result), optional)
            for _created, name, is_done, headers, result, optional in rows
            if name is not None
        }
        self.is_kept = bool(found)
        return found

    def _opened(self, name: str, headers: str, result: Any) -> bytes | None:
        stored = StoredResponse.of(200, json.loads(headers), result)
        return decoded(stored, self._binding(name)).body

    def _sealed(self, name: str, result: bytes | None) -> StoredResponse:
        plain = StoredResponse(200, (), result)
        if result is None or not self.policy.body.encrypt:
            return plain
        if (stored := encrypted(plain, self._binding(name))) is None:
            raise StepError(
                f"The result of the step {name!r} can't be encrypted; the log says why."
            )
        return stored

    def _binding(self, name: str) -> Binding:
        of = self.claim.operation
        return binding(of.id, self.generation, name, of.view)

    def memo(
        self,
        name: str,
        result: bytes | None,
        *,
        seconds: float = 0,
        transaction: Any = None,
    ) -> tuple[str, tuple[Any, ...]]:
        """Return the statement that writes a memo: that the step has begun, or with a
        ``result`` that it is done.

        ``transaction``: fail in any other one. Without it, the COMMIT of a result does
        not wait for the disk.
        """
        claim, stored, is_done = (
            self.claim,
            self._sealed(name, result),
            result is not None,
        )
        also = SAME if transaction else LATER if is_done else ""
        own = OWN if self.is_kept else KEPT
        return WRITE.format(own=own, also=also), (
            claim.id,
            claim.token,
            name,
            claim.token,
            claim.attempt,
            seconds,
            is_done,
            json.dumps(stored.headers),
            stored.body,
            *([transaction] if transaction else []),
        )

    def write(self, name: str, result: bytes | None, *, seconds: float = 0) -> None:
        """Write a memo outside of a transaction. Raises ``ClaimLost``."""
        memo = self.memo(name, result, seconds=seconds)
        try:
            self._execute(*memo)
        except StoreUnavailable:
            # a connection that was idle during a long call may be broken
            if not self.store.reconnect():
                raise
            self._execute(*memo)
        self.is_kept = True

    def _execute(self, statement: str, values: tuple[Any, ...]) -> Any:
        with meaning(), store_errors():
            return execute(statement, values, self.store.connection).row

    def number(self) -> Any:
        """Begin the transaction that is due, and return its number."""
        return self._execute(OWN_TRANSACTION, ())[0]

    def is_written(self, name: str) -> bool:
        """Return whether this attempt has written the memo. Raises ``ClaimLost``, and
        ``StoreUnavailable`` if nobody can tell.
        """
        claim = self.claim
        values = (claim.id, claim.token, name, claim.token)
        self.store.reconnect()
        row = self._execute(IS_WRITTEN, values)
        if row is None:
            raise ClaimLost
        return bool(row[0])


def binding(id: Any, generation: datetime, name: str, view: str = "") -> Binding:
    """Return what a memo's encrypted result is bound to."""
    return Binding(id, "step", name, id.bytes, generation, view)


class meaning:
    """Raise what the codes of the memos' own errors mean, instead of these errors."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: object, _traceback: object) -> None:
        code = sqlstate(error) if isinstance(error, DataError) else None
        if code == CLAIM_LOST:
            raise ClaimLost from error  # type: ignore[misc]
        if code == OTHER_TRANSACTION:
            raise TransactionEnded from error  # type: ignore[misc]
