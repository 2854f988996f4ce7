"""The state of the records. Cheap to query, however large the table is."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from django.db import DatabaseError, OperationalError, connections, transaction
from django.db.models import DurationField, ExpressionWrapper, F
from django.utils.functional import Promise
from django.utils.translation import gettext_lazy as _

from django_idempotency.conf import conf
from django_idempotency.maintenance.records import Records, records
from django_idempotency.models import DatabaseNow, IdempotencyRecord
from django_idempotency.stores import DatabaseStore, Store, configured, stores_of
from django_idempotency.stores.claim_function import (
    KEY_LOCKS,
    LOCK_HOLDERS,
    TABLE_LOCKS,
)
from django_idempotency.stores.connections import record_database
from django_idempotency.values.exceptions import StoreUnavailable
from django_idempotency.values.registry import Registry

MOST = 100_000  # rows to count; a count that reaches this means "or more"
HOUR, DAY, WEEK = 3600, 24 * 3600, 7 * 24 * 3600

# --- What is measured -----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Measure:
    """Something that is measured of the records.

    - ``title``: for people; empty if it is not shown by itself.
    - ``metric``, ``meaning``: its name and its meaning in monitoring; empty if it is
      not there.
    - ``percentile``: what the figures of one metric differ by.
    - ``unit``: as in the Unified Code for Units.
    - ``alarming_above``: an operator should look at a higher figure; ``situation``: at
      these records in the admin.
    """

    title: str | Promise = ""
    metric: str = ""
    meaning: str = ""
    percentile: str = ""
    unit: str = "{record}"
    alarming_above: float = math.inf
    situation: str = ""


OR_MORE = f"; {MOST:,} means or more"
AGES = "age of these since their claim, by percentile"
BY_LOCK = "runs in progress without a record, because their claims are locks"
BY_LOCK_AGE = (
    "age of the oldest transaction of these that this role may see, 0 without one"
)
STUCK = (
    f"records started or processing whose lease ran out, without a live owner{OR_MORE}"
)
ON_HOLD = f"records that wait for an operator{OR_MORE}"
LAG = "how long the oldest of these has been due"
LATE = 1800  # seconds; three times the interval of the tasks
# Counts of records go up to ``MOST``, ages are in seconds and 0 without a record. What
# the database does not say is ``None``, or left out.
MEASURES: Mapping[str, Measure] = {
    # The size of the table, as the database estimates it. Dead rows are deleted or
    # outdated, and not vacuumed yet.
    "rows": Measure(
        _("rows"), "table_rows", "rows of the table, as the database estimates them"
    ),
    "bytes": Measure(
        _("size"), "table_size", "size of the table with its indexes", unit="By"
    ),
    "table_bytes": Measure(_("of which table"), unit="By"),
    "index_bytes": Measure(_("of which indexes"), unit="By"),
    "dead_rows": Measure(
        _("dead rows"),
        "table_dead_rows",
        "rows deleted or outdated, and not vacuumed yet",
    ),
    "dead_bytes": Measure(unit="By"),
    # Runs in progress.
    "pending": Measure(
        _("pending"), "pending", f"records started or processing{OR_MORE}"
    ),
    "pending_p50": Measure(
        _("age, p50"), "pending_age", AGES, percentile="50", unit="s"
    ),
    "pending_p95": Measure(
        _("age, p95"), "pending_age", AGES, percentile="95", unit="s"
    ),
    "pending_p99": Measure(
        _("age, p99"), "pending_age", AGES, percentile="99", unit="s"
    ),
    "pending_oldest": Measure(
        _("oldest"), "pending_age", AGES, percentile="100", unit="s"
    ),
    "pending_by_lock": Measure(_("pending by lock"), "pending_by_lock", BY_LOCK),
    "pending_by_lock_oldest": Measure(
        _("oldest by lock"), "pending_by_lock_age", BY_LOCK_AGE, unit="s"
    ),
    "lock_waits": Measure(
        _("waiting for a lock"),
        "lock_waits",
        "sessions that use the table and wait for a lock",
        unit="{session}",
    ),
    "lock_waits_oldest": Measure(
        _("longest lock wait"),
        "lock_wait_age",
        "for how long the first of these has waited, 0 without one",
        unit="s",
    ),
    # What an operator should look at. On databases other than PostgreSQL, owners in
    # atomic mode may still be at work.
    "stuck": Measure(
        _("lease ran out"), "stuck", STUCK, alarming_above=0, situation="stuck"
    ),
    "stuck_oldest": Measure(
        "",
        "stuck_age",
        "how long ago the first of these leases ran out, 0 without one",
        unit="s",
    ),
    "on_hold": Measure(
        _("on hold for an operator"),
        "on_hold",
        ON_HOLD,
        alarming_above=0,
        situation="on_hold",
    ),
    "on_hold_oldest": Measure(
        "",
        "on_hold_age",
        "how long the first of these has waited, 0 without one",
        unit="s",
    ),
    # What the clean-up has still to do.
    "due": Measure(
        _("due for deletion"),
        "due",
        f"expired records that are due for deletion{OR_MORE}",
    ),
    "lag": Measure(_("behind"), "cleanup_lag", LAG, unit="s", alarming_above=LATE),
}
Figures = dict[str, float | None]  # by the names of their measures


def stats(*, using: str | None = None) -> Figures:
    """Return the figures that indexes can provide. ``using``: alias of the database; by
    default the settings'.
    """
    return size(using=using) | pending(using=using) | due(using=using)


def pending(*, using: str | None = None, most: int = MOST) -> Figures:
    """Return figures of up to ``most`` pending rows, those whose lease ends first.
    ``using``: as for ``stats``.
    """
    ages = sorted(
        _ages(records(using).live().order_by("locked_until")[:most], since="locked_at")
    )
    of_ages = {
        f"pending_p{percent}": _percentile(ages, percent) for percent in (50, 95, 99)
    }
    counted = {
        "pending": len(ages),
        **of_ages,
        "pending_oldest": _percentile(ages, 100),
    }
    locks = by_lock(using=using) | lock_waits(using=using)
    return counted | locks | alarms(using=using, most=most)


def oldest_pending(*, using: str | None = None) -> float:
    """Return for how many seconds the oldest pending row has been claimed, of the
    thousand whose lease ends first. ``using``: as for ``stats``.
    """
    rows = records(using).live().order_by("locked_until")[:1000]
    return max(_ages(rows, since="locked_at"), default=0.0)


def alarms(*, using: str | None = None, most: int = MOST) -> dict[str, float]:
    """Return the alarms, each of up to ``most`` rows, through their indexes. ``using``:
    as for ``stats``.
    """
    stuck, on_hold = records(using).abandoned(), records(using).awaiting_operator()
    return {
        "stuck": stuck[:most].count(),
        "stuck_oldest": max(_ages(stuck[:1], since="locked_until"), default=0.0),
        "on_hold": on_hold[:most].count(),
        "on_hold_oldest": max(_ages(on_hold[:1], since="updated_at"), default=0.0),
    }


def due(*, using: str | None = None, most: int = MOST) -> dict[str, float]:
    """Return figures of up to ``most`` rows that are due. ``using``: as for
    ``stats``.
    """
    purgeable = records(using).purgeable()
    late = max(_ages(purgeable.order_by("purge_at")[:1], since="purge_at"), default=0.0)
    allowed = sum(delay(purgeable.db) for delay in delays)
    return {"due": purgeable[:most].count(), "lag": max(0.0, late - allowed)}


# For how many seconds a record that is due may stay in a database: that is no lag.
delays = Registry[Callable[[str], float]]()


def _ages(rows: Records, since: str) -> list[float]:
    age = ExpressionWrapper(DatabaseNow() - F(since), output_field=DurationField())
    return [age.total_seconds() for age in rows.values_list(age, flat=True)]


def _percentile(ages: list[float], percent: int) -> float:
    return ages[min(len(ages) * percent // 100, len(ages) - 1)] if ages else 0.0


# The size of a partitioned table is the sum of its partitions.
_SIZE = {
    "postgresql": (
        """
        SELECT sum(nullif(reltuples, -1))::bigint,
            sum(pg_total_relation_size(oid))::bigint,
            sum(pg_table_size(oid))::bigint, sum(pg_indexes_size(oid))::bigint,
            sum(pg_stat_get_dead_tuples(oid))::bigint,
            sum(pg_relation_size(oid) * pg_stat_get_dead_tuples(oid)
                / greatest(pg_stat_get_dead_tuples(oid) + pg_stat_get_live_tuples(oid),
                    1))::bigint
        FROM (SELECT %(table)s::regclass UNION SELECT relid
            FROM pg_partition_tree(%(table)s)) AS parts (relid)
        JOIN pg_class ON oid = relid WHERE relkind = 'r'
    """
    ),
    "mysql": (
        """
        SELECT table_rows, data_length + index_length, data_length, index_length, NULL,
            NULL
        FROM information_schema.tables WHERE table_schema = database()
            AND table_name = %(table)s
    """
    ),
}


def size(*, using: str | None = None) -> Figures:
    """Return the size by the database's own statistics; all ``None`` on SQLite.
    ``using``: as for ``stats``.
    """
    names = ("rows", "bytes", "table_bytes", "index_bytes", "dead_rows", "dead_bytes")
    connection = connections[record_database(using)]
    statement = _SIZE.get(connection.vendor)
    if statement is None:
        return dict.fromkeys(names)
    with connection.cursor() as cursor:
        cursor.execute(statement, {"table": IdempotencyRecord._meta.db_table})
        return dict(zip(names, cursor.fetchone(), strict=True))


# --- Claims by lock, which no table shows ---------------------------------------------

COUNT = f"""
SELECT
    count(*),
    CASE count(*) WHEN 0 THEN 0 ELSE max(extract(epoch
        FROM statement_timestamp() - session.xact_start)) END::float8
{LOCK_HOLDERS}
"""


def by_lock(*, using: str | None = None) -> Figures:
    """Count PostgreSQL sessions with such a lock; empty if the database does not say.
    ``using``: as for ``stats``.
    """
    return _of_locks(COUNT, "pending_by_lock", using)


def lock_waits(*, using: str | None = None) -> Figures:
    """Count PostgreSQL sessions that use the table and wait for a lock, of whatever
    table; empty if the database does not say. ``using``: as for ``stats``.
    """
    return _of_locks(WAITS, "lock_waits", using)


def _of_locks(query: str, name: str, using: str | None) -> Figures:
    """Return a count and an age from PostgreSQL's locks.

    The statement may fail in a database that only speaks PostgreSQL's protocol, or that
    refuses access to a view. Raises ``OperationalError`` if it took too long or the
    connection was lost.
    """
    using = record_database(using)
    if connections[using].vendor != "postgresql":
        return {}
    try:
        with transaction.atomic(using=using), connections[using].cursor() as cursor:
            cursor.execute(query)
            count, oldest = cursor.fetchone()
            return {name: count, f"{name}_oldest": oldest}
    except OperationalError:  # too slow, or the connection was lost
        raise
    except DatabaseError:
        return {}


# Transactions that use the table, or are about to claim a key in it. ``waitstart`` is
# not set yet in the first moment of a wait.
WAITS = f"""
SELECT count(*), coalesce(max(extract(epoch
    FROM statement_timestamp() - waiting.waitstart)), 0)::float8
