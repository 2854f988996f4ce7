"""How the records stand, and what happened to them of late: cheap to ask, however large the table is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from django.db import connections, transaction
from django.db.models import Count, DurationField, ExpressionWrapper, F, Q, QuerySet, Sum
from django.db.models.functions import Coalesce, TruncHour

from django_idempotency.conf import conf
from django_idempotency.maintenance import Records, database, purgeable, stuck
from django_idempotency.models import DatabaseNow, IdempotencyRecord, IdempotencyTally, Status
from django_idempotency.stores.database import ahead

MOST = 100_000  # rows that are looked at; a count that reaches it means "or more"
HOUR, DAY = 3600, 24 * 3600

# --- How they stand --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Size:
    """Of the table, as the database estimates it; ``None`` where it doesn't.

    ``bytes``: with the indexes. ``dead_rows``, ``dead_bytes``: deleted or outdated, and not yet vacuumed.
    """

    rows: int | None = None
    bytes: int | None = None
    table_bytes: int | None = None
    index_bytes: int | None = None
    dead_rows: int | None = None
    dead_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class Pending:
    """Started or processing, their ages since the claim, and the ``stuck`` of them: those whose lease ran out.

    ``held``: those that wait for a person.
    """

    pending: int
    pending_p50: float
    pending_p95: float
    pending_p99: float
    pending_oldest: float
    stuck: int
    held: int


@dataclass(frozen=True, kw_only=True)
class Due:
    """Past ``purge_at``; ``lag``: for how long the oldest of them."""

    due: int
    lag: float


@dataclass(frozen=True, kw_only=True)
class Stats(Due, Pending, Size):
    """All of it. Counts of up to ``MOST``, ages in seconds."""


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
    parts = (size(using=using), pending(using=using), due(using=using))
    return Stats(**{name: value for part in parts for name, value in asdict(part).items()})


def pending(*, using: str | None = None, most: int = MOST) -> Pending:
    """Of up to ``most`` rows: those whose lease ran out, or runs out, first."""
    rows = IdempotencyRecord.objects.using(database(using))
    ages = _pending_ages(rows, most)
    return Pending(
        pending=len(ages),
        pending_p50=_percentile(ages, 50),
        pending_p95=_percentile(ages, 95),
        pending_p99=_percentile(ages, 99),
        pending_oldest=ages[-1] if ages else 0.0,
        stuck=stuck(using=using)[:most].count(),
        held=rows.filter(held=True, locked_until__isnull=True)[:most].count(),
    )


def due(*, using: str | None = None, most: int = MOST) -> Due:
    """Of up to ``most`` rows."""
    return Due(due=purgeable(using=using)[:most].count(), lag=_lag(purgeable(using=using)))


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


def _pending_ages(rows: Any, most: int) -> list[float]:
    age = ExpressionWrapper(DatabaseNow() - F("locked_at"), output_field=DurationField())
    live = rows.live().order_by("locked_until")
    return sorted(age.total_seconds() for age in live.values_list(age, flat=True)[:most])


def _percentile(ages: list[float], percent: int) -> float:
    return ages[min(len(ages) * percent // 100, len(ages) - 1)] if ages else 0.0


def _lag(due: Records) -> float:
    late = ExpressionWrapper(DatabaseNow() - F("purge_at"), output_field=DurationField())
    oldest: timedelta | None = due.order_by("purge_at").values_list(late, flat=True).first()
    return oldest.total_seconds() if oldest else 0.0


# A partitioned table is the sum of its partitions.
_SIZE = {
    "postgresql": """
        SELECT sum(nullif(reltuples, -1))::bigint, sum(pg_total_relation_size(oid))::bigint,
            sum(pg_table_size(oid))::bigint, sum(pg_indexes_size(oid))::bigint,
            sum(pg_stat_get_dead_tuples(oid))::bigint,
            sum(pg_relation_size(oid) * pg_stat_get_dead_tuples(oid)
                / greatest(pg_stat_get_dead_tuples(oid) + pg_stat_get_live_tuples(oid), 1))::bigint
        FROM (SELECT %(table)s::regclass UNION SELECT relid FROM pg_partition_tree(%(table)s)) AS parts (relid)
        JOIN pg_class ON oid = relid WHERE relkind = 'r'
    """,
    "mysql": """
        SELECT table_rows, data_length + index_length, data_length, index_length, NULL, NULL
        FROM information_schema.tables WHERE table_schema = database() AND table_name = %(table)s
    """,
}


def size(*, using: str | None = None) -> Size:
    """From the database's own statistics; nothing on SQLite."""
    connection = connections[database(using)]
    statement = _SIZE.get(connection.vendor)
    if statement is None:
        return Size()
    with connection.cursor() as cursor:
        cursor.execute(statement, {"table": IdempotencyRecord._meta.db_table})
        rows, total, table, indexes, dead_rows, dead = cursor.fetchone()
    return Size(rows=rows, bytes=total, table_bytes=table, index_bytes=indexes, dead_rows=dead_rows, dead_bytes=dead)


