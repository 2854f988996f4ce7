"""What the catalog says of the record table and its partitions. PostgreSQL only.

The names of partitions are not interpreted, so it does not matter who made a partition.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any, cast

from django.db import IntegrityError, connections

from django_idempotency import StoreUnavailable
from django_idempotency.contrib.partitions.layout import (
    EPOCH,
    MOST,
    RETIRED,
    TABLE,
    UNTIL,
    Layout,
    NotConvertible,
    Partition,
    Template,
    stamp,
    why_kept,
)
from django_idempotency.extending import cause, log
from django_idempotency.extending.stores import (
    LIVE,
    TERMINAL,
    StoreConflict,
    StoreRefused,
    record_database,
    sqlstate,
)

CHECK_VIOLATION = "23514"
NO_PARTITION = (
    "There is no partition for a new record. Run manage.py idempotency_partitions"
    " ensure, and schedule it; or run enable again, if it was interrupted."
)


def _microseconds(when: str) -> str:
    """Return SQL for a time as microseconds since 1970, which depends on no time zone
    or date style of the session.
    """
    return f"(extract(epoch FROM {when}) * 1000000)::bigint"


def _when(microseconds: int | None) -> datetime | None:
    return (
        None if microseconds is None else EPOCH + timedelta(microseconds=microseconds)
    )


LAYOUT = f"""
SELECT quote_ident(nspname), {_microseconds("statement_timestamp()")}, relkind = 'p',
    EXISTS (SELECT FROM pg_constraint WHERE conrelid = pg_class.oid
        AND conname = '{UNTIL}')
FROM pg_class JOIN pg_namespace ON pg_namespace.oid = relnamespace
    WHERE pg_class.oid = '{TABLE}'::regclass
"""

# Infinity is no bound, like MINVALUE and MAXVALUE.
LOWER, UPPER = (
    f"(regexp_match(bounds, '{end} [(]''((?!-?infinity)[^'']+)''[)]'))[1]::timestamptz"
    for end in ("FROM", "TO")
)
PARTITIONS = f"""
SELECT {_microseconds(LOWER)} AS lower, {_microseconds(UPPER)} AS upper, part.oid,
    name, inhdetachpending,
    EXISTS (SELECT FROM pg_constraint WHERE conrelid = part.oid
        AND conname = '{RETIRED}')
FROM (
    SELECT pg_class.oid, format('%I.%I', nspname, relname) AS name, inhdetachpending,
        coalesce(pg_get_expr(relpartbound, pg_class.oid), '') AS bounds
    FROM pg_inherits JOIN pg_class ON pg_class.oid = inhrelid JOIN pg_namespace
        ON pg_namespace.oid = relnamespace
    WHERE inhparent = '{TABLE}'::regclass
) AS part
ORDER BY lower NULLS FIRST, upper
"""


def read_layout(*, using: str | None = None) -> Layout:
    """Return how the table is divided. Raises ``NotConvertible`` on a database other
    than PostgreSQL.
    """
    alias = postgresql(using)
    with connections[alias].cursor() as cursor:
        cursor.execute(LAYOUT)
        schema, now, partitioned, halfway = cursor.fetchone()
        cursor.execute(PARTITIONS)
        rows = cursor.fetchall() if partitioned else ()
    return Layout(
        schema=schema,
        now=EPOCH + timedelta(microseconds=now),
        partitioned=partitioned,
        partitions=tuple(
            Partition(_when(lower), _when(upper), *others)
            for lower, upper, *others in rows
        ),
        halfway=halfway,
    )


def postgresql(using: str | None) -> str:
    """Return the alias of the records' database. Raises ``NotConvertible`` if it is not
    PostgreSQL.
    """
    alias = record_database(using)
    if connections[alias].vendor != "postgresql":
        raise NotConvertible(
            f"Only PostgreSQL can partition the records (database {alias!r})."
        )
    return alias


def reason_to_keep(cursor: Any, partition: Partition) -> str:
    """Return why ``partition`` can't go; empty if it can. Counts go up to ``MOST``.

    It is read by the partial indexes alone, and through the table, for a role that has
    no rights on its partitions.
    """
    bounds = {">=": partition.lower, "<": partition.upper}
    within = (
        f"created_at {sign} '{stamp(end)}' AND "
        for sign, end in bounds.items()
        if end is not None
    )
    rows = f"{TABLE} WHERE {''.join(within)}"
    live, terminal = (
        ", ".join(f"'{status.value}'" for status in statuses)
        for statuses in (LIVE, TERMINAL)
    )
    statement = (
        f"SELECT (SELECT count(*) FROM (SELECT FROM {rows} status IN ({live}) LIMIT"
        f" {MOST}) AS live), (SELECT count(*) FROM (SELECT FROM {rows} on_hold AND"
        f" locked_until IS NULL LIMIT {MOST}) AS on_hold), (SELECT"
        f" {_microseconds('max(purge_at)')} FROM {rows} status IN ({terminal})),"
        f" {_microseconds('statement_timestamp()')}"
    )
    cursor.execute(statement)
    of_live, of_on_hold, purge_at, now = cursor.fetchone()
    return why_kept(
        partition,
        of_live,
        of_on_hold,
        _when(purge_at),
        EPOCH + timedelta(microseconds=now),
    )


LEFT_BEHIND = f"""
SELECT format('%I.%I', nspname, relname)
FROM pg_constraint JOIN pg_class ON pg_class.oid = conrelid JOIN pg_namespace
    ON pg_namespace.oid = relnamespace
