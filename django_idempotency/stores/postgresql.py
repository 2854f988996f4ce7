"""Records in PostgreSQL: the statements of every request, written out so that each is
one round trip.

Rare operations (taking over, holding) are left to the portable store.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from datetime import datetime
from functools import lru_cache, partial
from itertools import starmap
from typing import Any, NamedTuple
from uuid import UUID

from django.db import DataError, IntegrityError, ProgrammingError
from django.db.models import BooleanField
from django.db.models.expressions import RawSQL

from django_idempotency.models import IdempotencyRecord, Status
from django_idempotency.reporting.logs import cause, is_due, log
from django_idempotency.stores.base import Found, Owned, Seen
from django_idempotency.stores.claim_function import (
    IS_RUNNING,
    LOOKUP,
    MEET,
    OWNER_LOCK,
    SERVER,
    TRANSACTION,
    request_lock,
)
from django_idempotency.stores.database import DatabaseStore, snapshot
from django_idempotency.stores.errors import (
    NO_FUNCTION,
    NO_FUNCTION_STATES,
    UNIQUE_VIOLATION,
    sqlstate,
    store_errors,
)
from django_idempotency.stores.pipeline import Result, execute, note_process, together
from django_idempotency.stores.transactions import Transaction
from django_idempotency.values.exceptions import (
    StoreConflict,
    StoreRefused,
    TransactionEnded,
)
from django_idempotency.values.outcomes import Claimed, Operation, StoredResponse
from django_idempotency.values.policy import Policy

TABLE = IdempotencyRecord._meta.db_table
COMPLETED, FAILED = Status.COMPLETED.value, Status.FAILED.value
Values = tuple[Any, ...]

# One call returns one row in any case: the new record, or the old one with the
# database's time and whether its row lock is free. The function is in
# claim_function.py. The row also has the number of the server's process, which tells
# whether there is a pooler in between, and the schemas in which it looked for the
# table, where the lease is renewed.
CLAIM = """
SELECT pg_backend_pid(), current_schemas(false), * FROM django_idempotency_claim(
    %s, %s, %s, %s, %s, %s, %s,
    '{mode}', {hold}, interval '{lease} s', interval '{retention} s',
        interval '{kept} s'
)
"""

READ_COMMITTED = "SET TRANSACTION ISOLATION LEVEL READ COMMITTED"
SAME = {"same": True, "other": False}
HAS_OWNER = f"SELECT NOT pg_try_advisory_xact_lock_shared({OWNER_LOCK.format(id='%s')})"

# These find a row by id and token, and by the time of creation if it is known, which
# leads to the partition. They don't use the status: PostgreSQL would walk the partial
# index of all live rows. The first attempt also uses the place where the claim put the
# row. That reads no index, in whose pages serializable transactions with different keys
# would meet. The statement that completes the record needs the number of the
# transaction, because other code may end the transaction in between without Django
# knowing.
LOCK = f"""
SELECT {TRANSACTION} AS transaction,
    current_setting('transaction_isolation') = 'serializable'
FROM {TABLE} WHERE id = %s AND token = %s{{known}} FOR NO KEY UPDATE
"""

ENDED = """
    status = %s, token = NULL, locked_at = NULL, locked_until = NULL,
        updated_at = statement_timestamp(),
    expires_at = statement_timestamp() + interval '{retention} s',
    purge_at = statement_timestamp() + interval '{kept} s'
"""
COMPLETE = f"""
UPDATE {TABLE} SET {ENDED}, response_status = %s, response_headers = %s,
    response_body = %s
