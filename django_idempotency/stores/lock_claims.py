"""Claims by lock, on PostgreSQL: nothing is written before the end, and the record is
inserted finished.

The business transaction takes the locks of the key in its first statement, and holds
them until it ends. A key that already has a record, from any kind of claim, is left to
claims by record.
"""

from __future__ import annotations

import time
from typing import Literal
from uuid import UUID

from django.db.backends.base.base import BaseDatabaseWrapper

from django_idempotency.stores.base import Found, Owned, Seen, Unlocked
from django_idempotency.stores.claim_function import (
    LOOKUP,
    PARTITIONED,
    TABLE_NUMBER,
    TRY_LOCKS,
    request_lock,
)
from django_idempotency.stores.database import COMMITTED_EARLY
from django_idempotency.stores.django_state import ACTIVE, LOST, libpq_status
from django_idempotency.stores.errors import store_errors
from django_idempotency.stores.pipeline import note_process, together
from django_idempotency.stores.postgresql import (
    COMPLETED,
    FAILED,
    SAME_TRANSACTION,
    TABLE,
    PostgreSQLStore,
    Receipt,
    receipt_of,
    stated,
    to_json,
)
from django_idempotency.stores.transactions import (
    Send,
    State,
    Transaction,
    Undone,
)
from django_idempotency.values.exceptions import (
    ClaimLost,
    StoreUnavailable,
    TransactionEnded,
)
from django_idempotency.values.outcomes import (
    Claimed,
    EntryPoint,
    Operation,
    Snapshot,
    StoredResponse,
)

# Above READ COMMITTED the lookup has a snapshot as old as the locks. There a unique
# index finds the duplicate when the record is written. Where there is none, in a
# partitioned table, and under SERIALIZABLE, where the lookup would make requests with
# different keys fail, nothing is locked, and the claim becomes a record.
CLAIM = f"""
SELECT pg_backend_pid(), current_schemas(false), {TABLE_NUMBER}::text,
    CASE WHEN CASE current_setting('transaction_isolation')
        WHEN 'serializable' THEN true
        WHEN 'repeatable read' THEN ({PARTITIONED})
        ELSE false END
    THEN 'record' ELSE {TRY_LOCKS} END
"""

# The numbers of the transaction and of the table have to be those of the claim: the
# lock is gone with the transaction, and under another search_path the record would be
# another tenant's. See GUARDED_WRITE.
INSERT = f"""
INSERT INTO {TABLE} (
    id, scope, key, method, path, fingerprint, mode, hold_on_crash, created_at, status,
        on_hold, reason,
    updated_at, expires_at, purge_at, response_status, response_headers, response_body,
        attempts
)
SELECT
    %s, %s, %s, %s, %s, %s, '{{mode}}', {{hold}}, %s::timestamptz, %s, %s, %s,
        statement_timestamp(),
    statement_timestamp() + interval '{{retention}} s', statement_timestamp() +
        interval '{{kept}} s', %s, %s::jsonb,
    %s, {SAME_TRANSACTION} + sqrt(({TABLE_NUMBER} = %s::bigint)::int - 1)::int
"""
RELEASE = f"SELECT {SAME_TRANSACTION}"

PATIENCE, PAUSE = 2.0, 0.01  # seconds

# A message's attempts are counted in its record, from the first run that failed.
COUNTED = (EntryPoint.CONSUMER, EntryPoint.CELERY)
Columns = tuple[object, ...]
ByLock = Found | Literal["record"]  # what the claim has to be if it can't be a lock


def _make_sound(connection: BaseDatabaseWrapper) -> None:
    """Make the connection able to begin a transaction. In a claim by record, the first
    statement finds that out.

    An exception from a signal's handler may have left it in the middle of a statement.
    A discarded connection keeps its list of blocks until it is opened again.
    """
    if libpq_status(connection) in (ACTIVE, LOST):
        connection.close()
    connection.ensure_connection()


