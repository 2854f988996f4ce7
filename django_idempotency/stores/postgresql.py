"""Records in PostgreSQL: the statements of every request, written out so that each is one round trip.

Rare operations (taking over, holding) are left to the portable store.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from datetime import datetime
from functools import lru_cache
from typing import Any
from uuid import UUID

from django.db import IntegrityError, ProgrammingError
from django.db.models import BooleanField, Value
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
from django_idempotency.stores.distribution import in_shards, is_distributed
from django_idempotency.stores.drivers import execute, learn
from django_idempotency.stores.errors import UNIQUE_VIOLATION, sqlstate, store_errors
from django_idempotency.stores.transactions import IN_ERROR, atomic, libpq_status

TABLE = IdempotencyRecord._meta.db_table

# One call returns one row in any case: the new record, or the old one with the database's time and whether its row lock
# is free. The function is in claim_function.py. The row also has the number of the server's process, which tells
# whether there is a pooler in between, and the schemas in which it looked for the table, where the lease is renewed.
CLAIM = """
SELECT pg_backend_pid(), current_schemas(false), * FROM django_idempotency_claim(
    %s, %s, %s, %s, %s, %s, %s, %s,
    '{mode}', {hold}, interval '{lease} s', interval '{retention} s', interval '{kept} s'
)
"""

# The claim by lock, which needs no record, and whether a key has such a claim.
CLAIM_BY_LOCK = """
SELECT pg_backend_pid(), current_schemas(false), * FROM django_idempotency_claim_by_lock(%s, %s)
"""
SAME = {"same": True, "other": False}
HAS_OWNER = f"SELECT NOT pg_try_advisory_xact_lock_shared({OWNER_LOCK.format(id='%s')})"

# These find a row by id and token, and by the time of creation if it is known, which leads to the partition. They don't
# use the status: PostgreSQL would walk the partial index of all live rows. The first attempt also uses the place where
# the claim put the row. That reads no index, in whose pages serializable transactions with different keys would meet.
# The statement that completes the record needs the number of the transaction, because other code may end the
# transaction in between without Django knowing.
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
OWN_TRANSACTION = "SELECT pg_current_xact_id()::text"
# After a crash, PostgreSQL may give the number of a lost transaction to another one. Everything that the lost
# transaction wrote is lost, too: the deletion of the row, or its lock, which otherwise stays in xmax until VACUUM or a
# write removes it. So a missing lock means something only if the server was started after the claim.
COMMITTED = "coalesce(pg_xact_status(%s::xid8) = 'committed', false)"
WAS_COMMITTED = f"{COMMITTED} AND ({TABLE}.xmax <> '0' OR pg_postmaster_start_time() < {TABLE}.locked_at)"
HAS_COMMITTED = f"SELECT {COMMITTED}"

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

# Whether the application has changed the session: in another one, the records may be those of another tenant.
IS_CHANGED = """
SELECT current_user <> session_user OR (SELECT source = 'session' FROM pg_settings WHERE name = 'search_path')
"""

COUNT_REPLAYS = f"""
UPDATE {TABLE} SET replays = replays + seen.count, last_replayed_at = statement_timestamp()
FROM unnest(%s::uuid[], %s::bigint[]) AS seen (id, count) WHERE {TABLE}.id = seen.id
"""


def request_lock(operation: Operation) -> int:
    """Return the number of a request's lock: the same for the same key and content, whichever key digests them."""
    text = operation.id.bytes + (operation.digest or operation.fingerprint)
    return REQUEST_LOCKS << 48 | int.from_bytes(hashlib.sha256(text).digest()[:6], "big")


def stated(statement: str, policy: Policy, *known: str) -> str:
    """Return ``statement`` with the policy's values written out: fewer parameters to convert on every request.

    ``known``: columns that have to equal further parameters.
    """
    times = policy.lease, policy.retention, policy.kept_for
    return _stated(statement, policy.mode, policy.holds_on_crash, times, known)


@lru_cache(maxsize=1024)
def _stated(statement: str, mode: str, hold: bool, times: tuple[float, float, float], columns: tuple[str, ...]) -> str:
    lease, retention, kept = (repr(float(seconds)) for seconds in times)
    known = "".join(f" AND {column} = %s" for column in columns)
    return statement.format(mode=str(mode), hold=hold, lease=lease, retention=retention, kept=kept, known=known)


