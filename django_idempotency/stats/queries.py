"""The state of the records and what happened to them recently. Cheap to query, however large the table is."""

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
from django_idempotency.events import OUTBOX_EVENTS
from django_idempotency.models import DatabaseNow, IdempotencyCounter, IdempotencyRecord, RecordQuerySet, Status
from django_idempotency.outcomes import Rejection
from django_idempotency.stats import observations
from django_idempotency.stats.sessions import ByLock, by_lock
from django_idempotency.stores.connections import record_database
from django_idempotency.stores.database import ahead

MOST = 100_000  # rows to look at; a count that reaches this means "or more"
MINUTES, HOUR, DAY, WEEK = 60, 3600, 24 * 3600, 7 * 24 * 3600

# --- Current state ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Size:
    """The size of the table, as the database estimates it; ``None`` for what it doesn't.

    ``bytes``: including indexes. ``dead_rows``, ``dead_bytes``: deleted or outdated, but not vacuumed yet.
    """

    rows: int | None = None
    bytes: int | None = None
    table_bytes: int | None = None
    index_bytes: int | None = None
    dead_rows: int | None = None
    dead_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class Alarms:
    """What an operator should look at.

    ``stuck``: records whose lease has lapsed and that no owner works on (on databases other than PostgreSQL, owners in
    atomic mode may still be at work). ``stuck_oldest``: seconds since the first of these leases lapsed. ``on_hold``:
    records that wait for an operator. ``on_hold_oldest``: seconds for which the first of them has waited.
    """

    stuck: int
    stuck_oldest: float
    on_hold: int
    on_hold_oldest: float


@dataclass(frozen=True, kw_only=True)
class Pending(ByLock, Alarms):
    """Records that are started or processing, seconds since their claims, runs without a record, and the alarms."""

    pending: int
    pending_p50: float
    pending_p95: float
    pending_p99: float
    pending_oldest: float


@dataclass(frozen=True, kw_only=True)
class Due:
    """Records past ``purge_at``. ``lag``: seconds for which the oldest of them has been due."""

    due: int
    lag: float


@dataclass(frozen=True, kw_only=True)
class Stats(Due, Pending, Size):
    """All of these figures. Counts go up to ``MOST``, ages are in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Counts over the whole table. ``deduplicated``: the share of requests, 0 to 1, that got a replay."""

    completed: int
    failed: int
    retryable: int
    on_hold: int
    replays: int
    deduplicated: float


def stats(*, using: str | None = None) -> Stats:
    """Return the figures that indexes can provide. ``using``: alias of the database; by default the settings'."""
    parts = (size(using=using), pending(using=using), due(using=using))
    return Stats(**{name: value for part in parts for name, value in asdict(part).items()})


def pending(*, using: str | None = None, most: int = MOST) -> Pending:
    """Return figures of up to ``most`` pending rows, those whose lease ends first. ``using``: as for ``stats``."""
    ages = _pending_ages(IdempotencyRecord.objects.using(record_database(using)), most)
    return Pending(
        pending=len(ages),
        pending_p50=_percentile(ages, 50),
        pending_p95=_percentile(ages, 95),
        pending_p99=_percentile(ages, 99),
        pending_oldest=ages[-1] if ages else 0.0,
        **asdict(by_lock(using=using)),
        **asdict(alarms(using=using, most=most)),
    )


def alarms(*, using: str | None = None, most: int = MOST) -> Alarms:
    """Return the alarms, each of up to ``most`` rows, through their indexes. ``using``: as for ``stats``."""
    rows = IdempotencyRecord.objects.using(record_database(using))
    stuck, on_hold = rows.abandoned(), rows.awaiting_operator()
    return Alarms(
        stuck=stuck[:most].count(),
        stuck_oldest=_seconds_since("locked_until", stuck),
        on_hold=on_hold[:most].count(),
        on_hold_oldest=_seconds_since("updated_at", on_hold),
    )


def due(*, using: str | None = None, most: int = MOST) -> Due:
    """Return figures of up to ``most`` rows that are due. ``using``: as for ``stats``."""
    purgeable = IdempotencyRecord.objects.using(record_database(using)).purgeable()
    return Due(due=purgeable[:most].count(), lag=_seconds_since("purge_at", purgeable.order_by("purge_at")))


