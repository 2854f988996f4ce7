"""Records in a database, by Django's ORM: works on every database that Django's ``select_for_update`` works on."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from django.db import (
    IntegrityError,
    InterfaceError,
    InternalError,
    OperationalError,
    ProgrammingError,
    connections,
    router,
    transaction,
)
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import F, Max, QuerySet, Value
from django.db.models.expressions import Combinable
from django.db.models.functions import Coalesce

from django_idempotency.exceptions import StoreConflict, StoreRefused, StoreUnavailable
from django_idempotency.logs import cause, log
from django_idempotency.models import DatabaseNow, IdempotencyRecord, Status, check_move
from django_idempotency.outcomes import Claimed, Operation, Snapshot, StoredResponse
from django_idempotency.policy import Lock as LockChoice
from django_idempotency.policy import Mode, OnCrash, Policy
from django_idempotency.stores.base import Lock, Seen, Store

# The CHECKs of partitioning: of a table before it becomes the first partition, and of a partition that is to go.
UNTIL, RETIRED = "idempotency_record_until", "idempotency_record_retired"
NO_PARTITION = "There is no partition for a new record. Run manage.py idempotency_partitions ensure, and schedule it."

COLUMNS = tuple(Snapshot.__dataclass_fields__)[:-1]


def alias(policy: Policy) -> str:
    """The database of the records."""
    return policy.using or router.db_for_write(IdempotencyRecord)


@contextmanager
def store_errors() -> Iterator[None]:
    """Turn the database's own failures into ``StoreUnavailable``."""
    try:
        yield
    except (OperationalError, InterfaceError) as error:
        raise _kind(error)(str(error).strip()) from error
    except (InternalError, ProgrammingError) as error:
        if getattr(error.__cause__, "sqlstate", None) not in STALE_STATES:
            raise
        raise StoreUnavailable(str(error).strip()) from error
    except IntegrityError as error:
        violated = _violated_check(error)
        if violated == RETIRED:  # a statement as old as what is being dropped: the next one goes elsewhere
            raise StoreConflict(str(error).strip()) from error
        if violated in ("", UNTIL):
            log(logging.CRITICAL, "no_partition", "%s (%s)", NO_PARTITION, cause(error))
            raise StoreRefused(NO_PARTITION) from error
        raise


def _kind(error: Exception) -> type[StoreUnavailable]:
    if is_conflict(error):
        return StoreConflict
    return StoreRefused if _says(error, TOO_LONG_STATES, TOO_LONG_NUMBERS) else StoreUnavailable


def _violated_check(error: IntegrityError) -> str | None:
    """The name of a CHECK in PostgreSQL; empty where there was no partition for a row, which counts as one."""
    driver: Any = error.__cause__
    if getattr(driver, "sqlstate", None) != "23514":
        return None
    return driver.diag.constraint_name or ""


def ahead(seconds: float) -> Combinable:
    """The database's time ``seconds`` from now."""
    return DatabaseNow() + Value(timedelta(seconds=seconds))