class LockClaimStore(PostgreSQLStore):
    """A store whose claims are locks for keys that have no record."""

    def transaction(self, claim: Claimed | None = None) -> Transaction:
        business = None if claim is None else receipt_of(claim).business
        if business is None:
            return super().transaction()
        if business.state is not State.OPEN:
            raise TransactionEnded
        return business

    def claim(self, operation: Operation, token: UUID) -> Found:
        met = self._claim_by_lock(operation, token)
        return super().claim(operation, token) if isinstance(met, str) else met

    def _claim_by_lock(self, operation: Operation, token: UUID) -> ByLock:
        """Claim in the business transaction. Leave it open for the run, but in no other
        case.
        """
        business = self.transaction()
        try:
            with store_errors():
                _make_sound(business.connection)
                business.begin()
                met = self._lock_and_read(operation, token, business)
                if not isinstance(met, Claimed):
                    business.commit_after(lambda _send: None).expect()
        except BaseException as error:
            raise business.abort(error).error from error.__cause__
        return met

    def _lock_and_read(
        self, operation: Operation, token: UUID, business: Transaction
    ) -> ByLock:
        connection = business.connection
        id = str(operation.id)
        asking = [(CLAIM, (request_lock(operation), id, id)), (LOOKUP, (id,))]
        asked, found = together(asking, connection).expect()
        (process, schemas, table, owner), (same_table, created, number, *old) = (
            asked.row or (),
            found.row or (),
        )
        note_process(process, connection)
        if owner == "record":
            return "record"
        if owner or table != same_table or old[0] is not None:
            return self._met(operation, asked.row, found.row)
        if number is None:
            raise StoreUnavailable("cannot claim in a read-only transaction")
        receipt = Receipt(tuple(schemas), created, None, number, table, business)
        return Claimed(operation, token, by_lock=True, receipt=receipt)

    def complete(
        self, claim: Claimed, response: StoredResponse, *, failure: bool = False
    ) -> bool:
        if not claim.by_lock:
            return super().complete(claim, response, failure=failure)
        status = FAILED if failure else COMPLETED
        content = (response.status, to_json(response.headers), response.body)
        return self._write(claim, (status, False, "", *content))

    def fail(self, claim: Claimed, reason: str, *, on_hold: bool = False) -> bool:
        """Write nothing, except for a message whose attempts are counted and for what
        an operator has to decide.
        """
        if not claim.by_lock:
            return super().fail(claim, reason, on_hold=on_hold)
        committed_early = self._has_committed(claim)
        held = committed_early or on_hold
        if held or claim.operation.entry_point in COUNTED:
            stored_reason = COMMITTED_EARLY if committed_early else reason
            content = (None, None, None)
            return self._write(
                self.unlocked(claim),
                (FAILED, held, stored_reason, *content),
            )
        return True

    def release(self, claim: Claimed) -> bool:
        if not claim.by_lock:
            return super().release(claim)
        number = receipt_of(claim).transaction
        return not number or self._guarded_write(RELEASE, (number,))

    def _write(self, claim: Claimed, columns: Columns) -> bool:
        """Insert the record of a run that has ended; return false if there is one
        already.

        Use the claim's transaction, or a new one if that was rolled back.
        """
        if self._is_locked(claim):
            return self._write_here(claim, columns)
        again = self._claim_again(claim)
        if again is None:
            return False
        # The record says when the run was claimed first.
        new = receipt_of(again)
        receipt = receipt_of(claim)._replace(
            transaction=new.transaction, business=new.business
        )
        again = claim.with_receipt(receipt)

        def write(send: Send) -> None:
            if not self.sending_by(send)._write_here(again, columns):
                raise ClaimLost

        match self.transaction(again).commit_after(write):
            case Undone(ClaimLost()):
                return False
            case ended:
                with store_errors():
                    ended.expect()
                return True

    def _claim_again(self, claim: Claimed) -> Claimed | None:
        """Claim once more, and repeat that while another caller only asks."""
        deadline = time.monotonic() + PATIENCE
        while True:
            met = self._claim_by_lock(claim.operation, claim.token)
            if met not in (None, Owned(same=None)) or time.monotonic() > deadline:
                return met if isinstance(met, Claimed) else None
            time.sleep(PAUSE)

    def _write_here(self, claim: Claimed, columns: Columns) -> bool:
        o = claim.operation
        receipt = receipt_of(claim)
        what = (
            str(o.id),
            o.scope,
            o.key,
            o.method,
            o.path,
            o.fingerprint,
            receipt.created,
        )
        return self._guarded_write(
            stated(INSERT, self.policy),
            (*what, *columns, receipt.transaction, receipt.table),
        )

    def read_after_commit(self, claim: Claimed) -> Snapshot | Unlocked:
        """Read once the locks of the claim are free, as they are once the server is
        done with its transaction.
        """
        if not claim.by_lock:
            return super().read_after_commit(claim)
        met = self._meet_owner(claim.operation)
        if isinstance(met, Seen):
            return met.record
        return Unlocked.BUSY if met else Unlocked.ABSENT