WHERE id = %s AND token = %s{{known}}
"""

RELEASE = f"DELETE FROM {TABLE} WHERE id = %s AND token = %s{{known}}"

# Note [Statements that fail on purpose]
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
# The write that ends a run may have COMMIT behind it in the same message. So it has to
# fail, rather than change nothing, where the transaction must not be committed:
# - 1 / 0 if the transaction is another one by now, because other code has ended the
#   claim's without Django knowing;
# - sqrt(count(*) - 1) is the root of -1 if no row was changed: the claim is lost.
# The planner can evaluate neither in advance. Each is known by its SQLSTATE, which
# nothing else in these statements raises; an error of COMMIT itself is told apart by
# its place among the results.
SAME_TRANSACTION = f"1 / ({TRANSACTION} = %s)::int"
OTHER_TRANSACTION, CLAIM_LOST = "22012", "2201F"
GUARDED_WRITE = (
    f"WITH written AS ({{}} RETURNING 1) SELECT {SAME_TRANSACTION}, sqrt(count(*) - 1)"
    " FROM written"
)
_guarded = lru_cache(GUARDED_WRITE.format)
GUARDED_WRITES = (
    "WITH written AS ({} RETURNING 1) SELECT sqrt(count(*) - %s) FROM written"
)
OPEN_TRANSACTION = (
    f"SELECT pg_current_xact_id_if_assigned()::text || '@' || {SERVER} AS transaction"
)
# After a crash, PostgreSQL may give the number of a lost transaction to another one. So
# a number means nothing if the server has crashed since the claim, which resets its
# statistics: the run is then taken for lost, as one whose process has died. Until the
# number is given to another one, it is an error to ask for its status.
COMMITTED = f"""coalesce((
    SELECT CASE WHEN own.parts[2] = {SERVER}
        AND own.parts[1]::xid8 < pg_snapshot_xmax(pg_current_snapshot())
        THEN pg_xact_status(own.parts[1]::xid8) = 'committed'
            AND coalesce((SELECT stats_reset FROM pg_stat_archiver) < own.claimed_at,
                true) END
    FROM (SELECT string_to_array(%s, '@'), {{}}) AS own (parts, claimed_at)
), false)"""
WAS_COMMITTED = COMMITTED.format(f"{TABLE}.locked_at")
HAS_COMMITTED = f"SELECT {COMMITTED.format('%s::timestamptz')}"

# In the order of the advisory locks that the function takes, so that two batches can't
# wait for each other.
CLAIM_MANY = """
SELECT wanted.number, current_schemas(false), made.* FROM (
    SELECT * FROM unnest(
        %s::uuid[], %s::text[], %s::text[], %s::text[], %s::text[], %s::bytea[],
            %s::uuid[]
    ) WITH ORDINALITY AS wanted (id, scope, key, method, path, fingerprint, token,
        number)
    ORDER BY uuid_hash(id)
) AS wanted, LATERAL django_idempotency_claim(
    wanted.id, wanted.scope, wanted.key, wanted.method, wanted.path,
        wanted.fingerprint, wanted.token,
    '{mode}', {hold}, interval '{lease} s', interval '{retention} s',
        interval '{kept} s'
) AS made
"""

LOCK_MANY = f"""
SELECT token, {TRANSACTION} AS transaction FROM {TABLE} WHERE id = ANY(%s)
    AND token = ANY(%s)
ORDER BY id FOR NO KEY UPDATE
"""

COMPLETE_MANY = f"""
UPDATE {TABLE} AS record SET {ENDED},
    response_status = done.status, response_headers = done.headers::jsonb,
        response_body = done.body
FROM unnest(%s::uuid[], %s::uuid[], %s::smallint[], %s::text[], %s::bytea[])
    AS done (id, token, status, headers, body)
WHERE record.id = done.id AND record.token = done.token
"""

# All processes lock rows in the same order, so they may wait for each other but never
# deadlock.
COUNT_REPLAYS = f"""
WITH locked AS MATERIALIZED (SELECT id FROM {TABLE} WHERE id = ANY(%(ids)s) ORDER BY id
    FOR NO KEY UPDATE)
UPDATE {TABLE} SET replays = replays + seen.count,
    last_replayed_at = statement_timestamp()
FROM locked JOIN unnest(%(ids)s::uuid[], %(counts)s::bigint[]) AS seen (id,
    count) USING (id)