class DatabaseStore(Store):
    """The portable store: a look, then an insert, with the same outcomes as the one-statement claim on PostgreSQL."""

    def claim(self, operation: Operation, token: UUID, policy: Policy) -> Claimed | Seen | None:
        with store_errors():
            record = self.read(operation.id, policy)
            return Seen(record) if record else self._insert(operation, token, policy)

    def _insert(self, operation: Operation, token: UUID, policy: Policy) -> Claimed | None:
        record = IdempotencyRecord(
            id=operation.id,
            scope=operation.scope,
            key=operation.key,
            method=operation.method,
            path=operation.path,
            fingerprint=operation.fingerprint,
            created_at=DatabaseNow(),
            **_claim(token, policy),
            **_kept_until(policy),
        )
        try:
            with transaction.atomic(using=alias(policy)), _without_waiting_long(connections[alias(policy)]):
                record.save(using=alias(policy), force_insert=True)
        except IntegrityError:
            return None
        return Claimed(operation, token)

    def reconnect(self, policy: Policy) -> bool:
        connection = connections[alias(policy)]
        if connection.in_atomic_block or connection.connection is None:
            return False
        connection.close()
        return True

    @contextmanager
    def contend(self, id: UUID, policy: Policy) -> Iterator[Snapshot | Lock]:
        rows = _rows(policy).filter(pk=id)
        with store_errors(), transaction.atomic(using=rows.db):
            if not connections[rows.db].features.has_select_for_update:
                rows.update(updated_at=F("updated_at"))  # takes the write lock of the whole database
            record = _first(_for_update(rows, policy, nowait=policy.lock == LockChoice.NOWAIT))
            if record is not None:
                yield record
            else:  # SKIP LOCKED can't tell a locked row from none
                yield Lock.BUSY if rows.exists() else Lock.ABSENT

    def take(self, record: Snapshot, operation: Operation, token: UUID, policy: Policy) -> Claimed:
        expired = record.expires_at <= record.now
        check_move(record.status, Status.PROCESSING, expired=expired)
        attempts = 1 if expired and record.status in (Status.COMPLETED, Status.FAILED) else record.attempts + 1
        renewed: dict[str, Any] = {"created_at": DatabaseNow(), "replays": 0} if attempts == 1 else {}
        _rows(policy).filter(pk=record.id).update(
            attempts=attempts,
            method=operation.method,
            path=operation.path,
            fingerprint=operation.fingerprint,
            held=False,
            reason="",
            **renewed,
            **_claim(token, policy),
            **_kept_until(policy),
            **_answer(None),
        )
        return Claimed(operation, token, attempt=attempts, taken_over=record.status == Status.PROCESSING)

    def hold(self, record: Snapshot, reason: str, policy: Policy) -> None:
        check_move(record.status, Status.FAILED)
        _rows(policy).filter(pk=record.id).update(held=True, reason=reason, **_ended(Status.FAILED, policy))

    def read(self, id: UUID, policy: Policy) -> Snapshot | None:
        with store_errors():
            return _first(_rows(policy).filter(pk=id))

    def now(self, policy: Policy) -> datetime:
        nobody = _rows(policy).filter(pk=UUID(int=0))
        with store_errors():  # an aggregate of no rows is a row all the same
            now: datetime = nobody.aggregate(now=Coalesce(Max("created_at"), DatabaseNow()))["now"]
        return now

    def lock(self, claim: Claimed, policy: Policy) -> bool:
        rows = _held_by(claim, policy)
        try:
            with store_errors():
                if not connections[rows.db].features.has_select_for_update:
                    # Without row locks the write lock of the whole database is the proof of life.
                    return rows.update(updated_at=F("updated_at")) == 1
                return _first(_for_update(rows, policy)) is not None
        except StoreConflict:
            return False

    def complete(self, claim: Claimed, response: StoredResponse, policy: Policy, *, failure: bool = False) -> bool:
        status = Status.FAILED if failure else Status.COMPLETED
        return self._end(claim, policy, **_ended(status, policy), **_answer(response))

    def fail(self, claim: Claimed, reason: str, policy: Policy, *, held: bool = False) -> bool:
        return self._end(claim, policy, held=held, reason=reason, **_ended(Status.FAILED, policy))

    def _end(self, claim: Claimed, policy: Policy, **values: Any) -> bool:
        with store_errors():
            return _held_by(claim, policy).update(**values) == 1

    def release(self, claim: Claimed, policy: Policy) -> bool:
        with store_errors():
            rows = _held_by(claim, policy)
            return rows._raw_delete(rows.db) == 1

    def renew(self, claims: Iterable[Claimed], policy: Policy) -> set[UUID]:
        rows = _rows(policy).filter(pk__in=[claim.id for claim in claims], token__in=[claim.token for claim in claims])
        with store_errors():
            rows.update(locked_until=ahead(policy.lease))
            return {token for token in rows.values_list("token", flat=True) if token is not None}

    def count_replays(self, counts: dict[UUID, int], policy: Policy) -> None:
        with store_errors():
            for id, count in counts.items():
                _rows(policy).filter(pk=id).update(replays=F("replays") + count, last_replayed_at=DatabaseNow())


# PostgreSQL, where another connection may help: a server that only reads, such as the primary before a failover; a
# transaction that was idle, or lasted, for too long; and a prepared statement that is gone, because somebody said
# DISCARD ALL or DEALLOCATE ALL.
STALE_STATES = ("25006", "25P03", "25P04", "26000")
# PostgreSQL: lock not available, serialization failure, deadlock.
CONFLICT_STATES = ("55P03", "40001", "40P01")
# MariaDB and MySQL: lock wait timeout, deadlock, record changed since last read, lock not available.
CONFLICT_NUMBERS = (1205, 1213, 1020, 3572)
# A limit of the database's own on how long a statement may take; or somebody cancelled it.
TOO_LONG_STATES, TOO_LONG_NUMBERS = ("57014",), (1969, 1317, 3024)


