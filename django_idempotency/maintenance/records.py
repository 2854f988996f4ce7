"""The records that maintenance works on, and what it needs to know about them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from uuid import UUID

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import BooleanField, DateTimeField, DurationField, ExpressionWrapper, F, Q
from django.db.models.expressions import Combinable
from django.db.models.functions import Coalesce
from django.db.models.sql.compiler import SQLCompiler

from django_idempotency.maintenance.stats import outside_store, outside_stores
from django_idempotency.models import DatabaseNow, IdempotencyRecord, RecordQuerySet
from django_idempotency.stores import Store
from django_idempotency.stores.connections import databases, record_database
from django_idempotency.stores.sharding import in_shards, is_distributed
from django_idempotency.values.outcomes import EntryPoint, Operation, Snapshot

Records = RecordQuerySet
TABLE = IdempotencyRecord._meta.db_table
HAS_BODY = ExpressionWrapper(Q(response_body__isnull=False), output_field=BooleanField())


class _Sum(ExpressionWrapper):  # type: ignore[type-arg]
    """The sum of a time and a duration.

    On PostgreSQL it is computed in UTC, because a distributed table can't add in the session's time zone.
    """

    def as_postgresql(self, compiler: SQLCompiler, connection: BaseDatabaseWrapper) -> tuple[str, list[Any]]:
        (time, first), (duration, others) = map(compiler.compile, self.expression.get_source_expressions())
        return f"timezone('UTC', timezone('UTC', {time}) + {duration})", [*first, *others]


def kept_again(name: str) -> Combinable:
    """Return a time as far from now as it was from when it was set: at the claim, or at the end of a failed run."""
    kept_for = ExpressionWrapper(F(name) - Coalesce("locked_at", "updated_at"), output_field=DurationField())
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
    """Return all records in the database ``using``, or in the one where the project's policy keeps them."""
    return IdempotencyRecord.objects.using(record_database(using))


def record_of(snapshot: Snapshot) -> Any:
    """Return a record of a store outside the database as operators read it, with ``now``, ``locked`` and ``has_body``.

    Such a store keeps no request, and no time of the last change: that of the first claim stands for it.
    """
    columns = {each.attname for each in IdempotencyRecord._meta.concrete_fields}
    known = {name: getattr(snapshot, name) for name in columns if hasattr(snapshot, name)}
    ends = {"updated_at": snapshot.locked_at or snapshot.created_at, "purge_at": snapshot.expires_at, "replays": 0}
    record: Any = IdempotencyRecord(**known | ends)
    record.now, record.locked, record.has_body = snapshot.now, False, snapshot.response_body is not None
    record._state.db = databases()[0]  # for the form of its times
    return record


def stores_outside() -> list[Store]:
    """Return the stores of ``STORES`` that keep no records in a database."""
    return [outside_store(alias) for alias in outside_stores()]


def is_sharded(rows: Any) -> bool:
    """Return whether no statement can lock arbitrary ones of ``rows``, because they are on several servers."""
    return rows.model is IdempotencyRecord and is_distributed(rows.db)


def lockable(rows: Any, ids: Iterable[UUID]) -> list[Any]:
    """Return ``rows`` in parts, each of which one statement can lock: one part, unless the table is distributed.

    ``ids``: the ids of the wanted rows, read only if the table is distributed.
    """
    if not is_sharded(rows):
        return [rows]
    return [rows.filter(pk__in=part) for part in in_shards(list(ids), rows.db)]


def locked(rows: Any) -> Any:
    """Return ``rows``, to be locked as they are read, without those that are locked already."""
    features = connections[rows.db].features
    if not features.has_select_for_update:
        # This takes the write lock of the whole database before anything is read.
        meta = rows.model._meta
        none = rows.model._base_manager.using(rows.db).filter(pk=meta.pk.to_python(0))
        none.update(**{meta.fields[-1].name: F(meta.fields[-1].name)})
    return rows.select_for_update(
        skip_locked=features.has_select_for_update_skip_locked, no_key=features.has_select_for_no_key_update
    )
