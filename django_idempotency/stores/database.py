"""Records in a database, by Django's ORM: works on every database that Django's
``select_for_update`` works on.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, timedelta
from typing import Any, Literal, Self
from uuid import UUID

from django.db import DatabaseError, IntegrityError, connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import (
    Case,
    DurationField,
    ExpressionWrapper,
    F,
    Q,
    QuerySet,
    Value,
    When,
)
from django.db.models.expressions import Combinable
from django.db.models.functions import Greatest
from django.db.models.sql import InsertQuery
from django.utils.translation import gettext_noop

from django_idempotency.models import (
    DatabaseNow,
    IdempotencyRecord,
    Status,
    check_move,
    in_utc,
)
from django_idempotency.stores.base import Found, Seen, Store, Unlocked
from django_idempotency.stores.connections import alias as database_of
from django_idempotency.stores.django_state import in_transaction_of_others
from django_idempotency.stores.errors import is_missing_savepoint, store_errors
from django_idempotency.stores.own_connections import own_connection
from django_idempotency.stores.transactions import Send, Transaction, recover
from django_idempotency.values.exceptions import StoreConflict, TransactionEnded
from django_idempotency.values.outcomes import (
    Claimed,
    Operation,
    Snapshot,
    StoredResponse,
)
from django_idempotency.values.policy import Policy
from django_idempotency.values.rules import Options, one_of, option

# The reason in a record from the moment its row is locked until it is completed. Others
# see it only if the application commits the transaction in between.
COMMITTED_EARLY = gettext_noop("its transaction was committed before the run had ended")
SAVEPOINT = "django_idempotency_run"
# On MariaDB an INSERT of an existing key waits for its owner, 50 seconds by default. A
# second is enough for a rival to commit its INSERT, and too short for an owner to
# finish.
A_SECOND = "SET STATEMENT innodb_lock_wait_timeout = 1 FOR "

COLUMNS = tuple(Snapshot.__dataclass_fields__)[:-1]
TIMES = ("created_at", "locked_at", "locked_until", "expires_at", "now")


def ahead(seconds: float) -> Combinable:
    """Return the database's time ``seconds`` from now."""
    return DatabaseNow() + Value(timedelta(seconds=seconds))


@dataclass(frozen=True, kw_only=True)
class DatabaseOptions(Options):
    """The ``OPTIONS`` of a store in a database.

    ``row_lock``: how to lock a row that may change owner, ``"nowait"`` or
    ``"skip_locked"``.
    """

    row_lock: Literal["nowait", "skip_locked"] = option(
        "nowait", one_of(("nowait", "skip_locked"))
    )


DEFAULTS = DatabaseOptions()


