"""How the records stand: cheap to ask, however large the table is."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from django.db import connections
from django.db.models import Count, DurationField, ExpressionWrapper, F, Q, Sum
from django.db.models.functions import Coalesce

from django_idempotency.maintenance import Records, database, purgeable, stuck
from django_idempotency.models import DatabaseNow, IdempotencyRecord, Status

MOST = 100_000  # rows that are looked at; a count that reaches it means "or more"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """Counts of up to ``MOST``, ages in seconds.

    ``rows`` and ``bytes``: of the table with its indexes, as the database estimates them; ``None`` if it doesn't.
    ``pending``: started or processing, and their ages since the claim. ``stuck``: those whose lease ran out.
    ``due``: past ``purge_at``. ``lag``: for how long the oldest of them.
    """

    rows: int | None
    bytes: int | None
    pending: int
    pending_p50: float
    pending_p95: float
    pending_p99: float
    stuck: int
    due: int
    lag: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Counts over the whole table. ``deduplicated``: the share of requests that were answered by a replay."""

    completed: int
    failed: int
    retryable: int
    held: int
    replays: int
    deduplicated: float


def stats(*, using: str | None = None) -> Stats:
    """What can be told by the indexes alone."""
    alias = database(using)
    ages = _pending_ages(IdempotencyRecord.objects.using(alias))
    rows, size = _size(alias)
    return Stats(
        rows=rows,
        bytes=size,
        pending=len(ages),
        pending_p50=_percentile(ages, 50),
        pending_p95=_percentile(ages, 95),
        pending_p99=_percentile(ages, 99),
        stuck=stuck(using=alias)[:MOST].count(),
        due=purgeable(using=alias)[:MOST].count(),
        lag=_lag(purgeable(using=alias)),
    )


def totals(*, using: str | None = None) -> Totals:
    """What takes a look at every record."""
    unanswered = Q(status=Status.FAILED, response_status__isnull=True)
    counted = IdempotencyRecord.objects.using(database(using)).aggregate(
        completed=Count("pk", filter=Q(status=Status.COMPLETED)),
        failed=Count("pk", filter=Q(status=Status.FAILED)),
        retryable=Count("pk", filter=unanswered & Q(held=False)),
        held=Count("pk", filter=Q(held=True)),
        replays=Coalesce(Sum("replays"), 0),
        runs=Coalesce(Sum("attempts"), 0),
    )
    requests = counted["replays"] + counted.pop("runs")
    return Totals(**counted, deduplicated=counted["replays"] / requests if requests else 0.0)


def _pending_ages(rows: Any) -> list[float]:
    age = ExpressionWrapper(DatabaseNow() - F("locked_at"), output_field=DurationField())
    return sorted(age.total_seconds() for age in rows.live().values_list(age, flat=True)[:MOST])


def _percentile(ages: list[float], percent: int) -> float:
    return ages[min(len(ages) * percent // 100, len(ages) - 1)] if ages else 0.0


def _lag(due: Records) -> float:
    late = ExpressionWrapper(DatabaseNow() - F("purge_at"), output_field=DurationField())
    oldest: timedelta | None = due.order_by("purge_at").values_list(late, flat=True).first()
    return oldest.total_seconds() if oldest else 0.0


_SIZE = {
    "postgresql": (
        "SELECT nullif(reltuples, -1)::bigint, pg_total_relation_size(oid) FROM pg_class WHERE oid = %s::regclass"
    ),
    "mysql": (
        "SELECT table_rows, data_length + index_length FROM information_schema.tables"
        " WHERE table_schema = database() AND table_name = %s"
    ),
}


def _size(alias: str) -> tuple[int | None, int | None]:
    statement = _SIZE.get(connections[alias].vendor)
    if statement is None:
        return None, None
    with connections[alias].cursor() as cursor:
        cursor.execute(statement, [IdempotencyRecord._meta.db_table])
        rows, size = cursor.fetchone()
        return rows, size
