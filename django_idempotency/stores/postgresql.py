"""Records in PostgreSQL: the statements of every request, written out so that each is one round trip.

What happens rarely (taking over, holding) is the portable store's.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from functools import lru_cache
from typing import Any
from uuid import UUID

from django.db import IntegrityError, ProgrammingError
from django.db.models import BooleanField
from django.db.models.expressions import RawSQL

from django_idempotency.exceptions import StoreConflict, StoreRefused, TransactionEnded
from django_idempotency.logs import cause, is_due, log
from django_idempotency.models import IdempotencyRecord, Status
from django_idempotency.outcomes import Claimed, Operation, StoredResponse
from django_idempotency.policy import Policy
from django_idempotency.stores.base import Owned, Seen
from django_idempotency.stores.claim_function import (
    OWNER_LOCK,
    PARTITIONED,
    REQUEST_LOCKS,
    is_partitioned,
)
from django_idempotency.stores.cursors import Result
from django_idempotency.stores.database import BY_VENDOR, DatabaseStore, snapshot
from django_idempotency.stores.drivers import execute, learn
from django_idempotency.stores.errors import UNIQUE_VIOLATION, sqlstate, store_errors
from django_idempotency.stores.transactions import IN_ERROR, atomic, libpq_status

TABLE = IdempotencyRecord._meta.db_table

# One call, one row, whatever is there: the new record, or the old one with the database's time and whether its row lock
# is free. The function is in claim_function.py. With it come the number of the server's process, which tells whether a
# pooler stands between, and the schemas in which it looked for the table, where the lease is to be renewed.
CLAIM = """
SELECT pg_backend_pid(), current_schemas(false), * FROM django_idempotency_claim(
    %s, %s, %s, %s, %s, %s, %s, %s,
    '{mode}', {hold}, interval '{lease} s', interval '{retention} s', interval '{kept} s'
)
"""

# The claim that needs no record; and whether a claim of that kind has a key.
CLAIM_BY_LOCK = """
SELECT pg_backend_pid(), current_schemas(false), * FROM django_idempotency_claim_by_lock(%s, %s)
"""
SAME = {"same": True, "other": False}
HAS_OWNER = f"SELECT NOT pg_try_advisory_xact_lock_shared({OWNER_LOCK.format(id='%s')})"

# By id and token, and the time of creation where it is known, which leads to the partition. Not by the status:
# PostgreSQL would walk the partial index of all live rows. And first by the place where the claim put the row: that
# reads no index, in whose pages serializable transactions with different keys would meet.
# The number of the transaction is for the statement that completes the record: other code may end the transaction in
# between, past Django.
LOCK = f"SELECT pg_current_xact_id()::text FROM {TABLE} WHERE id = %s AND token = %s{{known}} FOR NO KEY UPDATE"

COMPLETE = f"""
UPDATE {TABLE} SET
    status = %s, token = NULL, locked_at = NULL, locked_until = NULL, updated_at = statement_timestamp(),
    expires_at = statement_timestamp() + interval '{{retention}} s',
    purge_at = statement_timestamp() + interval '{{kept}} s',
    response_status = %s, response_headers = %s, response_body = %s
WHERE id = %s AND token = %s{{known}}
"""

RELEASE = f"DELETE FROM {TABLE} WHERE id = %s AND token = %s{{known}}"
TRANSACTION = "SELECT pg_current_xact_id_if_assigned()::text"
# After a crash PostgreSQL may give the number of a transaction that it lost to another one. With that transaction it
# lost all that it wrote: the deletion of the row, or its lock, which else stays in xmax until VACUUM or a write removes
# it. So a missing lock tells something only where the server was started after the claim.
COMMITTED = "coalesce(pg_xact_status(%s::xid8) = 'committed', false)"
WAS_COMMITTED = f"{COMMITTED} AND ({TABLE}.xmax <> '0' OR pg_postmaster_start_time() < {TABLE}.locked_at)"
HAS_DELETED = f"SELECT {COMMITTED} AND NOT EXISTS (SELECT FROM {TABLE} WHERE id = %s AND token = %s)"

# In the order of the advisory locks that the function takes, so that two batches can't wait for each other.
CLAIM_MANY = """
SELECT wanted.number, current_schemas(false), made.* FROM (
    SELECT * FROM unnest(
        %s::uuid[], %s::text[], %s::text[], %s::text[], %s::text[], %s::bytea[], %s::uuid[], %s::bytea[]
    ) WITH ORDINALITY AS wanted (id, scope, key, method, path, fingerprint, token, trace, number)
    ORDER BY uuid_hash(id)
) AS wanted, LATERAL django_idempotency_claim(
    wanted.id, wanted.scope, wanted.key, wanted.method, wanted.path, wanted.fingerprint, wanted.token,
    wanted.trace, '{mode}', {hold}, interval '{lease} s', interval '{retention} s', interval '{kept} s'
) AS made
"""

LOCK_MANY = f"""
SELECT token FROM {TABLE} WHERE id = ANY(%s) AND token = ANY(%s) ORDER BY id FOR NO KEY UPDATE
"""

COMPLETE_MANY = f"""
UPDATE {TABLE} AS record SET
    status = %s, token = NULL, locked_at = NULL, locked_until = NULL, updated_at = statement_timestamp(),
    expires_at = statement_timestamp() + interval '{{retention}} s',
    purge_at = statement_timestamp() + interval '{{kept}} s',
    response_status = done.status, response_headers = done.headers::jsonb, response_body = done.body
