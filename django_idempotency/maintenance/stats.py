"""The state of the records. Cheap to query, however large the table is."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from datetime import timedelta
from itertools import takewhile

from django.db import DatabaseError, OperationalError, connections, transaction
from django.db.models import DurationField, ExpressionWrapper, F

from django_idempotency.conf import conf
from django_idempotency.exceptions import StoreUnavailable
from django_idempotency.models import DatabaseNow, IdempotencyRecord, RecordQuerySet
from django_idempotency.stores import DatabaseStore, Store, stores_of
from django_idempotency.stores.claim_function import LOCK_HOLDERS
from django_idempotency.stores.configured import configured
from django_idempotency.stores.connections import record_database
from django_idempotency.values.outcomes import Snapshot

MOST = 100_000  # rows to look at; a count that reaches this means "or more"
HOUR, DAY, WEEK = 3600, 24 * 3600, 7 * 24 * 3600

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


@dataclass(frozen=True)
class ByLock:
    """Runs in progress whose claims are locks; ``None`` if the database does not say.

    ``pending_by_lock_oldest``: seconds since the first of their transactions began, among those that this role may see.
    """

    pending_by_lock: int | None = None
    pending_by_lock_oldest: float | None = None


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


# --- Claims by lock, which no table shows ----------------------------------------------------------------------------

COUNT = f"""
SELECT
    count(*),
    CASE count(*) WHEN 0 THEN 0 ELSE max(extract(epoch FROM statement_timestamp() - session.xact_start)) END::float8
{LOCK_HOLDERS}
"""


def by_lock(*, using: str | None = None) -> ByLock:
    """Count PostgreSQL sessions with such a lock. ``using``: alias of the database; that of the settings by default.

    The statement may fail in a database that only speaks PostgreSQL's protocol, or that refuses access to a view.
    Raises ``OperationalError`` if it took too long or the connection was lost.
    """
    using = record_database(using)
    if connections[using].vendor != "postgresql":
        return ByLock()
    try:
        with transaction.atomic(using=using), connections[using].cursor() as cursor:
            cursor.execute(COUNT)
            return ByLock(*cursor.fetchone())
    except OperationalError:  # too slow, or the connection was lost
        raise
    except DatabaseError:
        return ByLock()


# --- Stores outside the databases ------------------------------------------------------------------------------------


def outside_stores() -> list[str]:
    found = ((alias, configured(alias).backend) for alias in conf().stores)
    return [alias for alias, backend in found if not issubclass(backend, DatabaseStore)]


def outside_store(alias: str) -> Store:
    """Return a store outside a database, for an operator. Raises ``ImproperlyConfigured`` if it can't be used."""
    return next(stores_of(conf().policy.derive(mode=conf().lease, store=alias)))


def labelled(alias: str) -> str:
    """Return what figures call a store: not its alias alone, which may be that of a database, too."""
    return f"store:{alias}"


def alarms_of_store(alias: str, *, seconds: float) -> Alarms:
    """Return the alarms of a store; ``on_hold_oldest`` counts from the first claim of the record.

    Raises ``StoreUnavailable`` if the store can't be reached, or if its records could not be read in ``seconds``.
    """
    ends = time.monotonic() + seconds
    read = list(takewhile(lambda _record: time.monotonic() < ends, outside_store(alias).unfinished()))
    if time.monotonic() >= ends:
        raise StoreUnavailable(f"The records of the store {alias!r} could not be read in {seconds:g} s.")
    return alarms_of(read)


def alarms_of(unfinished: Iterable[Snapshot]) -> Alarms:
    on_hold, stuck = [], []
    for record in unfinished:
        if record.on_hold:
            on_hold.append((record.now - record.created_at).total_seconds())
        elif record.locked_until is not None and record.locked_until < record.now:
            stuck.append((record.now - record.locked_until).total_seconds())
    return Alarms(
        stuck=len(stuck),
        stuck_oldest=max(stuck, default=0.0),
        on_hold=len(on_hold),
        on_hold_oldest=max(on_hold, default=0.0),
    )


# --- Time limits -----------------------------------------------------------------------------------------------------


def at_most(seconds: float, using: str) -> AbstractContextManager[None]:
    """Make each query in the block fail after ``seconds``. SQLite has no such limit."""
    connection = connections[using]
    if connection.vendor == "postgresql":
        return _postgresql_at_most(seconds, using)
    if connection.vendor == "mysql":
        limit = f"SET STATEMENT max_statement_time = {seconds:.3f} FOR"  # of MariaDB
        wrapper: AbstractContextManager[None] = connection.execute_wrapper(
            lambda execute, sql, *details: execute(f"{limit} {sql}", *details)
        )
        return wrapper
    return nullcontext()


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
