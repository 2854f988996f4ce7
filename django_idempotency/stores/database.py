"""Records in a database, by Django's ORM: works on every database that Django's ``select_for_update`` works on."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from django.db import DatabaseError, IntegrityError, InterfaceError, connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import Case, DurationField, ExpressionWrapper, F, Max, Q, QuerySet, Value, When
from django.db.models.expressions import Combinable
from django.db.models.functions import Coalesce
from django.utils.translation import gettext_noop

from django_idempotency.exceptions import StoreConflict, TransactionEnded
from django_idempotency.models import DatabaseNow, IdempotencyRecord, Status, check_move, in_utc
from django_idempotency.outcomes import Claimed, Operation, Snapshot, StoredResponse
from django_idempotency.policy import Policy, RowLock
from django_idempotency.stores.base import Owned, Seen, Store, Unlocked
from django_idempotency.stores.connections import alias as database_of
from django_idempotency.stores.connections import in_foreign_transaction
from django_idempotency.stores.errors import is_missing_savepoint, store_errors
from django_idempotency.stores.own_connections import own_connection
from django_idempotency.stores.savepoints import Savepoints
from django_idempotency.stores.transactions import CommitHooks, atomic, discard_if_abandoned, roll_back_left_open

# The reason in a record from the moment its row is locked until it is completed. Others see it only if the application
# commits the transaction in between.
COMMITTED_EARLY = gettext_noop("its transaction was committed before the run had ended")
SAVEPOINT = "django_idempotency_run"

COLUMNS = tuple(Snapshot.__dataclass_fields__)[:-1]
TIMES = ("created_at", "locked_at", "locked_until", "expires_at", "now")


def ahead(seconds: float) -> Combinable:
    """Return the database's time ``seconds`` from now."""
    return DatabaseNow() + Value(timedelta(seconds=seconds))


BY_VENDOR: dict[str, type[DatabaseStore]] = {}
BY_LOCK: dict[str, type[DatabaseStore]] = {}  # the same, for policies whose claims are locks


def database_store(policy: Policy, operation: Operation | None = None) -> DatabaseStore:
    """Return the store for the database of the record of ``operation``, chosen by the database's vendor."""
    using = database_of(policy, operation)
    vendor = connections[using].vendor
    kind = BY_VENDOR.get(vendor, DatabaseStore)
    return (BY_LOCK.get(vendor, kind) if policy.claims_by_lock else kind)(policy, using)


