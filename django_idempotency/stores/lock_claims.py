"""Claims by lock, on PostgreSQL: nothing is written before the end, and the record is inserted finished.

The business transaction takes the locks of the key in its first statement, and holds them until it ends. A key that
already has a record, from any kind of claim, is left to claims by record.
"""

from __future__ import annotations

import json
import logging
import math
import time
from contextlib import ExitStack
from dataclasses import replace
from uuid import UUID

from django.db import IntegrityError, ProgrammingError
from django.db.backends.base.base import BaseDatabaseWrapper

from django_idempotency.exceptions import TransactionEnded
from django_idempotency.logs import cause, is_due, log
from django_idempotency.models import Status
from django_idempotency.outcomes import Claimed, EntryPoint, Operation, Snapshot, StoredResponse
from django_idempotency.stores.base import Owned, Seen, Unlocked
from django_idempotency.stores.claim_function import TABLE_NUMBER
from django_idempotency.stores.database import BY_LOCK, COMMITTED_EARLY
from django_idempotency.stores.drivers import execute, learn
from django_idempotency.stores.errors import UNIQUE_VIOLATION, sqlstate, store_errors
from django_idempotency.stores.postgresql import (
    ASK_FOR_FUNCTION_EVERY,
    CLAIM_BY_LOCK,
    NO_FUNCTION_STATES,
    TABLE,
    TRANSACTION,
    PostgreSQLStore,
    request_lock,
    stated,
)
from django_idempotency.stores.transactions import ACTIVE, libpq_status

# Nothing is inserted unless the numbers of the transaction and of the table are those of the claim: the lock is gone
# with the transaction, and under another search_path the record would be another tenant's.
INSERT = f"""
INSERT INTO {TABLE} (
    id, scope, key, method, path, fingerprint, mode, hold_on_crash, trace, created_at, status, on_hold, reason,
    updated_at, expires_at, purge_at, response_status, response_headers, response_body
)
SELECT
    %s, %s, %s, %s, %s, %s, '{{mode}}', {{hold}}, %s, %s::timestamptz, %s, %s, %s, statement_timestamp(),
    statement_timestamp() + interval '{{retention}} s', statement_timestamp() + interval '{{kept}} s', %s, %s::jsonb, %s
WHERE pg_current_xact_id() = %s::xid8 AND {TABLE_NUMBER} = %s::bigint
"""

PATIENCE, PAUSE = 2.0, 0.01  # seconds

# A message's attempts are counted in its record, from the first run that failed.
COUNTED = (EntryPoint.CONSUMER, EntryPoint.CELERY)
NO_FUNCTION = (
    "The function django_idempotency_claim_by_lock is missing, or this role may not EXECUTE it: until that changes, "
    "claims are made by record. Run manage.py migrate, or grant EXECUTE."
)
_without_function: dict[str, float] = {}

Columns = tuple[object, ...]


