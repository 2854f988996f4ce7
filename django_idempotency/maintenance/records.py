"""The records that maintenance works on, and what it needs to know of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from uuid import UUID

from django.db import connections
from django.db.models import BooleanField, DateTimeField, DurationField, ExpressionWrapper, F, Q
from django.db.models.expressions import Combinable
from django.db.models.functions import Coalesce

from django_idempotency.conf import conf
from django_idempotency.maintenance.batches import LONGEST, batch_size, deadline
from django_idempotency.models import DatabaseNow, IdempotencyRecord, RecordQuerySet
from django_idempotency.outcomes import EntryPoint, Operation
from django_idempotency.stats.queries import at_most
from django_idempotency.stores.connections import record_database

Records = RecordQuerySet
TABLE = IdempotencyRecord._meta.db_table
HAS_BODY = ExpressionWrapper(Q(response_body__isnull=False), output_field=BooleanField())


def kept_again(name: str) -> Combinable:
    """A time as far from now as it was from when it was set: at the claim, or at the end of a failed run."""
    kept_for = ExpressionWrapper(F(name) - Coalesce("locked_at", "updated_at"), output_field=DurationField())
    return ExpressionWrapper(DatabaseNow() + kept_for, output_field=DateTimeField())


def operation_of(record: IdempotencyRecord) -> Operation:
    """What the record is of, for signals."""
    return Operation(
        scope=record.scope,
        key=record.key,
        fingerprint=bytes(record.fingerprint),
        method=record.method,
        path=record.path,
        entry_point=EntryPoint.MAINTENANCE,
    )


def records(using: str | None) -> Records:
    """All records in the database ``using``, or where the project's policy keeps them."""
    return IdempotencyRecord.objects.using(record_database(using))


@dataclass(frozen=True, slots=True)
class Page:
    """Records in the order of their ids. ``after``: the last of them that was looked at. ``last``: none follows."""

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
    """Yield the whole table in pages of ``batch`` records, after the id ``after``; the others are as for ``erase``.

    ``near``: narrows it by the primary key.
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


def locked(rows: Records) -> Records:
    """``rows`` without those that are locked."""
    features = connections[rows.db].features
    if not features.has_select_for_update:
        # Takes the write lock of the whole database, before anything is read.
        records(rows.db).filter(pk=UUID(int=0)).update(updated_at=F("updated_at"))
    return rows.select_for_update(
        skip_locked=features.has_select_for_update_skip_locked, no_key=features.has_select_for_no_key_update
    )