class DatabaseStore(Store):
    """The portable store: a look, then an insert, with the same outcomes as the one-statement claim on PostgreSQL."""

    transactional = True
    liveness_by_lock = True
    listing = True

    @classmethod
    def bind(cls, policy: Policy, operation: Operation | None, alias: str, options: Any) -> Store:
        return database_store(policy, operation)

    @property
    def connection(self) -> BaseDatabaseWrapper:
        return connections[self.name]

    @property
    def rows(self) -> QuerySet[IdempotencyRecord]:
        return IdempotencyRecord.objects.using(self.name)

    def in_foreign_transaction(self) -> bool:
        return in_foreign_transaction(self.connection)

    def discard_abandoned_connection(self) -> None:
        discard_if_abandoned(self.connection)

    def transaction(self) -> AbstractContextManager[None]:
        return atomic(self.name, durable=True)

    def savepoints(self) -> Callable[[Callable[[], None]], None]:
        return Savepoints(self.name, self.must_roll_back).run

    def roll_back_left_open(self, error: BaseException) -> None:
        roll_back_left_open(self.connection, error)

    def take_over_hooks(self, report: Callable[[Exception], None]) -> Callable[[], None]:
        return CommitHooks(self.connection, report).run

    def must_roll_back(self) -> bool:
        return transaction.get_rollback(self.name)

    def roll_back(self) -> None:
        transaction.set_rollback(True, using=self.name)

    def claim(self, operation: Operation, token: UUID) -> Claimed | Seen | Owned | None:
        with store_errors():
            record = self.read(operation.id)
            return Seen(record) if record else self._insert(operation, token)

    def _insert(self, operation: Operation, token: UUID) -> Claimed | None:
        record = IdempotencyRecord(
            id=operation.id,
            scope=operation.scope,
            key=operation.key,
            method=operation.method,
            path=operation.path,
            fingerprint=operation.fingerprint,
            trace=operation.trace,
            created_at=DatabaseNow(),
            **_claim(token, self.policy),
            **_kept_until(self.policy),
        )
        try:
            with _without_waiting_long(self.connection):
                record.save(using=self.name, force_insert=True)
        except IntegrityError:
            return None
        return Claimed(operation, token)

    def reconnect(self) -> bool:
        connection = self.connection
        if connection.in_atomic_block or connection.connection is None:
            return False
        connection.close()
        return True

    def give_back(self) -> bool:
        return self.reconnect()

    @contextmanager
    def try_lock(self, id: UUID) -> Iterator[Snapshot | Unlocked]:
        rows = self.rows.filter(pk=id)
        with store_errors(), atomic(rows.db):
            if not connections[rows.db].features.has_select_for_update:
                rows.update(updated_at=F("updated_at"))  # takes the write lock of the whole database
            record = _first(_for_update(rows, nowait=self.policy.lock == RowLock.NOWAIT))
            if record is not None:
                yield record
            else:  # SKIP LOCKED can't tell a locked row from a missing one
                yield Unlocked.BUSY if rows.exists() else Unlocked.ABSENT

    def reassign(self, record: Snapshot, operation: Operation, token: UUID) -> Claimed:
        expired = record.expires_at <= record.now
        check_move(record.status, Status.PROCESSING, expired=expired)
        attempts = 1 if expired and record.status in (Status.COMPLETED, Status.FAILED) else record.attempts + 1
        renewed: dict[str, Any] = {"created_at": DatabaseNow(), "replays": 0} if attempts == 1 else {}
        self.rows.filter(pk=record.id).update(
            attempts=attempts,
            method=operation.method,
            path=operation.path,
            fingerprint=operation.fingerprint,
            trace=operation.trace,
            on_hold=False,
            reason="",
            **renewed,
            **_claim(token, self.policy),
            **_kept_until(self.policy),
            **_response_columns(None),
        )
        return Claimed(operation, token, attempt=attempts, taken_over=record.status == Status.PROCESSING)

    def hold(self, record: Snapshot, reason: str) -> None:
        check_move(record.status, Status.FAILED)
        self.rows.filter(pk=record.id).update(on_hold=True, reason=reason, **_ended(Status.FAILED, self.policy))

    def read(self, id: UUID) -> Snapshot | None:
        with store_errors():
            return _first(self.rows.filter(pk=id))

    def now(self) -> datetime:
        no_rows = self.rows.filter(pk=UUID(int=0))
        with store_errors():  # an aggregate of no rows still returns one row
            now: datetime = no_rows.aggregate(now=Coalesce(Max("created_at"), DatabaseNow()))["now"]
        return in_utc(now, self.name)

    def lock(self, claim: Claimed) -> Claimed | None:
        """Lock by an UPDATE: the row, or the whole database if it has no row locks. Either is the proof of life."""
        try:
            with store_errors():
                if self._owned_by(claim).update(reason=COMMITTED_EARLY) != 1:
                    return None
                self._execute(self.connection.ops.savepoint_create_sql(SAVEPOINT))
        except StoreConflict:
            return None
        return replace(claim, transaction=SAVEPOINT)

    def lock_many(self, claims: Sequence[Claimed]) -> set[UUID]:
        """Lock without the mark that ``lock`` leaves: what a batch commits without a response is run again, alone."""
        in_order = sorted(claims, key=lambda claim: claim.id)
        with store_errors():
            return {claim.token for claim in in_order if self._owned_by(claim).update(updated_at=DatabaseNow()) == 1}

    def watch_transaction(self, claim: Claimed) -> Callable[[], None]:
        """Watch a savepoint. Once it is gone, the time that ``lock_many`` wrote tells whether that was by a COMMIT."""
        with store_errors():
            self._execute(self.connection.ops.savepoint_create_sql(SAVEPOINT))
            written = self._owned_by(claim).values_list("updated_at", flat=True)
            locked = list(written)

        def expect() -> None:
            try:
                self._expect_transaction(replace(claim, transaction=SAVEPOINT))
            except TransactionEnded:
                with store_errors():
                    if list(written.all()) != locked:
                        raise

        return expect

    def complete(self, claim: Claimed, response: StoredResponse, *, failure: bool = False) -> bool:
        self._expect_transaction(claim)
        status = Status.FAILED if failure else Status.COMPLETED
        return self._end(claim, reason="", **_ended(status, self.policy), **_response_columns(response))

    def _expect_transaction(self, claim: Claimed) -> None:
        if claim.transaction is None:
            return
        with store_errors():
            try:
                self._execute(self.connection.ops.savepoint_commit_sql(claim.transaction))
            except DatabaseError as error:
                if is_missing_savepoint(error):
                    raise TransactionEnded from error
                raise

    def _execute(self, statement: str) -> None:
        with self.connection.cursor() as cursor:
            cursor.execute(statement)

    def fail(self, claim: Claimed, reason: str, *, on_hold: bool = False) -> bool:
        if claim.transaction is None:
            return self._end(claim, on_hold=on_hold, reason=reason, **_ended(Status.FAILED, self.policy))
        committed = self._was_committed(claim)
        held = Case(When(committed, then=Value(True)), default=Value(on_hold))
        told = Case(When(committed, then=Value(COMMITTED_EARLY)), default=Value(reason))
        # In MariaDB, assignments see the effect of earlier ones, so the reason comes last.
        return self._end(claim, on_hold=held, **_ended(Status.FAILED, self.policy), reason=told)

    def _was_committed(self, claim: Claimed) -> Any:
        """Return the condition that the record's transaction is committed, although the record is not completed."""
        return Q(reason=COMMITTED_EARLY)

    def has_released(self, claim: Claimed) -> bool:
        return self.read(claim.id) is None

    def _end(self, claim: Claimed, **values: Any) -> bool:
        with store_errors():
            return self._owned_by(claim).update(**values) == 1

    def release(self, claim: Claimed) -> bool:
        self._expect_transaction(claim)
        with store_errors():
            rows = self._owned_by(claim)
            return rows._raw_delete(rows.db) == 1

    def renew(self, claims: Iterable[Claimed]) -> set[UUID]:
        rows = self._of({claim.token: claim.id for claim in claims})
        with store_errors(), transaction.atomic(using=self.name):
            free = {token: id for token, id in _for_update(rows, nowait=False).values_list("token", "pk") if token}
            self._of(free).update(locked_until=ahead(self.policy.lease))
        return set(free)

    def leases_left(self, records: Mapping[UUID, UUID]) -> dict[UUID, timedelta]:
        left = ExpressionWrapper(F("locked_until") - DatabaseNow(), output_field=DurationField())
        with store_errors():
            try_to_write(self.rows)
            rows = self._of(records).annotate(left=left).values_list("token", "left")
            return {token: lasts for token, lasts in rows if token}

    def expire(self, records: Mapping[UUID, UUID]) -> None:
        with store_errors():
            self._of(records).filter(locked_until__lt=DatabaseNow()).update(locked_until=F("locked_at"))

    def own_connection(self, *, seconds: float, schemas: Sequence[str] = ()) -> AbstractContextManager[None]:
        return own_connection(self.name, seconds=seconds, schemas=schemas)

    def _of(self, records: Mapping[UUID, UUID]) -> QuerySet[IdempotencyRecord]:
        return self.rows.filter(pk__in=list(records.values()), token__in=list(records))

    def records(self) -> Iterator[Snapshot]:
        with store_errors():
            rows = self.rows.annotate(database_now=DatabaseNow()).values_list(*COLUMNS, "database_now")
            yield from (snapshot(row, self.name) for row in rows.iterator())

    def delete(self, record: Snapshot) -> bool:
        with self.try_lock(record.id) as found:
            same = isinstance(found, Snapshot) and found.version == record.version
            return same and bool(self.rows.filter(pk=record.id)._raw_delete(self.name))

    def _owned_by(self, claim: Claimed) -> QuerySet[IdempotencyRecord]:
        # By id and token only: with the status, too, PostgreSQL would walk the partial index of all live rows.
        return self.rows.filter(pk=claim.id, token=claim.token)

    def count_replays(self, counts: dict[UUID, int]) -> None:
        with store_errors():
            for id, count in counts.items():
                self.rows.filter(pk=id).update(replays=F("replays") + count, last_replayed_at=DatabaseNow())