@dataclass(frozen=True)
class DatabaseStore(Store):
    """The portable store: a lookup, then an insert, with the same outcomes as the
    one-statement claim on PostgreSQL.

    A run's effects can be committed together with its record. ``lock()`` proves that an
    owner is alive, and the end of the lock that it is dead, without a clock.
    """

    send: Send | None = field(default=None, compare=False, repr=False)
    """Executes the statement that finishes a run; ``None``: as any other."""

    transactional = True

    @classmethod
    def configure(cls, **options: Any) -> DatabaseOptions:
        return DatabaseOptions(**options)

    @classmethod
    def bind(
        cls, policy: Policy, operation: Operation | None, alias: str, options: Any
    ) -> Store:
        return cls(policy, database_of(policy, operation), options)

    @property
    def connection(self) -> BaseDatabaseWrapper:
        return connections[self.name]

    @property
    def rows(self) -> QuerySet[IdempotencyRecord]:
        return IdempotencyRecord.objects.using(self.name)

    def in_foreign_transaction(self) -> bool:
        connection = connections[self.name]
        recover(connection)
        return in_transaction_of_others(connection)

    def recover(self) -> None:
        recover(self.connection, attended=True)

    def transaction(self, claim: Claimed | None = None) -> Transaction:
        """Return a business transaction: that which ``claim`` has begun, if it is a
        lock, or else one to begin.
        """
        return Transaction(self.name, durable=True)

    def sending_by(self, send: Send) -> Self:
        """Return this store for the last write of a transaction, which ``send``
        executes together with COMMIT if it is one statement.
        """
        return type(self)(self.policy, self.name, self.options, self.schemas, send)

    def claim(self, operation: Operation, token: UUID) -> Found:
        with store_errors():
            record = self.read(operation.id)
            return Seen(record) if record else self._insert(operation, token)

    def _insert(self, operation: Operation, token: UUID) -> Claimed | None:
        record = IdempotencyRecord(
            id=operation.id,
            scope=operation.scope,
            key=operation.key,
            created_at=DatabaseNow(),
            **_claim(token, self.policy, operation),
        )
        query = InsertQuery(IdempotencyRecord)
        query.insert_values(IdempotencyRecord._meta.concrete_fields, [record])
        ((insert, values),) = query.get_compiler(self.name).as_sql()
        on_mariadb = getattr(self.connection, "mysql_is_mariadb", False)
        try:
            with Transaction(self.name), self.connection.cursor() as cursor:
                cursor.execute(A_SECOND + insert if on_mariadb else insert, values)
        except IntegrityError:
            return None
        return Claimed(operation, token)

    def reconnect(self) -> bool:
        connection = self.connection
        if connection.in_atomic_block or connection.connection is None:
            return False
        connection.close()
        return True

    @contextmanager
    def try_lock(self, id: UUID) -> Iterator[Snapshot | Unlocked]:
        rows = self.rows.filter(pk=id)
        with store_errors(), Transaction(rows.db):
            if not connections[rows.db].features.has_select_for_update:
                # takes the write lock of the whole database
                rows.update(updated_at=F("updated_at"))
            record = _first(
                _for_update(
                    rows, nowait=(self.options or DEFAULTS).row_lock == "nowait"
                )
            )
            if record is not None:
                yield record
            else:  # SKIP LOCKED can't tell a locked row from a missing one
                yield Unlocked.BUSY if rows.exists() else Unlocked.ABSENT

    def reassign(self, record: Snapshot, operation: Operation, token: UUID) -> Claimed:
        claim = self.successor(record, operation, token)
        anew: dict[str, Any] = (
            {"created_at": DatabaseNow(), "replays": 0} if claim.attempt == 1 else {}
        )
        self.rows.filter(pk=record.id).update(
            attempts=claim.attempt,
            on_hold=False,
            reason="",
            **anew,
            **_claim(token, self.policy, operation) | _kept_at_least(self.policy),
            **_response_columns(None),
        )
        return claim

    def hold(self, record: Snapshot, reason: str) -> None:
        check_move(record.status, Status.FAILED)
        self.rows.filter(pk=record.id).update(
            on_hold=True, reason=reason, **_undecided(self.policy)
        )

    def read(self, id: UUID) -> Snapshot | None:
        with store_errors():
            return _first(self.rows.filter(pk=id))

    def lock(self, claim: Claimed) -> Claimed | None:
        """Lock the record until the business transaction ends, or the whole database if
        it has no row locks.

        Return the claim as it is in this transaction, or ``None`` if the claim is lost.
        """
        try:
            with store_errors():
                if self._owned_by(claim).update(reason=COMMITTED_EARLY) != 1:
                    return None
                self._execute(self.connection.ops.savepoint_create_sql(SAVEPOINT))
        except StoreConflict:
            return None
        return claim.with_receipt(SAVEPOINT)

    def unlocked(self, claim: Claimed) -> Claimed:
        """Return a locked claim as it is once its transaction is rolled back."""
        return claim.with_receipt(None)

    def read_after_commit(self, claim: Claimed) -> Snapshot | Unlocked:
        """Return the record of a claim whose COMMIT got no reply; ``BUSY`` while it may
        still be running.
        """
        with self.try_lock(claim.id) as record:
            return record

    def _is_locked(self, claim: Claimed) -> bool:
        """Whether ``lock`` has returned this claim, which then knows its
        transaction.
        """
        return claim.receipt is not None

    def complete(
        self, claim: Claimed, response: StoredResponse, *, failure: bool = False
    ) -> bool:
        if self._is_locked(claim):
            self._expect_savepoint()
        status = Status.FAILED if failure else Status.COMPLETED
        return self._close(
            claim,
            reason="",
            **_closed(status, self.policy),
            **_response_columns(response),
        )

    def _expect_savepoint(self) -> None:
        with store_errors():
            try:
                self._execute(self.connection.ops.savepoint_commit_sql(SAVEPOINT))
            except DatabaseError as error:
                if is_missing_savepoint(error):
                    raise TransactionEnded from error
                raise

    def _execute(self, statement: str) -> None:
        with self.connection.cursor() as cursor:
            cursor.execute(statement)

    def fail(self, claim: Claimed, reason: str, *, on_hold: bool = False) -> bool:
        if not self._is_locked(claim):
            return self._close(
                claim,
                on_hold=on_hold,
                reason=reason,
                **_undecided(self.policy),
            )
        committed = self._was_committed(claim)
        held = Case(When(committed, then=Value(True)), default=Value(on_hold))
        stored_reason = Case(
            When(committed, then=Value(COMMITTED_EARLY)), default=Value(reason)
        )
        # In MariaDB, assignments see the effect of earlier ones, so the reason comes
        # last.
        return self._close(
            claim,
            on_hold=held,
            **_undecided(self.policy),
            reason=stored_reason,
        )

    def _was_committed(self, claim: Claimed) -> Any:
        """Return the condition that the record's transaction is committed, although the
        record is not completed.
        """
        return Q(reason=COMMITTED_EARLY)

    def has_released(self, claim: Claimed) -> bool:
        """Return whether the transaction that released the claim, whose COMMIT got no
        reply, is committed.
        """
        return self.read(claim.id) is None

    def _close(self, claim: Claimed, **values: Any) -> bool:
        with store_errors():
            return self._owned_by(claim).update(**values) == 1

    def release(self, claim: Claimed) -> bool:
        if self._is_locked(claim):
            self._expect_savepoint()
        with store_errors():
            rows = self._owned_by(claim)
            return rows._raw_delete(rows.db) == 1

    def renew(self, claims: Iterable[Claimed]) -> set[UUID]:
        rows = self._of({claim.token: claim.id for claim in claims})
        with store_errors(), transaction.atomic(using=self.name):
            free = {
                token: id
                for token, id in _for_update(rows).values_list("token", "pk")
                if token
            }
            self._of(free).update(locked_until=ahead(self.policy.mode.seconds))
        return set(free)

    def leases_left(self, records: Mapping[UUID, UUID]) -> dict[UUID, timedelta]:
        left = ExpressionWrapper(
            F("locked_until") - DatabaseNow(), output_field=DurationField()
        )
        with store_errors():
            try_to_write(self.rows)
            rows = self._of(records).annotate(left=left).values_list("token", "left")
            return {token: lasts for token, lasts in rows if token}

    def expire(self, records: Mapping[UUID, UUID]) -> None:
        with store_errors():
            lapsed = self._of(records).filter(
                locked_until__gt=F("locked_at"), locked_until__lt=DatabaseNow()
            )
            lapsed.update(locked_until=F("locked_at"))

    def own_connection(self, *, seconds: float) -> AbstractContextManager[None]:
        return own_connection(self.name, seconds=seconds, schemas=self.schemas)

    def _of(self, records: Mapping[UUID, UUID]) -> QuerySet[IdempotencyRecord]:
        return self.rows.filter(pk__in=list(records.values()), token__in=list(records))

    def records(self) -> Iterator[Snapshot]:
        with store_errors():
            rows = self.rows.annotate(database_now=DatabaseNow()).values_list(
                *COLUMNS, "database_now"
            )
            yield from (snapshot(row, self.name) for row in rows.iterator())

    def delete(self, record: Snapshot) -> bool:
        with self.try_lock(record.id) as found:
            same = isinstance(found, Snapshot) and found.version == record.version
            return same and bool(self.rows.filter(pk=record.id)._raw_delete(self.name))

    def _owned_by(self, claim: Claimed) -> QuerySet[IdempotencyRecord]:
        # By id and token only: with the status, too, PostgreSQL would walk the partial
        # index of all live rows.
        return self.rows.filter(pk=claim.id, token=claim.token)

    def count_replays(self, counts: dict[UUID, int]) -> None:
        with store_errors():
            for id, count in counts.items():
                self.rows.filter(pk=id).update(
                    replays=F("replays") + count, last_replayed_at=DatabaseNow()
                )