# --- What happened of late -------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Activity:
    """What happened to keys in a span of time, by the tallies.

    ``requests``: those with a key that got an outcome. ``deduplicated``: the share of them that a replay answered.
    ``conflicts``: came while the first was running. ``unknown``: no more is known of their key (``late_after``).
    ``lost``: claims that a rival was quicker to run, counted as the duplicates that they are. ``stale_writes``: holders
    that came back too late. ``store_errors``: the store could not be reached.
    """

    requests: int = 0
    replays: int = 0
    deduplicated: float = 0.0
    conflicts: int = 0
    mismatches: int = 0
    takeovers: int = 0
    held: int = 0
    refused_late: int = 0
    completed: int = 0
    failed: int = 0
    released: int = 0
    lost: int = 0
    stale_writes: int = 0
    reaped: int = 0
    store_errors: int = 0

    @classmethod
    def of(cls, counts: Mapping[str, int]) -> Activity:
        """Of counts by the name of the event, which is that of its signal."""

        def sum_of(*events: str) -> int:
            return sum(counts.get(event, 0) for event in events)

        conflicts = sum_of("in_flight", "pending_timeout")
        ran = max(0, sum_of("claimed", "taken_over") - sum_of("claim_lost"))
        requests = ran + sum_of("replayed", "mismatched", "held", "refused_late") + conflicts
        return cls(
            requests=requests,
            replays=sum_of("replayed"),
            deduplicated=sum_of("replayed") / requests if requests else 0.0,
            conflicts=conflicts,
            mismatches=sum_of("mismatched"),
            takeovers=sum_of("taken_over"),
            held=sum_of("held"),
            refused_late=sum_of("refused_late"),
            completed=sum_of("completed"),
            failed=sum_of("failed"),
            released=sum_of("released"),
            lost=sum_of("claim_lost"),
            stale_writes=sum_of("stale_write_rejected"),
            reaped=sum_of("reaped"),
            store_errors=sum_of("store_failed"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """What happened from ``since`` on, until the next span begins."""

    since: datetime
    activity: Activity


def activity(seconds: float, *, using: str | None = None) -> Activity:
    """What happened in the last so many seconds, to within the five minutes that a tally stands for."""
    return Activity.of(dict(_tallies(seconds, using).values_list("event").annotate(Sum("count"))))


def history(seconds: float, *, hourly: bool = False, using: str | None = None) -> list[Span]:
    """The last so many seconds, by quarters of an hour or ``hourly``; no spans at all if nothing was counted."""
    since = TruncHour("since", tzinfo=UTC) if hourly else F("since")
    counted = _tallies(seconds, using).annotate(begun=since).values_list("begun", "event").annotate(Sum("count"))
    counts = list(counted.annotate(now=DatabaseNow()))
    if not counts:
        return []
    *_count, now = counts[0]
    return spans((count[:3] for count in counts), seconds, now=now, step=HOUR if hourly else HOUR // 4)


def spans(counts: Iterable[tuple[datetime, str, int]], seconds: float, *, now: datetime, step: int) -> list[Span]:
    """Tallies (since, event, count) by steps of so many seconds. Pure."""
    by_step: dict[int, dict[str, int]] = {}
    for since, event, count in counts:
        events = by_step.setdefault(int(since.timestamp() // step), {})
        events[event] = events.get(event, 0) + count
    last = int(now.timestamp() // step)
    return [
        Span(since=datetime.fromtimestamp(number * step, UTC), activity=Activity.of(by_step.get(number, {})))
        for number in range(last - int(seconds // step) + 1, last + 1)
    ]


def views(seconds: float, *, using: str | None = None) -> dict[str, Activity]:
    """What happened in the last so many seconds at each view, by its name."""
    counts: dict[str, dict[str, int]] = {}
    for view, event, count in _tallies(seconds, using).values_list("view", "event").annotate(Sum("count")):
        counts.setdefault(view, {})[event] = count
    return {view: Activity.of(events) for view, events in counts.items()}


def busiest(views: Mapping[str, Activity], name: str, *, most: int = 10) -> list[tuple[str, Activity]]:
    """The views with the most ``name``, such as ``"replays"``, and at least one. Pure."""
    found = [(view, of_view) for view, of_view in views.items() if getattr(of_view, name)]
    return sorted(found, key=lambda each: (-getattr(each[1], name), each[0]))[:most]


def _tallies(seconds: float, using: str | None) -> QuerySet[IdempotencyTally]:
    begun = IdempotencyTally.objects.using(database(using)).filter(since__gt=ahead(-seconds))
    return begun.order_by()


# --- Where it goes ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Projection:
    """What the table comes to if things go on as on the last day; ``None`` as long as that is not known.

    ``rows_per_day``: answers stored. ``expected_rows``: as many as that makes in the retention of the project's policy.
    ``expected_bytes``: at the size that a row takes now.
    """

    rows_per_day: float | None = None
    expected_rows: float | None = None
    expected_bytes: float | None = None


def projection(size: Size, *, using: str | None = None) -> Projection:
    """By the tallies of the last day, or of as much of it as there is."""
    begun = IdempotencyTally.objects.using(database(using)).order_by("since")
    age = ExpressionWrapper(DatabaseNow() - F("since"), output_field=DurationField())
    oldest: timedelta | None = begun.values_list(age, flat=True).first()
    if oldest is None:
        return Projection()
    seconds = min(oldest.total_seconds(), DAY)
    return project(size, activity(DAY, using=using).completed, seconds=seconds, kept_for=conf().policy.kept_for)


def project(size: Size, completed: int, *, seconds: float, kept_for: float) -> Projection:
    """Of so many answers stored in so many seconds. Pure."""
    if seconds < HOUR:
        return Projection()
    per_second = completed / seconds
    rows = per_second * kept_for
    per_row = size.bytes / size.rows if size.rows and size.bytes else None
    return Projection(
        rows_per_day=per_second * DAY,
        expected_rows=rows,
        expected_bytes=None if per_row is None else rows * per_row,
    )


# --- In time ---------------------------------------------------------------------------------------------------------


def at_most(seconds: float, using: str) -> AbstractContextManager[None]:
    """Each statement in the block fails after so many seconds; on SQLite there is no such thing."""
    connection: Any = connections[using]
    if connection.vendor == "postgresql":
        return _postgresql_at_most(seconds, using)
    if getattr(connection, "mysql_is_mariadb", False):
        limited = f"SET STATEMENT max_statement_time = {seconds:.3f} FOR "
        wrapper: AbstractContextManager[None] = connection.execute_wrapper(
            lambda execute, sql, *details: execute(limited + sql, *details)
        )
        return wrapper
    return nullcontext()


@contextmanager
def _postgresql_at_most(seconds: float, using: str) -> Iterator[None]:
    with transaction.atomic(using=using):
        with connections[using].cursor() as cursor:
            cursor.execute(f"SET LOCAL statement_timeout = {max(1, round(seconds * 1000))}")
        yield
        transaction.set_rollback(True, using=using)  # with it the timeout ends, in a request's own transaction too