@contextmanager
def _without_waiting_long(connection: Any) -> Iterator[None]:
    """Open a transaction that waits a second at most for a row lock.

    That is enough for a rival to commit its insert, and too short for an owner to finish. An INSERT of an existing key
    waits for its owner: on MariaDB and MySQL 50 seconds by default, on PostgreSQL without a limit.
    """
    with ExitStack() as stack:
        if connection.vendor == "mysql" and not connection.mysql_is_mariadb:
            stack.enter_context(_lock_wait_of_the_session(connection))
        stack.enter_context(atomic(connection.alias))
        if connection.vendor == "postgresql":
            with connection.cursor() as cursor:
                cursor.execute("SET LOCAL lock_timeout = '1s'")
        elif getattr(connection, "mysql_is_mariadb", False):
            limited = "SET STATEMENT innodb_lock_wait_timeout = 1 FOR "
            stack.enter_context(
                connection.execute_wrapper(lambda execute, sql, *details: execute(limited + sql, *details))
            )
        yield


@contextmanager
def _lock_wait_of_the_session(connection: BaseDatabaseWrapper) -> Iterator[None]:
    """Limit it by the session: MySQL takes it neither for a statement nor for a transaction."""
    try:
        with connection.cursor() as cursor:
            cursor.execute("SET @django_idempotency = @@innodb_lock_wait_timeout, innodb_lock_wait_timeout = 1")
        yield
    finally:
        with suppress(DatabaseError, InterfaceError), connection.cursor() as cursor:  # it broke: so has the session
            cursor.execute("SET innodb_lock_wait_timeout = @django_idempotency")