def totals(*, using: str | None = None) -> Totals:
    """Return the figures that need a scan of all records. ``using``: as for ``stats``."""
    unanswered = Q(status=Status.FAILED, response_status__isnull=True)
    counted = IdempotencyRecord.objects.using(record_database(using)).aggregate(
        completed=Count("pk", filter=Q(status=Status.COMPLETED)),
        failed=Count("pk", filter=Q(status=Status.FAILED)),
        retryable=Count("pk", filter=unanswered & Q(on_hold=False)),
        on_hold=Count("pk", filter=Q(on_hold=True)),
        replays=Coalesce(Sum("replays"), 0),
        runs=Coalesce(Sum("attempts"), 0),
    )
    requests = counted["replays"] + counted.pop("runs")
    return Totals(**counted, deduplicated=counted["replays"] / requests if requests else 0.0)


def _pending_ages(rows: RecordQuerySet, most: int) -> list[float]:
    age = ExpressionWrapper(DatabaseNow() - F("locked_at"), output_field=DurationField())
    live = rows.live().order_by("locked_until")
    return sorted(age.total_seconds() for age in live.values_list(age, flat=True)[:most])


def _percentile(ages: list[float], percent: int) -> float:
    return ages[min(len(ages) * percent // 100, len(ages) - 1)] if ages else 0.0


def _seconds_since(column: str, rows: RecordQuerySet) -> float:
    """Return the seconds since ``column`` of the first of ``rows``; 0 if there are none."""
    since = ExpressionWrapper(DatabaseNow() - F(column), output_field=DurationField())
    longest: timedelta | None = rows.values_list(since, flat=True).first()
    return longest.total_seconds() if longest else 0.0


# The size of a partitioned table is the sum of its partitions.
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
    """Return the size by the database's own statistics; all ``None`` on SQLite. ``using``: as for ``stats``."""
    connection = connections[record_database(using)]
    statement = _SIZE.get(connection.vendor)
    if statement is None:
        return Size()
    with connection.cursor() as cursor:
        cursor.execute(statement, {"table": IdempotencyRecord._meta.db_table})
        rows, total, table, indexes, dead_rows, dead = cursor.fetchone()
    return Size(rows=rows, bytes=total, table_bytes=table, index_bytes=indexes, dead_rows=dead_rows, dead_bytes=dead)


# --- Recent activity -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Activity:
    """What happened to keys, and to events of the outbox, in a span of time, according to the counters.

    ``requests``: requests with a key that got an outcome. ``deduplicated``: the share of them, 0 to 1, that got a
    replay. ``conflicts``: they came while the first was running. ``too_old``: nothing is known of their key any more
    (``max_request_age``). ``forbidden``: their callers may not see the stored response (``may_replay``).
    ``not_admitted``: their keys were new, and ``admit`` or a limit refused them.
    ``lost``: claims that were lost to a quicker rival; they are counted as the duplicates that they are.
    ``stale_writes``: owners that came back too late. ``store_errors``: the store could not be reached.
    ``outbox_failed``: refusals of events that are tried again; each refusal is counted.
    """

    requests: int = 0
    replays: int = 0
    deduplicated: float = 0.0
    conflicts: int = 0
    mismatches: int = 0
    takeovers: int = 0
    on_hold: int = 0
    too_old: int = 0
    forbidden: int = 0
    not_admitted: int = 0
    completed: int = 0
    failed: int = 0
    released: int = 0
    lost: int = 0
    stale_writes: int = 0
    reaped: int = 0
    store_errors: int = 0
    outbox_published: int = 0
    outbox_failed: int = 0
    outbox_dead_lettered: int = 0
    outbox_requeued: int = 0

    @classmethod
    def of(cls, counts: Mapping[str, int]) -> Activity:
        """Return the activity for ``counts`` by the name of the event, which is that of its signal."""

        def sum_of(*events: str) -> int:
            return sum(counts.get(event, 0) for event in events)

        rejected = {reason: sum_of(f"request_rejected.{reason}") for reason in Rejection}
        conflicts = rejected[Rejection.IN_FLIGHT] + rejected[Rejection.WAIT_TIMEOUT]
        ran = max(0, sum_of("key_claimed", "key_taken_over") - sum_of("claim_lost"))
        replays = sum_of("response_replayed")
        requests = ran + replays + sum(rejected.values())
        return cls(
            requests=requests,
            replays=replays,
            deduplicated=replays / requests if requests else 0.0,
            conflicts=conflicts,
            mismatches=rejected[Rejection.KEY_REUSED],
            takeovers=sum_of("key_taken_over"),
            on_hold=rejected[Rejection.ON_HOLD],
            too_old=rejected[Rejection.TOO_OLD],
            forbidden=rejected[Rejection.FORBIDDEN],
            not_admitted=rejected[Rejection.NOT_ADMITTED],
            completed=sum_of("key_completed"),
            failed=sum_of("key_failed"),
            released=sum_of("key_released"),
            lost=sum_of("claim_lost"),
            stale_writes=sum_of("stale_write_rejected"),
            reaped=sum_of("key_reaped"),
            store_errors=sum_of("store_failed"),
            **{event.name: sum_of(event.name) for event in OUTBOX_EVENTS},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """What happened from ``since`` until the next span begins."""

    since: datetime
    activity: Activity


def activity(seconds: float, *, view: str = "", using: str | None = None) -> Activity:
    """Return what happened in the last ``seconds``, with the precision of a counter, which is five minutes.

    ``view``: only at this view, by its dotted name. ``using``: as for ``stats``.
    """
    return Activity.of(dict(_counters(seconds, using, view).values_list("event").annotate(Sum("count"))))


def history(seconds: float, *, step: int = 15 * MINUTES, view: str = "", using: str | None = None) -> list[Span]:
    """Return the last ``seconds`` in spans of ``step`` seconds; an empty list if nothing was counted.

    ``step``: five minutes or a multiple of that. ``view``, ``using``: as for ``activity``.
    """
    since = F("since") if step % HOUR else TruncHour("since", tzinfo=UTC)
    counted = _counters(seconds, using, view).annotate(begun=since).values_list("begun", "event").annotate(Sum("count"))
    counts = list(counted.annotate(now=DatabaseNow()))
    if not counts:
        return []
    *_count, now = counts[0]
    return spans((count[:3] for count in counts), seconds, now=now, step=step)


def spans(counts: Iterable[tuple[datetime, str, int]], seconds: float, *, now: datetime, step: int) -> list[Span]:
    """Return the counters (since, event, count) of the last ``seconds`` in spans of ``step`` seconds. Pure."""
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
    """Return what happened in the last ``seconds`` at each view, by its name. ``using``: as for ``stats``."""
    counts: dict[str, dict[str, int]] = {}
    for view, event, count in _counters(seconds, using).values_list("view", "event").annotate(Sum("count")):
        if event not in observations.EVENTS:
            counts.setdefault(view, {})[event] = count
    return {view: Activity.of(events) for view, events in counts.items()}


@dataclass(frozen=True, kw_only=True)
class Observed:
    """What was observed in a span of time, with ``OBSERVE``.

    ``keyed``, ``unkeyed``: requests with and without a key. ``duplicates_keyed``: they would have got a replay or a
    409. ``duplicates_unkeyed``: likely duplicates, which would be prevented if their clients sent keys. ``views``: the
    duplicates of each view. ``clients``: for each client by name, its requests with and without a key; the clients
    with the most requests without a key come first.
    """

    keyed: int
    unkeyed: int
    duplicates_keyed: int
    duplicates_unkeyed: int
    views: dict[str, int]
    clients: dict[str, tuple[int, int]]

    @property
    def preventable(self) -> int:
        return self.duplicates_keyed + self.duplicates_unkeyed


def observed(seconds: float, *, using: str | None = None) -> Observed:
    """Return what was observed in the last ``seconds``. ``using``: as for ``stats``."""
    found = _counters(seconds, using).filter(event__in=observations.EVENTS)
    counts = {(event, view): n for event, view, n in found.values_list("event", "view").annotate(Sum("count"))}

    def by_view(*events: str) -> dict[str, int]:
        summed: dict[str, int] = {}
        for (event, view), count in counts.items():
            if event in events:
                summed[view] = summed.get(view, 0) + count
        return dict(sorted(summed.items(), key=lambda each: (-each[1], each[0])))

    with_key, without = by_view(observations.CLIENT_KEYED), by_view(observations.CLIENT_UNKEYED)
    return Observed(
        keyed=sum(by_view(observations.KEYED).values()),
        unkeyed=sum(by_view(observations.UNKEYED).values()),
        duplicates_keyed=sum(by_view(observations.DUPLICATE_KEYED).values()),
        duplicates_unkeyed=sum(by_view(observations.DUPLICATE_UNKEYED).values()),
        views=by_view(observations.DUPLICATE_KEYED, observations.DUPLICATE_UNKEYED),
        clients={name: (with_key.get(name, 0), without.get(name, 0)) for name in {**without, **with_key}},
    )


def busiest(views: Mapping[str, Activity], name: str, *, most: int = 10) -> list[tuple[str, Activity]]:
    """Return the views with the highest ``name``, such as ``"replays"``, leaving out those with none. Pure."""
    found = [(view, of_view) for view, of_view in views.items() if getattr(of_view, name)]
    return sorted(found, key=lambda each: (-getattr(each[1], name), each[0]))[:most]


def _counters(seconds: float, using: str | None, view: str = "") -> QuerySet[IdempotencyCounter]:
    begun = IdempotencyCounter.objects.using(record_database(using)).filter(since__gt=ahead(-seconds))
    return (begun.filter(view=view) if view else begun).order_by()


# --- Projection ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Projection:
    """The size that the table will reach if activity stays as on the last day; ``None`` while that is not known.

    ``rows_per_day``: responses stored. ``expected_rows``: the rows that this gives within the project's retention.
    ``expected_bytes``: their size, at the present size of a row.
    """

    rows_per_day: float | None = None
    expected_rows: float | None = None
    expected_bytes: float | None = None


def projection(size: Size, *, using: str | None = None) -> Projection:
    """Project ``size`` by the counters of the last day, or of less if they began later. ``using``: as for ``stats``."""
    begun = IdempotencyCounter.objects.using(record_database(using)).order_by("since")
    age = ExpressionWrapper(DatabaseNow() - F("since"), output_field=DurationField())
    oldest: timedelta | None = begun.values_list(age, flat=True).first()
    if oldest is None:
        return Projection()
    seconds = min(oldest.total_seconds(), DAY)
    return project(size, activity(DAY, using=using).completed, seconds=seconds, kept_for=conf().policy.kept_for)


def project(size: Size, completed: int, *, seconds: float, kept_for: float) -> Projection:
    """Project ``size`` by ``completed`` responses stored in ``seconds``; empty for less than an hour. Pure."""
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


# --- Time limits -----------------------------------------------------------------------------------------------------


def at_most(seconds: float, using: str) -> AbstractContextManager[None]:
    """Make each query in the block fail after so many seconds. SQLite has no such limit."""
    connection: Any = connections[using]
    if connection.vendor == "postgresql":
        return _postgresql_at_most(seconds, using)
    if connection.vendor == "mysql":
        mariadb = connection.mysql_is_mariadb  # asked for inside the wrapper, it would be a query in the wrapper
        wrapper: AbstractContextManager[None] = connection.execute_wrapper(
            lambda execute, sql, *details: execute(_limited(sql, seconds, mariadb=mariadb), *details)
        )
        return wrapper
    return nullcontext()


def _limited(sql: str, seconds: float, *, mariadb: bool) -> str:
    if mariadb:
        return f"SET STATEMENT max_statement_time = {seconds:.3f} FOR {sql}"
    return sql.replace("SELECT", f"SELECT /*+ MAX_EXECUTION_TIME({max(1, round(seconds * 1000))}) */", 1)


@contextmanager
def _postgresql_at_most(seconds: float, using: str) -> Iterator[None]:
    connection = connections[using]
    own_transaction = connection.get_autocommit()  # the timeout ends with it
    with transaction.atomic(using=using):
        before = None if own_transaction else _timeout(using)
        _set_timeout(f"{max(1, round(seconds * 1000))}ms", using)
        yield
        if before is not None and not connection.needs_rollback:  # a rollback to the savepoint resets it
            _set_timeout(before, using)


def _timeout(using: str) -> str:
    with connections[using].cursor() as cursor:
        cursor.execute("SHOW statement_timeout")
        return str(cursor.fetchone()[0])


def _set_timeout(duration: str, using: str) -> None:
    with connections[using].cursor() as cursor:
        cursor.execute(f"SET LOCAL statement_timeout = '{duration}'")