WHERE conname = '{RETIRED}' AND NOT relispartition
    AND relnamespace = (SELECT relnamespace FROM pg_class
        WHERE oid = '{TABLE}'::regclass)
ORDER BY 1
"""


def left_behind(alias: str) -> list[str]:
    """Return the retired partitions that are detached, but not dropped yet."""
    with connections[alias].cursor() as cursor:
        cursor.execute(LEFT_BEHIND)
        return [name for (name,) in cursor.fetchall()]


# --- What a new partition is modelled on ----------------------------------------------


TEMPLATE = f"""
SELECT coalesce(part.reloptions,
    '{{}}') || ARRAY(SELECT 'toast.' || unnest(toast.reloptions)),
    CASE WHEN parent.relowner <> current_user::regrole
        THEN parent.relowner::regrole::text END
FROM pg_class AS part LEFT JOIN pg_class AS toast ON toast.oid = part.reltoastrelid
    JOIN pg_class AS parent ON parent.oid = '{TABLE}'::regclass
WHERE part.oid = ANY (%(oids)s::oid[]) OR part.oid = parent.oid
ORDER BY part.oid = parent.oid, part.reloptions IS NULL,
    array_position(%(oids)s::oid[], part.oid) DESC
LIMIT 1
"""


def template(cursor: Any, partitions: Sequence[Partition]) -> Template:
    """Return the template of the latest partition with storage parameters, or of the
    table itself while it is plain.
    """
    cursor.execute(TEMPLATE, {"oids": [partition.oid for partition in partitions]})
    return Template(*cursor.fetchone())


# --- What a violated CHECK means ------------------------------------------------------


def meaning(error: IntegrityError) -> StoreUnavailable | None:
    """Return what the violation of a CHECK of partitioning means for a claim; ``None``
    for any other error.
    """
    if sqlstate(error) != CHECK_VIOLATION:
        return None
    diagnosis = cast(Any, error.__cause__).diag
    # the statement is as old as the partition; the next one goes elsewhere
    if diagnosis.constraint_name == RETIRED:
        return StoreConflict(str(error).strip())
    # A row that has no partition violates no constraint that has a name. If not even
    # its table is named, another server passed the error on, as Citus does for its own.
    if diagnosis.constraint_name == UNTIL or (
        diagnosis.table_name and not diagnosis.constraint_name
    ):
        log(logging.CRITICAL, "no_partition", "%s (%s)", NO_PARTITION, cause(error))
        return StoreRefused(NO_PARTITION)
    return None