def is_conflict(error: Exception) -> bool:
    """Whether ``error`` says that another transaction was in the way."""
    is_sqlites = getattr(error.__cause__, "sqlite_errorname", "").startswith(("SQLITE_BUSY", "SQLITE_LOCKED"))
    return is_sqlites or _says(error, CONFLICT_STATES, CONFLICT_NUMBERS)


def _says(error: Exception, states: Sequence[str], numbers: Sequence[int]) -> bool:
    return getattr(error.__cause__, "sqlstate", None) in states or next(iter(error.args), None) in numbers


def told(error: Exception) -> str:
    """What a database said, without the details, which may quote a row."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def _without_waiting_long(connection: Any) -> AbstractContextManager[None]:
    """Wait a second at most for a row lock: enough for a rival to commit its insert, too short for a holder to finish.

    MariaDB's INSERT of a key that is there waits for whoever has it locked, 50 seconds by default.
    """
    if not getattr(connection, "mysql_is_mariadb", False):
        return nullcontext()
    limited = "SET STATEMENT innodb_lock_wait_timeout = 1 FOR "
    wrapper: AbstractContextManager[None] = connection.execute_wrapper(
        lambda execute, sql, *details: execute(limited + sql, *details)
    )
    return wrapper


def _rows(policy: Policy) -> QuerySet[IdempotencyRecord]:
    return IdempotencyRecord.objects.using(alias(policy))


def _held_by(claim: Claimed, policy: Policy) -> QuerySet[IdempotencyRecord]:
    # By id and token only: with the status named here, PostgreSQL would walk the partial index of all live rows.
    return _rows(policy).filter(pk=claim.id, token=claim.token)


def _first(rows: QuerySet[IdempotencyRecord]) -> Snapshot | None:
    row = next(iter(rows.annotate(database_now=DatabaseNow()).values_list(*COLUMNS, "database_now")), None)
    return snapshot(row) if row else None


def snapshot(row: Any) -> Snapshot:
    """A record of a row's values, in the order of the snapshot's fields."""
    record = dict(zip(Snapshot.__dataclass_fields__, row, strict=True))
    if isinstance(record["response_headers"], str):
        record["response_headers"] = json.loads(record["response_headers"])
    return Snapshot(**record)


def _for_update(
    rows: QuerySet[IdempotencyRecord], policy: Policy, *, nowait: bool | None = None
) -> QuerySet[IdempotencyRecord]:
    """``nowait``: true for NOWAIT, false for SKIP LOCKED, ``None`` to wait."""
    features = connections[alias(policy)].features
    return rows.select_for_update(
        nowait=bool(nowait) and features.has_select_for_update_nowait,
        skip_locked=nowait is False and features.has_select_for_update_skip_locked,
        no_key=features.has_select_for_no_key_update,
    )


def _claim(token: UUID, policy: Policy) -> dict[str, Any]:
    return {
        "status": Status.PROCESSING,
        "mode": policy.mode,
        "hold_on_crash": holds_on_crash(policy),
        "token": token,
        "locked_at": DatabaseNow(),
        "locked_until": ahead(policy.lease),
        "updated_at": DatabaseNow(),
    }


def holds_on_crash(policy: Policy) -> bool:
    """Whether a dead holder's record waits for a person; in atomic mode there is nothing to decide."""
    return policy.mode == Mode.LEASE and policy.on_crash == OnCrash.HOLD


def _ended(status: Status, policy: Policy) -> dict[str, Any]:
    claim = {"status": status, "token": None, "locked_at": None, "locked_until": None, "updated_at": DatabaseNow()}
    return {**claim, **_kept_until(policy)}


def _kept_until(policy: Policy) -> dict[str, Any]:
    return {"expires_at": ahead(policy.retention), "purge_at": ahead(policy.kept_for)}


def _answer(response: StoredResponse | None) -> dict[str, Any]:
    if response is None:
        return {"response_status": None, "response_headers": None, "response_body": None}
    return {
        "response_status": response.status,
        "response_headers": response.headers,
        "response_body": response.body,
    }


def in_foreign_transaction(connection: BaseDatabaseWrapper) -> bool:
    """Whether a transaction is open that is not one of Django's own test cases', or will be, with autocommit off."""
    if not connection.in_atomic_block:
        return not (connection.settings_dict["AUTOCOMMIT"] if connection.connection is None else connection.autocommit)
    blocks = getattr(connection, "atomic_blocks", [])
    return not all(getattr(block, "_from_testcase", False) for block in blocks)