FROM pg_locks AS waiting
WHERE NOT waiting.granted AND (
    waiting.locktype = 'advisory' AND waiting.objsubid = 2
        AND waiting.classid IN ({KEY_LOCKS}, {TABLE_LOCKS})
        AND waiting.database = (SELECT oid FROM pg_database
            WHERE datname = current_database())
    OR EXISTS (
        SELECT FROM pg_locks AS reading
        WHERE reading.pid = waiting.pid AND reading.locktype = 'relation'
            AND reading.database = (SELECT oid FROM pg_database
                WHERE datname = current_database())
            AND reading.relation = to_regclass('django_idempotency_record')::oid
    )
)
"""


# --- Stores outside the databases -----------------------------------------------------


def outside_stores() -> list[str]:
    """Return the aliases of the stores of ``STORES`` that keep no records in a
    database.
    """
    found = ((alias, configured(alias).backend) for alias in conf().stores)
    return [alias for alias, backend in found if not issubclass(backend, DatabaseStore)]


def outside_store(alias: str) -> Store:
    """Return a store outside a database, for an operator. Raises
    ``ImproperlyConfigured`` if it can't be used.
    """
    return next(stores_of(conf().policy.derive(mode=conf().lease, store=alias)))


def labelled(alias: str) -> str:
    """Return what figures call a store: not its alias alone, which may be that of a
    database, too.
    """
    return f"store:{alias}"


def alarms_of_store(alias: str, *, seconds: float) -> dict[str, float]:
    """Return the alarms of a store; ``on_hold_oldest`` counts from the first claim of
    the record.

    Raises ``StoreUnavailable`` if the store can't be reached, or if its records could
    not be read in ``seconds``.
    """
    ends = time.monotonic() + seconds
    ages: dict[str, list[float]] = {"stuck": [], "on_hold": []}
    for record in outside_store(alias).unfinished():
        if time.monotonic() >= ends:
            raise StoreUnavailable(
                f"The records of the store {alias!r} could not be read in"
                f" {seconds:g} s."
            )
        if record.on_hold:
            ages["on_hold"].append((record.now - record.created_at).total_seconds())
        elif record.locked_until is not None and record.locked_until < record.now:
            ages["stuck"].append((record.now - record.locked_until).total_seconds())
    oldest = {f"{name}_oldest": max(of, default=0.0) for name, of in ages.items()}
    return {name: len(of) for name, of in ages.items()} | oldest


# --- Time limits ----------------------------------------------------------------------


@contextmanager
def at_most(seconds: float, using: str) -> Iterator[None]:
    """Make each query in the block fail after ``seconds``; SQLite has no such limit.
    The block must change nothing.
    """
    connection = connections[using]
    if connection.vendor == "postgresql":
        with transaction.atomic(using=using):
            with connection.cursor() as cursor:
                cursor.execute(
                    f"SET LOCAL statement_timeout = '{max(1, round(seconds * 1000))}ms'"
                )
            yield
            # undoes the limit if the transaction is the caller's
            transaction.set_rollback(True, using=using)
    elif connection.vendor == "mysql":
        limit = f"SET STATEMENT max_statement_time = {seconds:.3f} FOR"  # of MariaDB
        with connection.execute_wrapper(
            lambda execute, sql, *details: execute(f"{limit} {sql}", *details)
        ):
            yield
    else:
        yield