WHERE {TABLE}.id = locked.id
"""


def stated(statement: str, policy: Policy, *known: str) -> str:
    """Return ``statement`` with the policy's values written out: fewer parameters to
    convert on every request.

    ``known``: columns that have to equal further parameters.
    """
    found: str | None = policy.derived.get((statement, known))
    if found is None:
        times = policy.mode.seconds, policy.retention, policy.kept_for
        lease, retention, kept = (repr(float(seconds)) for seconds in times)
        found = policy.derived[statement, known] = statement.format(
            mode=policy.mode.word,
            hold=policy.holds_on_crash,
            lease=lease,
            retention=retention,
            kept=kept,
            known="".join(f" AND {column} = %s" for column in known),
        )
    return found


class Receipt(NamedTuple):
    """What PostgreSQL has said about a record.

    ``schemas``: where it looked for the table. ``created``, ``place``: when the record
    was made, and where it was put (its ctid). ``transaction``: the business transaction
    that has locked it, as ``TRANSACTION`` says. ``table``: for a claim by lock, the
    number of the table. ``business``: the business transaction that has it. ``whose``:
    id and token, as they are sent.
    """

    schemas: tuple[str, ...] = ()
    created: str | None = None
    place: str | None = None
    transaction: str | None = None
    table: str | None = None
    business: Transaction | None = None
    whose: tuple[str, str] | None = None


to_json = json.JSONEncoder().encode


def receipt_of(claim: Claimed) -> Receipt:
    return claim.receipt or Receipt()


def _asked(o: Operation, token: UUID) -> Values:
    """Return the values of a claim, in the order of the function's parameters.

    Ids and tokens are sent as text: psycopg calls two functions in Python for a UUID.
    """
    return str(o.id), o.scope, o.key, o.method, o.path, o.fingerprint, str(token)


def _whose(claim: Claimed, receipt: Receipt) -> Values:
    return receipt.whose or (str(claim.operation.id), str(claim.token))


def _expect_made_meanwhile(error: IntegrityError | ProgrammingError) -> None:
    """Raise ``error`` unless a record was made without the function; ``StoreRefused``
    if there is no function.
    """
    if sqlstate(error) in NO_FUNCTION_STATES:
        if is_due(NO_FUNCTION):
            log(logging.CRITICAL, "no_function", "%s (%s)", NO_FUNCTION, cause(error))
        raise StoreRefused(NO_FUNCTION) from error
    if sqlstate(error) != UNIQUE_VIOLATION:
        raise error


class PostgreSQLStore(DatabaseStore):
    def at(self, receipt: Receipt | None) -> PostgreSQLStore:
        if receipt is None or receipt.schemas == self.schemas:
            return self
        return type(self)(self.policy, self.name, self.options, receipt.schemas)

    def claim(self, operation: Operation, token: UUID) -> Found:
        connection = self.connection
        asked = _asked(operation, token)
        try:
            process, *row = self._ask(stated(CLAIM, self.policy), asked, connection)
        except (IntegrityError, ProgrammingError) as error:
            _expect_made_meanwhile(error)
            return None
        note_process(process, connection)
        whose = asked[0], asked[-1]
        found = self._found(operation, token, row, whose)
        return found or self._meet_owner(operation)

    def _found(
        self, operation: Operation, token: UUID, row: Sequence[Any], whose: Any = None
    ) -> Claimed | Seen | None:
        """Return what the function has found; ``None`` for the lock of an owner without
        a record.
        """
        schemas, created, place, free, *old = row
        if created:
            return Claimed(
                operation,
                token,
                receipt=Receipt(tuple(schemas), created, place, whose=whose),
            )
        if old[0] is None:
            return None
        # NULL if it was not tried
        return Seen(snapshot(old, self.name), free is False, Receipt(tuple(schemas)))

    def _meet_owner(self, operation: Operation) -> Seen | Owned | None:
        """Ask whose lock was in the way of a record. Locks taken to ask are free again
        once the database replies.
        """
        lock, id = request_lock(operation), operation.id
        asking = [(READ_COMMITTED, ()), (MEET, (lock, id, id)), (LOOKUP, (id,))]
        with store_errors(), Transaction(self.name):
            _set, met, found = together(asking, self.connection).expect()
            return self._met(operation, met.row, found.row)

    def _met(self, operation: Operation, met: Any, found: Any) -> Seen | Owned | None:
        (_process, schemas, table, owner), (same_table, _time, _number, *old) = (
            met,
            found,
        )
        if table != same_table:
            return Owned(None)
        if old[0] is not None:
            return Seen(snapshot(old, self.name), receipt=Receipt(tuple(schemas)))
        if owner == "other" and execute(
            IS_RUNNING, (operation.id, operation.id), self.connection
        ).row != (True,):
            return Owned(None)
        return Owned(SAME[owner]) if owner else None

    def has_owner(self, operation: Operation) -> bool:
        return bool(self._ask(HAS_OWNER, (operation.id, operation.id)) == (True,))

    # --- several at once: claimed, locked and completed by record

    def claim_many(self, wanted: Sequence[tuple[Operation, UUID]]) -> Sequence[Found]:
        """Do for each of several operations, with its token, what ``claim`` does."""
        columns = zip(*starmap(_asked, wanted), strict=True)
        found: list[Found] = [None] * len(wanted)
        try:
            with store_errors(), self.connection.cursor() as cursor:
                cursor.execute(
                    stated(CLAIM_MANY, self.policy), list(map(list, columns))
                )
                for number, *row in cursor.fetchall():
                    operation, token = wanted[number - 1]
                    found[number - 1] = self._found(operation, token, row)
        except (IntegrityError, ProgrammingError) as error:
            _expect_made_meanwhile(error)
        return found

    def lock_many(self, claims: Sequence[Claimed]) -> list[Claimed]:
        """Lock each of several records; return the claims that still own theirs, as
        they are in this transaction.
        """
        by_token = {claim.token: claim for claim in claims}
        with store_errors(), self.connection.cursor() as cursor:
            cursor.execute(LOCK_MANY, ([claim.id for claim in claims], list(by_token)))
            return [
                self._locked(by_token[token], number)
                for token, number in cursor.fetchall()
            ]

    def complete_many(self, results: Sequence[tuple[Claimed, StoredResponse]]) -> int:
        """Complete each of the claims that ``lock_many`` has returned; return how many
        still owned their record.

        Raises ``TransactionEnded`` if the transaction was rolled back since, by code
        that ran in it and without Django knowing. After such a COMMIT the claims are
        completed, because the effects are there.
        """
        number = receipt_of(results[0][0]).transaction
        if not self._is_open(number) and not self._has_committed(results[0][0]):
            raise TransactionEnded
        done = [
            (c.id, c.token, r.status, json.dumps(r.headers), r.body) for c, r in results
        ]
        values = (COMPLETED, *map(list, zip(*done, strict=True)))
        return self._end_many(stated(COMPLETE_MANY, self.policy), values, len(done))

    def _end_many(self, statement: str, values: Values, count: int) -> int:
        """Execute the write that ends ``count`` runs; return how many still owned their
        record.
        """
        return (
            count
            if self._guarded_write(GUARDED_WRITES.format(statement), (*values, count))
            else 0
        )

    def _is_open(self, transaction: str | None) -> bool:
        return bool(self._ask(OPEN_TRANSACTION, ()) == (transaction,))

    def _ask(self, statement: str, values: Any, connection: Any = None) -> Any:
        connection = connection or self.connection
        with store_errors():
            if row := execute(statement, values, connection).row:
                return row
            with Transaction(self.name):
                asking = [(READ_COMMITTED, ()), (statement, values)]
                return together(asking, connection).expect()[-1].row

    def lock(self, claim: Claimed) -> Claimed | None:
        try:
            locked = self._owned(LOCK, (), claim)
        except StoreConflict:
            return None
        if not locked or not locked.row:
            return None
        number, serializable = locked.row
        return self._locked(claim, number, at_place=serializable)

    def _locked(
        self, claim: Claimed, number: Any, *, at_place: bool = False
    ) -> Claimed:
        receipt = receipt_of(claim)
        place = receipt.place if at_place else None
        return claim.with_receipt(receipt._replace(place=place, transaction=number))

    def unlocked(self, claim: Claimed) -> Claimed:
        return claim.with_receipt(receipt_of(claim)._replace(transaction=None))

    def _is_locked(self, claim: Claimed) -> bool:
        return receipt_of(claim).transaction is not None

    def complete(
        self, claim: Claimed, response: StoredResponse, *, failure: bool = False
    ) -> bool:
        status = FAILED if failure else COMPLETED
        headers = to_json(response.headers)
        ended = (status, response.status, headers, response.body)
        return self._end_owned(COMPLETE, ended, claim)

    def release(self, claim: Claimed) -> bool:
        return self._end_owned(RELEASE, (), claim)

    def _end_owned(self, statement: str, values: Values, claim: Claimed) -> bool:
        receipt = receipt_of(claim)
        if not receipt.transaction or receipt.place:
            return self._owned(statement, values, claim) is not None
        known = {"created_at": receipt.created} if receipt.created else {}
        whose = _whose(claim, receipt)
        return self._guarded_write(
            stated(_guarded(statement), self.policy, *known),
            (*values, *whose, *known.values(), receipt.transaction),
        )

    def _guarded_write(self, statement: str, values: Values) -> bool:
        """Execute the write that ends a run, as ``sending_by`` says. Return false if
        the claim is lost.
        """
        send = self.send or partial(execute, connection=self.connection)
        try:
            with store_errors():
                send(statement, values)
        except (DataError, IntegrityError) as error:
            if sqlstate(error) == OTHER_TRANSACTION:
                raise TransactionEnded from error
            if sqlstate(error) not in (CLAIM_LOST, UNIQUE_VIOLATION):
                raise
            return False
        return True

    def _was_committed(self, claim: Claimed) -> Any:
        number = receipt_of(claim).transaction
        return RawSQL(WAS_COMMITTED, [number], output_field=BooleanField())  # nosec B611  # a constant

    def _has_committed(self, claim: Claimed) -> bool:
        """Whether a run's transaction is committed. If the run failed, Django did not
        know of that COMMIT.
        """
        receipt = receipt_of(claim)
        return bool(
            self._ask(HAS_COMMITTED, (receipt.transaction, receipt.created)) == (True,)
        )

    def has_released(self, claim: Claimed) -> bool:
        with store_errors():
            return self._has_committed(claim) and not self._owned_by(claim).exists()

    def created_at(self, claim: Claimed) -> datetime | None:
        created = receipt_of(claim).created
        return datetime.fromisoformat(created) if created else None

    def count_replays(self, counts: dict[UUID, int]) -> None:
        with store_errors(), self.connection.cursor() as cursor:
            cursor.execute(
                COUNT_REPLAYS, {"ids": list(counts), "counts": list(counts.values())}
            )

    # Note [Addressing by ctid] ~~~~~~~~~~~~~~~~~~~~~~~~~ Under SERIALIZABLE an index
    # scan locks pages of the index, so two requests with different keys could make each
    # other fail. The claim returns where it has put the row (ctid), and a TID scan
    # locks only that row. A place is valid until the row is written to; after VACUUM it
    # may be another row's. So id and token are compared too, and if nothing is found at
    # the place, the row is looked up by its id. COMMIT can go out with one statement
    # only: so where no index has to be spared, the completion goes by the id.
    def _owned(self, statement: str, values: Values, claim: Claimed) -> Result | None:
        """Execute ``statement`` on the record that ``claim`` still owns: at its place,
        or wherever a write put it.

        Return ``None`` if the claim is lost. Raises ``TransactionEnded`` if its
        transaction is not the open one.
        """
        receipt = receipt_of(claim)
        created, place, number = receipt.created, receipt.place, receipt.transaction
        same = ({"created_at": created} if created else {}) | (
            {TRANSACTION: number} if number else {}
        )
        with store_errors():
            for found_at in [{"ctid": place}, {}] if place else [{}]:
                known = found_at | same
                whose = _whose(claim, receipt)
                parameters = (*values, *whose, *known.values())
                result = execute(
                    stated(statement, self.policy, *known), parameters, self.connection
                )
                if result.rows:
                    return result
        if number and not self._is_open(number):
            raise TransactionEnded
        return None