def _first(rows: QuerySet[IdempotencyRecord]) -> Snapshot | None:
    row = next(
        iter(
            rows.annotate(database_now=DatabaseNow()).values_list(
                *COLUMNS, "database_now"
            )
        ),
        None,
    )
    return snapshot(row, rows.db) if row else None


def snapshot(row: Any, using: str) -> Snapshot:
    """Return a record made of a row's values, which are in the order of the snapshot's
    fields.
    """
    record = dict(zip(Snapshot.__dataclass_fields__, row, strict=True))
    for name in TIMES:
        time = record[name]
        if time is not None and time.tzinfo is not UTC:
            record[name] = in_utc(time, using)
    if isinstance(record["response_headers"], str):
        try:  # noqa: SIM105 (suppress() would cost each replay three calls)
            record["response_headers"] = json.loads(record["response_headers"])
        except ValueError:  # damaged by hand
            pass
    for name in ("fingerprint", "response_body"):
        if isinstance(record[name], memoryview):  # as psycopg2 reads it
            record[name] = bytes(record[name])
    return Snapshot(**record)


def try_to_write(rows: QuerySet[IdempotencyRecord]) -> None:
    """Raise ``DatabaseError`` if no record can be updated, as in a read-only database.
    This locks nothing.

    On SQLite, it would take the write lock of the whole database, so it is not tried
    there.
    """
    if connections[rows.db].features.has_select_for_update:
        rows.filter(pk=UUID(int=0)).update(updated_at=F("updated_at"))