# There is no such function, or not for this role. It is tried again after a while, as migrations may have run by then.
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
        """Note that the function is missing; raise ``error`` if it has another cause.

        In a plain table, a constraint makes a key unique, so the claim may be a look and an insert. In a partitioned
        table nothing does, so this raises ``StoreRefused``.
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
        """Look, then insert. In a partitioned table, undo that and claim by the function, unless that is missing.

        The table may not be the one that was looked at before: it may be another tenant's, or converted since. The
        INSERT prevents a conversion until COMMIT.
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
            return None  # the record was made without the function's lock
        learn(process, self.connection)
        if created:
            return Claimed(operation, token, created=created, place=place, schemas=tuple(schemas))
        if old[0] is None:
            return self._meet_owner(operation)
        return Seen(snapshot(old, self.name), busy=free is False, schemas=tuple(schemas))  # NULL if it was not tried

    def _meet_owner(self, operation: Operation) -> Seen | Owned | None:
        """Ask whose lock was in the way of a record. Locks taken to ask are free again with the answer."""
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
                return [None] * len(wanted)  # the record was made without the function's lock
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
            connection.connection.close()  # the pool's next user of it would get what was set for the session
        return self.reconnect()

    @property
    def is_distributed(self) -> bool:
        with store_errors():
            return is_distributed(self.name)

    def lock_many(self, claims: Sequence[Claimed]) -> set[UUID]:
        with store_errors(), self.connection.cursor() as cursor:
            ids = [claim.id for claim in claims]
            found: set[UUID] = set()
            for part in in_shards(ids, self.name) if self.is_distributed else [ids]:
                cursor.execute(LOCK_MANY, (part, [claim.token for claim in claims]))
                found.update(token for (token,) in cursor.fetchall())
            return found

    def watch_transaction(self, claim: Claimed) -> Callable[[], None]:
        begun = replace(claim, transaction=self._ask(OWN_TRANSACTION, ())[0])

        def expect() -> None:
            with store_errors():
                (current,) = execute(TRANSACTION, (), self.connection).row or (None,)
            if current != begun.transaction and not self._has_committed(begun):
                raise TransactionEnded

        return expect

    def complete_many(self, results: Sequence[tuple[Claimed, StoredResponse]]) -> int:
        done = [(c.id, c.token, r.status, json.dumps(r.headers), r.body) for c, r in results]
        columns = map(list, zip(*done, strict=True))
        with store_errors(), self.connection.cursor() as cursor:
            cursor.execute(stated(COMPLETE_MANY, self.policy), [Status.COMPLETED.value, *columns])
            return int(cursor.rowcount)

    def _ask(self, statement: str, values: Any) -> Any:
        with store_errors():
            if row := execute(statement, values, self.connection).row:
                return row
            with atomic(self.name):
                with self.connection.cursor() as cursor:
                    cursor.execute("SET TRANSACTION ISOLATION LEVEL READ COMMITTED")
                return execute(statement, values, self.connection).row

    def must_roll_back(self) -> bool:
        return super().must_roll_back() or libpq_status(self.connection) == IN_ERROR

    def lock(self, claim: Claimed) -> Claimed | None:
        try:
            locked = self._owned(LOCK, (), claim)
        except StoreConflict:
            return None
        if not locked or not locked.row:
            return None
        (transaction,) = locked.row
        if self.is_distributed:  # that was the transaction on the row's server
            transaction = self._ask(OWN_TRANSACTION, ())[0]
        return replace(claim, transaction=transaction)

    def complete(self, claim: Claimed, response: StoredResponse, *, failure: bool = False) -> bool:
        status = Status.FAILED if failure else Status.COMPLETED
        ended = (status.value, response.status, json.dumps(response.headers), response.body)
        return self._owned(COMPLETE, ended, claim) is not None

    def release(self, claim: Claimed) -> bool:
        return self._owned(RELEASE, (), claim) is not None

    def _was_committed(self, claim: Claimed) -> Any:
        if self.is_distributed:
            return Value(self._has_committed(claim), output_field=BooleanField())
        return RawSQL(WAS_COMMITTED, [claim.transaction], output_field=BooleanField())  # nosec B611  # a constant

    def _has_committed(self, claim: Claimed) -> bool:
        """Whether the run's transaction is committed. If the run failed, Django did not know of that COMMIT."""
        with store_errors():
            return execute(HAS_COMMITTED, (claim.transaction,), self.connection).row == (True,)

    def has_released(self, claim: Claimed) -> bool:
        with store_errors():
            return self._has_committed(claim) and not self._owned_by(claim).exists()

    def renew(self, claims: Iterable[Claimed]) -> set[UUID]:
        if not self.is_distributed:
            return super().renew(claims)
        by_id = {claim.id: claim for claim in claims}
        return {
            token
            for part in in_shards(by_id, self.name)
            for token in super(PostgreSQLStore, self).renew([by_id[id] for id in part])
        }

    def created_at(self, claim: Claimed) -> datetime | None:
        return datetime.fromisoformat(claim.created) if claim.created else None

    def count_replays(self, counts: dict[UUID, int]) -> None:
        with store_errors(), self.connection.cursor() as cursor:
            cursor.execute(COUNT_REPLAYS, (list(counts), list(counts.values())))

    # Note [Addressing by ctid]
    # ~~~~~~~~~~~~~~~~~~~~~~~~~
    # Under SERIALIZABLE an index scan locks pages of the index, so two requests with different keys could make each
    # other fail. The claim returns where it has put the row (ctid), and a TID scan locks only that row. A place is
    # valid until the row is written to; after VACUUM it may be another row's. So id and token are compared too, and if
    # nothing is found at the place, the row is looked up by its id.
    def _owned(self, statement: str, values: tuple[Any, ...], claim: Claimed) -> Result | None:
        """Execute ``statement`` on the record that ``claim`` still owns: at its place, or wherever a write put it.

        Return ``None`` if the claim is lost. Raises ``TransactionEnded`` if its transaction is not the open one.
        """
        created = {"created_at": claim.created} if claim.created else {}
        same = {"pg_current_xact_id()": claim.transaction} if claim.transaction else {}
        with store_errors():
            for place in [{"ctid": claim.place}, {}] if claim.place else [{}]:
                known = {**place, **created, **same}
                parameters = (*values, claim.id, claim.token, *known.values())
                result = execute(stated(statement, self.policy, *known), parameters, self.connection)
                if result.rows:
                    return result
            if same and execute(TRANSACTION, (), self.connection).row != (claim.transaction,):
                raise TransactionEnded
        return None


BY_VENDOR["postgresql"] = PostgreSQLStore