FROM unnest(%s::uuid[], %s::uuid[], %s::smallint[], %s::text[], %s::bytea[])
    AS done (id, token, status, headers, body)
WHERE record.id = done.id AND record.token = done.token
"""

# What the application has set for the session: in another one the records may be those of another tenant.
IS_CHANGED = """
SELECT current_user <> session_user OR (SELECT source = 'session' FROM pg_settings WHERE name = 'search_path')
"""

COUNT_REPLAYS = f"""
UPDATE {TABLE} SET replays = replays + seen.count, last_replayed_at = statement_timestamp()
FROM unnest(%s::uuid[], %s::bigint[]) AS seen (id, count) WHERE {TABLE}.id = seen.id
"""


def request_lock(operation: Operation) -> int:
    """Return the number of the lock of a request: the same for the same key and content, whatever key digests them."""
    text = operation.id.bytes + (operation.digest or operation.fingerprint)
    return REQUEST_LOCKS << 48 | int.from_bytes(hashlib.sha256(text).digest()[:6], "big")


def stated(statement: str, policy: Policy, *known: str) -> str:
    """``statement`` with what the policy settles written out: fewer parameters to convert on every request.

    ``known``: columns that are to be equal to further parameters.
    """
    times = policy.lease, policy.retention, policy.kept_for
    return _stated(statement, policy.mode, policy.holds_on_crash, times, known)


@lru_cache(maxsize=1024)
def _stated(statement: str, mode: str, hold: bool, times: tuple[float, float, float], columns: tuple[str, ...]) -> str:
    lease, retention, kept = (repr(float(seconds)) for seconds in times)
    known = "".join(f" AND {column} = %s" for column in columns)
    return statement.format(mode=str(mode), hold=hold, lease=lease, retention=retention, kept=kept, known=known)


# No such function, or not for this role: it is asked for again after a while, as migrations may have run by then.
NO_FUNCTION_STATES = ("42883", "42501")
ASK_FOR_FUNCTION_EVERY = 60.0  # seconds
NO_FUNCTION = (
    "The function django_idempotency_claim is missing, or this role may not EXECUTE it, and the table is partitioned. "
    "Run manage.py migrate, or grant EXECUTE."
)
_without_function: dict[str, float] = {}


class PostgreSQLStore(DatabaseStore):
    def claim(self, operation: Operation, token: UUID) -> Claimed | Seen | Owned | None:
        if not self._lacks_function():
            try:
                return self._claim_by_function(operation, token)
            except ProgrammingError as error:
                self._do_without_function(error)
        return self._claim_without_function(operation, token)

    def _lacks_function(self) -> bool:
        return time.monotonic() < _without_function.get(self.name, -math.inf)

    def _do_without_function(self, error: ProgrammingError) -> None:
        """Note that the function is missing; raise ``error`` if that is not it.

        In a plain table a constraint makes a key unique, and the claim may be a look and an insert. In a partitioned
        one nothing does: raises ``StoreRefused``.
        """
        missing = sqlstate(error) in NO_FUNCTION_STATES
        if not missing or self.connection.in_atomic_block:
            raise error
        if is_partitioned(self.connection):
            if is_due(NO_FUNCTION):
                log(logging.CRITICAL, "no_function", "%s (%s)", NO_FUNCTION, cause(error))
            raise StoreRefused(NO_FUNCTION) from error
        _without_function[self.name] = time.monotonic() + ASK_FOR_FUNCTION_EVERY

    def _claim_without_function(self, operation: Operation, token: UUID) -> Claimed | Seen | Owned | None:
        """Look, then insert. In a partitioned table that is undone, and the function claims or is missing.

        It may be another table than the one that was looked at: another tenant's, or one that was converted since. The
        INSERT keeps it from being converted until COMMIT.
        """
        with store_errors(), atomic(self.name):
            made = super().claim(operation, token)
            with self.connection.cursor() as cursor:
                cursor.execute(f"SELECT current_schemas(false), ({PARTITIONED})")
                schemas, partitioned = cursor.fetchone()
            is_plain = partitioned is False  # None: a snapshot older than the table
            if not is_plain:
                self.roll_back()
        if not is_plain:
            try:
                return self._claim_by_function(operation, token)
            except ProgrammingError as error:
                self._do_without_function(error)
                raise
        assert not isinstance(made, Owned)
        return made and replace(made, schemas=tuple(schemas))

    def _claim_by_function(self, operation: Operation, token: UUID) -> Claimed | Seen | Owned | None:
        who = (operation.id, operation.scope, operation.key)
        what = (operation.method, operation.path, operation.fingerprint, token, operation.trace)
        try:
            process, schemas, created, place, free, *old = self._ask(stated(CLAIM, self.policy), (*who, *what))
        except IntegrityError as error:
            if sqlstate(error) != UNIQUE_VIOLATION:
                raise
            return None  # a record that was made without the function's lock
        learn(process, self.name)
        if created:
            return Claimed(operation, token, created=created, place=place, schemas=tuple(schemas))
        if old[0] is None:
            return self._meet_owner(operation)
        return Seen(snapshot(old, self.name), busy=free is False, schemas=tuple(schemas))  # NULL where it was not tried

    def _meet_owner(self, operation: Operation) -> Seen | Owned | None:
        """Ask whose lock was in the way of a record. What is locked in asking is free again with the answer."""
        asked = self._ask(CLAIM_BY_LOCK, (operation.id, request_lock(operation)))
        return self._met(asked)

    def _met(self, row: Sequence[Any]) -> Seen | Owned | None:
        _process, schemas, _claimed, _transaction, _place, owner, *old = row
        if old[0] is not None:
            return Seen(snapshot(old, self.name), schemas=tuple(schemas))
        return Owned(SAME.get(owner)) if owner else None

    def has_owner(self, operation: Operation) -> bool:
        return bool(self._ask(HAS_OWNER, (operation.id, operation.id)) == (True,))

    def claim_many(self, wanted: Sequence[tuple[Operation, UUID]]) -> Sequence[Claimed | Seen | Owned | None]:
        if not self._lacks_function():
            try:
                return self._claim_many_by_function(wanted)
            except ProgrammingError as error:
                self._do_without_function(error)
            except IntegrityError as error:
                if sqlstate(error) != UNIQUE_VIOLATION:
                    raise
                return [None] * len(wanted)  # a record that was made without the function's lock
        return super().claim_many(wanted)

    def _claim_many_by_function(
        self, wanted: Sequence[tuple[Operation, UUID]]
    ) -> Sequence[Claimed | Seen | Owned | None]:
        columns = zip(
            *((o.id, o.scope, o.key, o.method, o.path, o.fingerprint, token, o.trace) for o, token in wanted),
            strict=True,
        )
        found: list[Claimed | Seen | Owned | None] = [None] * len(wanted)
        with store_errors(), self.connection.cursor() as cursor:
            cursor.execute(stated(CLAIM_MANY, self.policy), list(map(list, columns)))
            rows = cursor.fetchall()
        for number, schemas, created, place, free, *old in rows:
            operation, token = wanted[number - 1]
            if created:
                found[number - 1] = Claimed(operation, token, created=created, place=place, schemas=tuple(schemas))
            elif old[0] is not None:
                found[number - 1] = Seen(snapshot(old, self.name), busy=free is False, schemas=tuple(schemas))
        return found

    def give_back(self) -> bool:
        connection = self.connection
        if connection.in_atomic_block or connection.connection is None:
            return False
        with store_errors(), connection.cursor() as cursor:
            cursor.execute(IS_CHANGED)
            (changed,) = cursor.fetchone()
        if changed:
            return False
        pool = connection.settings_dict["OPTIONS"].get("pool")
        if not (isinstance(pool, dict) and pool.get("reset")):
            connection.connection.close()  # whoever the pool gave it to would get what was set for the session
        return self.reconnect()

    def lock_many(self, claims: Sequence[Claimed]) -> set[UUID]:
        with store_errors(), self.connection.cursor() as cursor:
            cursor.execute(LOCK_MANY, ([claim.id for claim in claims], [claim.token for claim in claims]))
            return {token for (token,) in cursor.fetchall()}

    def complete_many(self, results: Sequence[tuple[Claimed, StoredResponse]]) -> int:
        done = [(c.id, c.token, r.status, json.dumps(r.headers), r.body) for c, r in results]
        columns = map(list, zip(*done, strict=True))
        with store_errors(), self.connection.cursor() as cursor:
            cursor.execute(stated(COMPLETE_MANY, self.policy), [Status.COMPLETED.value, *columns])
            return int(cursor.rowcount)

    def _ask(self, statement: str, values: Any) -> Any:
        with store_errors():
            if row := execute(statement, values, self.name).row:
                return row
            with atomic(self.name):
                with self.connection.cursor() as cursor:
                    cursor.execute("SET TRANSACTION ISOLATION LEVEL READ COMMITTED")
                return execute(statement, values, self.name).row

    def must_roll_back(self) -> bool:
        return super().must_roll_back() or libpq_status(self.connection) == IN_ERROR

    def lock(self, claim: Claimed) -> Claimed | None:
        try:
            locked = self._owned(LOCK, (), claim)
        except StoreConflict:
            return None
        return replace(claim, transaction=locked.row[0]) if locked and locked.row else None

    def complete(self, claim: Claimed, response: StoredResponse, *, failure: bool = False) -> bool:
        status = Status.FAILED if failure else Status.COMPLETED
        ended = (status.value, response.status, json.dumps(response.headers), response.body)
        return self._owned(COMPLETE, ended, claim) is not None

    def release(self, claim: Claimed) -> bool:
        return self._owned(RELEASE, (), claim) is not None

    def _was_committed(self, claim: Claimed) -> Any:
        return RawSQL(WAS_COMMITTED, [claim.transaction], output_field=BooleanField())  # nosec B611  # a constant

    def has_released(self, claim: Claimed) -> bool:
        with store_errors():
            deleted = execute(HAS_DELETED, [claim.transaction, claim.id, claim.token], self.name)
        return deleted.row == (True,)

    def created_at(self, claim: Claimed) -> datetime | None:
        return datetime.fromisoformat(claim.created) if claim.created else None

    def count_replays(self, counts: dict[UUID, int]) -> None:
        with store_errors(), self.connection.cursor() as cursor:
            cursor.execute(COUNT_REPLAYS, (list(counts), list(counts.values())))

    # Note [Addressing by ctid]
    # ~~~~~~~~~~~~~~~~~~~~~~~~~
    # Under SERIALIZABLE an index scan locks pages of the index, so two requests with different keys could make each
    # other fail. The claim returns where it has put the row (ctid), and a TID scan locks only that row. A place is good
    # as long as the row is not written to; it may be another row's after VACUUM. So id and token are compared too, and
    # if nothing is found at the place, the row is looked for by its id.
    def _owned(self, statement: str, values: tuple[Any, ...], claim: Claimed) -> Result | None:
        """What ``statement`` says of the record, still owned by ``claim``: at its place, or where a write put it.

        Raises ``TransactionEnded`` if the claim's transaction is not the open one.
        """
        created = {"created_at": claim.created} if claim.created else {}
        same = {"pg_current_xact_id()": claim.transaction} if claim.transaction else {}
        with store_errors():
            for place in [{"ctid": claim.place}, {}] if claim.place else [{}]:
                known = {**place, **created, **same}
                parameters = (*values, claim.id, claim.token, *known.values())
                result = execute(stated(statement, self.policy, *known), parameters, self.name)
                if result.rows:
                    return result
            if same and execute(TRANSACTION, (), self.name).row != (claim.transaction,):
                raise TransactionEnded
        return None


BY_VENDOR["postgresql"] = PostgreSQLStore