def _first(rows: QuerySet[IdempotencyRecord]) -> Snapshot | None:
    row = next(iter(rows.annotate(database_now=DatabaseNow()).values_list(*COLUMNS, "database_now")), None)
    return snapshot(row, rows.db) if row else None


def snapshot(row: Any, using: str) -> Snapshot:
    """Return a record made of a row's values, which are in the order of the snapshot's fields."""
    record = dict(zip(Snapshot.__dataclass_fields__, row, strict=True))
    for name in TIMES:
        if record[name] is not None:
            record[name] = in_utc(record[name], using)
    if isinstance(record["response_headers"], str):
        with suppress(ValueError):  # damaged by hand
            record["response_headers"] = json.loads(record["response_headers"])
    for name in ("fingerprint", "trace", "response_body"):
        if isinstance(record[name], memoryview):  # as psycopg2 reads it
            record[name] = bytes(record[name])
    return Snapshot(**record)


def try_to_write(rows: QuerySet[IdempotencyRecord]) -> None:
    """Raise ``DatabaseError`` if no record can be updated, as in a read-only database. This locks nothing.

    On SQLite, it would take the write lock of the whole database, so it is not tried there.
    """
    if connections[rows.db].features.has_select_for_update:
        rows.filter(pk=UUID(int=0)).update(updated_at=F("updated_at"))


def _for_update(rows: QuerySet[IdempotencyRecord], *, nowait: bool | None = None) -> QuerySet[IdempotencyRecord]:
    """``nowait``: true for NOWAIT, false for SKIP LOCKED, ``None`` to wait."""
    features = connections[rows.db].features
    return rows.select_for_update(
        nowait=bool(nowait) and features.has_select_for_update_nowait,
        skip_locked=nowait is False and features.has_select_for_update_skip_locked,
        no_key=features.has_select_for_no_key_update,
    )


def _claim(token: UUID, policy: Policy) -> dict[str, Any]:
    return {
        "status": Status.PROCESSING,
        "mode": policy.mode,
        "hold_on_crash": policy.holds_on_crash,
        "token": token,
        "locked_at": DatabaseNow(),
        "locked_until": ahead(policy.lease),
        "updated_at": DatabaseNow(),
    }


def _ended(status: Status, policy: Policy) -> dict[str, Any]:
    claim = {"status": status, "token": None, "locked_at": None, "locked_until": None, "updated_at": DatabaseNow()}
    return {**claim, **_kept_until(policy)}


def _kept_until(policy: Policy) -> dict[str, Any]:
    return {"expires_at": ahead(policy.retention), "purge_at": ahead(policy.kept_for)}


def _response_columns(response: StoredResponse | None) -> dict[str, Any]:
    if response is None:
        return {"response_status": None, "response_headers": None, "response_body": None}
    return {
        "response_status": response.status,
        "response_headers": response.headers,
        "response_body": response.body,
    }