def _for_update(
    rows: QuerySet[IdempotencyRecord], *, nowait: bool = False
) -> QuerySet[IdempotencyRecord]:
    """Return ``rows``, to be locked as they are read: with NOWAIT, or else with SKIP
    LOCKED.
    """
    features = connections[rows.db].features
    return rows.select_for_update(
        nowait=nowait and features.has_select_for_update_nowait,
        skip_locked=not nowait and features.has_select_for_update_skip_locked,
        no_key=features.has_select_for_no_key_update,
    )


def _claim(token: UUID, policy: Policy, operation: Operation) -> dict[str, Any]:
    return {
        "status": Status.PROCESSING,
        "mode": policy.mode.word,
        "hold_on_crash": policy.holds_on_crash,
        "token": token,
        "locked_at": DatabaseNow(),
        "locked_until": ahead(policy.mode.seconds),
        "updated_at": DatabaseNow(),
        "method": operation.method,
        "path": operation.path,
        "fingerprint": operation.fingerprint,
        **_kept_until(policy),
    }


def _closed(status: Status, policy: Policy) -> dict[str, Any]:
    claim = {
        "status": status,
        "token": None,
        "locked_at": None,
        "locked_until": None,
        "updated_at": DatabaseNow(),
    }
    return {**claim, **_kept_until(policy)}


def _undecided(policy: Policy) -> dict[str, Any]:
    """Return the columns of a failed run without a response."""
    return {**_closed(Status.FAILED, policy), **_kept_at_least(policy)}


def _kept_at_least(policy: Policy) -> dict[str, Any]:
    """Return ``_kept_until``, unless the record is kept for longer already: a wing may
    have said so of an operation that is half done. Citus refuses CASE here.
    """
    kept = _kept_until(policy)
    return {name: Greatest(F(name), until) for name, until in kept.items()}


def _kept_until(policy: Policy) -> dict[str, Any]:
    return {"expires_at": ahead(policy.retention), "purge_at": ahead(policy.kept_for)}


def _response_columns(response: StoredResponse | None) -> dict[str, Any]:
    """Return the columns of ``response``. Without one, they are NULL."""
    return {
        f"response_{name}": getattr(response, name, None)
        for name in ("status", "headers", "body")
    }
