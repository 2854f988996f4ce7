"""The records that maintenance works on, and what it needs to know about them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import BooleanField, DateTimeField, DurationField, ExpressionWrapper, F, Q
from django.db.models.expressions import Combinable
from django.db.models.functions import Coalesce
from django.db.models.sql.compiler import SQLCompiler

from django_idempotency.conf import conf
from django_idempotency.maintenance.batches import LONGEST, batch_size, deadline
from django_idempotency.models import DatabaseNow, IdempotencyRecord, RecordQuerySet
from django_idempotency.outcomes import EntryPoint, Operation
from django_idempotency.stats.queries import at_most
from django_idempotency.stores.connections import record_database
from django_idempotency.stores.distribution import in_shards, is_distributed

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


@dataclass(frozen=True, slots=True)
class Page:
    """Records in the order of their ids. ``after``: the last id that was looked at. ``last``: no page follows."""

    rows: Records
    after: UUID | None
    last: bool


def pages(
    using: str | None,
    *,
    batch: int,
    pause: float | None,
    max_seconds: float | None,
    after: UUID | None,
    near: Callable[[Records], Records] = lambda rows: rows,
) -> Iterator[Page]:
    """Yield the whole table in pages of ``batch`` records, after the id ``after``. Other arguments as for ``erase``.

    ``near``: narrows the table by the primary key.
    """
    batch = batch_size(batch, record_database(using))
    pause = conf().cleanup_pause if pause is None else pause
    ends = deadline(max_seconds)
    while True:
        rows = near(records(using)).order_by("pk")
        rows = rows if after is None else rows.filter(pk__gt=after)
        with at_most(LONGEST, rows.db):
            last = next(iter(rows.values_list("pk", flat=True)[batch - 1 : batch]), None)
        yield Page(rows if last is None else rows.filter(pk__lte=last), last or after, last is None)
        if last is None or ends():
            return
        after = last
        time.sleep(pause)


def lockable(rows: Records, ids: Iterable[UUID]) -> list[Records]:
    """Return ``rows`` in parts, each of which one statement can lock: one part, unless the table is distributed.

    ``ids``: the ids of the wanted rows, read only if the table is distributed.
    """
    if not is_distributed(rows.db):
        return [rows]
    return [rows.filter(pk__in=part) for part in in_shards(list(ids), rows.db)]


def locked(rows: Records) -> Records:
    """Return ``rows``, to be locked as they are read, without those that are locked already."""
    features = connections[rows.db].features
    if not features.has_select_for_update:
        # This takes the write lock of the whole database before anything is read.
        records(rows.db).filter(pk=UUID(int=0)).update(updated_at=F("updated_at"))
    return rows.select_for_update(
        skip_locked=features.has_select_for_update_skip_locked, no_key=features.has_select_for_no_key_update
    )