class LockClaimStore(PostgreSQLStore):
    """A store whose claims are locks for keys that have no record."""

    def claim(self, operation: Operation, token: UUID) -> Claimed | Seen | Owned | None:
        try:
            return self._claim_by_lock(operation, token)
        except NotByLock:
            return super().claim(operation, token)

    def _claim_by_lock(self, operation: Operation, token: UUID) -> Claimed | Seen | Owned | None:
        """Claim in the business transaction. Leave it open for the run, but in no other case.

        Raises ``NotByLock`` if the claim has to be a record.
        """
        if time.monotonic() < _without_function.get(self.name, -math.inf) or self.is_distributed:
            raise NotByLock
        try:
            return self._open_and_claim(operation, token)
        except ProgrammingError as error:
            self._note_missing_function(error)
            raise NotByLock from error

    def _note_missing_function(self, error: ProgrammingError) -> None:
        if sqlstate(error) not in NO_FUNCTION_STATES or self.connection.in_atomic_block:
            raise error
        if is_due(NO_FUNCTION):
            log(logging.ERROR, "no_lock_function", "%s (%s)", NO_FUNCTION, cause(error))
        _without_function[self.name] = time.monotonic() + ASK_FOR_FUNCTION_EVERY

    def _open_and_claim(self, operation: Operation, token: UUID) -> Claimed | Seen | Owned | None:
        with store_errors(), ExitStack() as opened:
            connection = self._sound_connection()
            opened.enter_context(self.transaction())
            row = execute(CLAIM_BY_LOCK, (operation.id, request_lock(operation)), connection).row
            if row is None:
                raise NotByLock
            process, schemas, created, transaction, place, *_old = row
            learn(process, connection)
            if created:
                return Claimed(
                    operation,
                    token,
                    created=created,
                    place=place,
                    schemas=tuple(schemas),
                    transaction=transaction,
                    by_lock=True,
                    opened=opened.pop_all(),
                )
        return self._met(row)

    def _sound_connection(self) -> BaseDatabaseWrapper:
        """Return the connection, able to begin a transaction. In a claim by record, the first statement finds that out.

        An exception from a signal's handler may have left it in the middle of a statement. A discarded connection keeps
        its list of blocks until it is opened again.
        """
        connection = self.connection
        if libpq_status(connection) == ACTIVE:
            connection.close()
        connection.ensure_connection()
        return connection

    def complete(self, claim: Claimed, response: StoredResponse, *, failure: bool = False) -> bool:
        if not claim.by_lock:
            return super().complete(claim, response, failure=failure)
        status = Status.FAILED if failure else Status.COMPLETED
        content = (response.status, json.dumps(response.headers), response.body)
        return self._write(claim, (status.value, False, "", *content))

    def fail(self, claim: Claimed, reason: str, *, on_hold: bool = False) -> bool:
        """Write nothing, except for a message whose attempts are counted and for what an operator has to decide."""
        if not claim.by_lock:
            return super().fail(claim, reason, on_hold=on_hold)
        committed_early = self._has_committed(claim)
        held = committed_early or on_hold
        if held or claim.operation.entry_point in COUNTED:
            told = COMMITTED_EARLY if committed_early else reason
            content = (None, None, None)
            return self._write(replace(claim, transaction=None), (Status.FAILED.value, held, told, *content))
        return True

    def release(self, claim: Claimed) -> bool:
        if not claim.by_lock:
            return super().release(claim)
        with store_errors():
            if claim.transaction and execute(TRANSACTION, (), self.connection).row != (claim.transaction,):
                raise TransactionEnded
        return True

    def _write(self, claim: Claimed, columns: Columns) -> bool:
        """Insert the record of a run that has ended; return false if there is one already.

        Use the claim's transaction, or a new one if that was rolled back.
        """
        if claim.transaction:
            return self._write_here(claim, columns)
        again = self._claim_again(claim)
        if again is None:
            return False
        assert again.opened is not None
        with store_errors(), again.opened:
            return self._write_here(replace(claim, transaction=again.transaction), columns)

    def _claim_again(self, claim: Claimed) -> Claimed | None:
        """Claim once more, and repeat that while another caller is only looking."""
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                met = self._claim_by_lock(claim.operation, claim.token)
            except NotByLock:
                return None
            if met not in (None, Owned(same=None)) or time.monotonic() > deadline:
                return met if isinstance(met, Claimed) else None
            time.sleep(PAUSE)

    def _write_here(self, claim: Claimed, columns: Columns) -> bool:
        o = claim.operation
        what = (o.id, o.scope, o.key, o.method, o.path, o.fingerprint, o.trace, claim.created)
        try:
            with store_errors():
                inserted = execute(
                    stated(INSERT, self.policy), (*what, *columns, claim.transaction, claim.place), self.connection
                )
                if not inserted.rows and execute(TRANSACTION, (), self.connection).row != (claim.transaction,):
                    raise TransactionEnded
        except IntegrityError as error:
            if sqlstate(error) != UNIQUE_VIOLATION:
                raise
            self.roll_back()
            return False
        return bool(inserted.rows)

    def look_after_commit(self, claim: Claimed) -> Snapshot | Unlocked:
        """Look with the locks of the claim, which are free once the server is done with its transaction.

        Look twice if nothing is there: above READ COMMITTED, the first look may have begun before they were free.
        """
        found = self._look_with_locks(claim)
        return self._look_with_locks(claim) if found is Unlocked.ABSENT else found

    def _look_with_locks(self, claim: Claimed) -> Snapshot | Unlocked:
        row = self._ask(CLAIM_BY_LOCK, (claim.operation.id, request_lock(claim.operation)))
        met = self._met(row)
        if isinstance(met, Seen):
            return met.record
        _process, _schemas, _claimed, _transaction, _place, owner, *_old = row
        return Unlocked.BUSY if owner else Unlocked.ABSENT


class NotByLock(Exception):
    """This claim has to be a record."""


BY_LOCK["postgresql"] = LockClaimStore
