"""The records that maintenance works on, and what it needs to know about them."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Protocol
from uuid import UUID

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import (
    BooleanField,
    DateTimeField,
    DurationField,
    ExpressionWrapper,
    F,
    Q,
)
from django.db.models.expressions import Combinable
from django.db.models.functions import Coalesce
from django.db.models.sql.compiler import SQLCompiler

from django_idempotency.models import (
    DatabaseNow,
    IdempotencyRecord,
    RecordQuerySet,
    Status,
)
from django_idempotency.stores.connections import databases, record_database
from django_idempotency.values.outcomes import EntryPoint, Operation, Snapshot
from django_idempotency.values.registry import Registry

Records = RecordQuerySet
TABLE = IdempotencyRecord._meta.db_table
HAS_BODY = ExpressionWrapper(
    Q(response_body__isnull=False), output_field=BooleanField()
)


class _Sum(ExpressionWrapper):  # type: ignore[type-arg]
    """The sum of a time and a duration.

    On PostgreSQL it is computed in UTC, because a distributed table can't add in the
    session's time zone.
    """

    def as_postgresql(
        self, compiler: SQLCompiler, connection: BaseDatabaseWrapper
    ) -> tuple[str, list[Any]]:
        (time, first), (duration, others) = map(
            compiler.compile, self.expression.get_source_expressions()
        )
        return f"timezone('UTC', timezone('UTC', {time}) + {duration})", [
            *first,
            *others,
        ]


def ended(status: Status) -> dict[str, Any]:
    """Return the columns of a record whose claim has ended with ``status``.

    It is kept as long again as its policy said: at the claim, because a live record
    does not expire, or at the end of a failed run.
    """
    # The times come first, because on MariaDB later assignments see the new values of
    # earlier ones.
    times = {
        "expires_at": _kept_again("expires_at"),
        "purge_at": _kept_again("purge_at"),
        "updated_at": DatabaseNow(),
    }
    return times | {
        "status": status,
        "token": None,
        "locked_at": None,
        "locked_until": None,
    }


def _kept_again(name: str) -> Combinable:
    kept_for = ExpressionWrapper(
        F(name) - Coalesce("locked_at", "updated_at"), output_field=DurationField()
    )
    return _Sum(DatabaseNow() + kept_for, output_field=DateTimeField())


def operation_of(record: IdempotencyRecord) -> Operation:
    """Return the operation that the record is of, for signals."""
    return Operation(
        scope=record.scope,
        key=record.key,
        fingerprint=bytes(record.fingerprint),
        method=record.method,
        path=record.path,
        entry_point=EntryPoint.MAINTENANCE,
    )


def records(using: str | None) -> Records:
    """Return all records in the database ``using``, or in the one where the project's
    policy keeps them.
    """
    return IdempotencyRecord.objects.using(record_database(using))


def record_of(snapshot: Snapshot) -> Any:
    """Return a record of a store outside the database as operators read it, with
    ``now``, ``locked`` and ``has_body``.

    Such a store keeps no request, and no time of the last change: that of the first
    claim stands for it.
    """
    columns = {each.attname for each in IdempotencyRecord._meta.concrete_fields}
    known = {
        name: getattr(snapshot, name) for name in columns if hasattr(snapshot, name)
    }
    ends = {
        "updated_at": snapshot.locked_at or snapshot.created_at,
        "purge_at": snapshot.expires_at,
        "replays": 0,
    }
    record: Any = IdempotencyRecord(**known | ends)
    record.now, record.locked, record.has_body = (
        snapshot.now,
        False,
        snapshot.response_body is not None,
    )
    record._state.db = databases()[0]  # for the form of its times
    return record


class Sharding(Protocol):
    """What a wing knows of records that are on several servers."""

    def is_distributed(self, using: str) -> bool:
        """Return whether the rows are on several servers, so that no statement can lock
        arbitrary ones.

        Raises Django's ``OperationalError`` if the database can't be reached.
        """

    def in_shards(self, ids: Collection[UUID], using: str) -> list[Collection[UUID]]:
        """Return ``ids`` in groups, each of which one statement can lock: one group
        unless they are distributed.
        """


shardings: Registry[Sharding] = Registry()  # asked about the records of each database


def is_sharded(using: str) -> bool:
    """Return whether no statement can lock arbitrary records, because they are on
    several servers.
    """
    return any(each.is_distributed(using) for each in shardings)


def lockable(ids: Collection[UUID], using: str) -> list[Collection[UUID]]:
    """Return ``ids`` in groups, each of which one statement can lock: one unless the
    records are sharded.
    """
    return next((each.in_shards(ids, using) for each in shardings), [ids])


def locked(rows: Records) -> Records:
    """Return ``rows``, to be locked as they are read, without those that are locked
    already.
    """
    features = connections[rows.db].features
    if not features.has_select_for_update:
        # This takes the write lock of the whole database before anything is read.
        records(rows.db).filter(pk=UUID(int=0)).update(updated_at=F("updated_at"))
    return rows.select_for_update(
        skip_locked=features.has_select_for_update_skip_locked,
        no_key=features.has_select_for_no_key_update,
    )
