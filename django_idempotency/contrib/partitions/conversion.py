"""Make the record table partitioned, in place and under load."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from operator import methodcaller
from typing import Any

from django.db import DatabaseError, connections

from django_idempotency.contrib.partitions.catalog import (
    postgresql,
    read_layout,
    template,
)
from django_idempotency.contrib.partitions.layout import (
    DAY,
    TABLE,
    UNTIL,
    NotConvertible,
    creation,
    midnight,
    name_of,
    stamp,
)
from django_idempotency.contrib.partitions.locks import (
    LOCK_TIMEOUT,
    keep_autovacuum_away,
    patiently,
    short_transaction,
)
from django_idempotency.extending import cause, log
from django_idempotency.extending.stores import TABLE_LOCKS, is_conflict

ATTEMPTS = 100
FIRST = f"{TABLE}_p0"
# the session's lock
CONVERTING = f"{TABLE_LOCKS}, hashtext('{TABLE} is being converted')"
FORGET = f"ALTER TABLE {TABLE} DROP CONSTRAINT IF EXISTS {UNTIL}"

# Each with its name once it belongs to the first partition.
INDEXES = f"""
SELECT quote_ident(relname), quote_ident(left(relname, 60) || '_p0'),
    replace(pg_get_indexdef(indexrelid), ' ON ONLY ', ' ON '), indisprimary
FROM pg_index JOIN pg_class ON oid = indexrelid WHERE indrelid = '{TABLE}'::regclass
    ORDER BY relname
"""

# The owner's own rights come with the table.
GRANTS = f"""
SELECT format(
    'GRANT %s ON {TABLE} TO %s%s', string_agg(privilege_type, ', '
        ORDER BY privilege_type),
    CASE grantee WHEN 0 THEN 'PUBLIC' ELSE grantee::regrole::text END,
    CASE WHEN is_grantable THEN ' WITH GRANT OPTION' ELSE '' END
)
FROM pg_class, aclexplode(relacl) WHERE oid = '{TABLE}'::regclass
    AND grantee <> relowner
GROUP BY grantee, is_grantable
"""

# Whatever hangs on the table, except for what it is created with, would stay behind at
# the first partition.
OBSTACLES = f"""
SELECT DISTINCT pg_describe_object(classid, objid, objsubid) FROM pg_depend
    LEFT JOIN pg_constraint ON classid = 'pg_constraint'::regclass
        AND pg_constraint.oid = objid
    LEFT JOIN pg_index ON classid = 'pg_class'::regclass AND indexrelid = objid
WHERE refclassid = 'pg_class'::regclass AND refobjid = '{TABLE}'::regclass AND deptype
    IN ('n', 'a')
    AND classid <> 'pg_attrdef'::regclass AND coalesce(contype NOT IN ('c', 'n', 'p'),
        true)
    AND coalesce(indisunique, true)
UNION ALL
SELECT 'a grant on the column ' || quote_ident(attname) FROM pg_attribute
WHERE attrelid = '{TABLE}'::regclass AND attacl IS NOT NULL
UNION ALL
SELECT 'row level security' FROM pg_class
WHERE oid = '{TABLE}'::regclass AND (relrowsecurity OR relforcerowsecurity)
UNION ALL
SELECT 'the publication ' || quote_ident(pubname) FROM pg_publication_tables
    JOIN pg_namespace ON nspname = schemaname
    JOIN pg_class ON relnamespace = pg_namespace.oid AND relname = tablename
WHERE pg_class.oid = '{TABLE}'::regclass
UNION ALL
SELECT pg_describe_object('pg_class'::regclass, taken.oid, 0)
FROM pg_class AS taken JOIN pg_class AS record USING (relnamespace)
WHERE taken.relname = '{FIRST}' AND record.oid = '{TABLE}'::regclass
"""


def enable(*, using: str | None = None) -> bool:
    """Make the table partitioned by day; return false if it was partitioned already.

    Claims wait for it about 100 ms at a time, and go on as before.

    Existing keys are kept, live ones included. The partitions that ``ensure`` makes
    still have to be made afterwards. ``using``: the database's alias; default: the
    settings'. Raises ``NotConvertible`` if something is in the way, if a lock could not
    be had, or if the database is not PostgreSQL. Then nothing is changed.
    """
    alias = postgresql(using)
    with _alone(alias):
        if not enable_plan(using=alias):
            return False
        try:
            for statement in _preparation(alias):
                _patiently(alias, methodcaller("execute", statement))
            _patiently(alias, partial(_convert, alias))
        except BaseException:  # Ctrl-C, too, must leave no table half converted
            _take_back(alias)
            raise
    return True


def enable_plan(*, using: str | None = None) -> list[str]:
    """Return what ``enable`` would run; nothing if the table is partitioned. Arguments
    and errors as for ``enable``.
    """
    alias = postgresql(using)
    if read_layout(using=alias).partitioned:
        return []
    with connections[alias].cursor() as cursor:
        return [*_preparation(alias), "BEGIN", *_switch(alias, cursor), "COMMIT"]


def _preparation(alias: str) -> list[str]:
    """Return what makes the switch short. With this CHECK, the table is attached
    without a look at its rows.
    """
    boundary = midnight(read_layout(using=alias).now) + 2 * DAY
    check = f"CHECK (created_at < '{stamp(boundary)}') NOT VALID"
    return [
        (
            f"ALTER TABLE {TABLE} DROP CONSTRAINT IF EXISTS {UNTIL}, ADD CONSTRAINT"
            f" {UNTIL} {check}"
        ),
        f"ALTER TABLE {TABLE} VALIDATE CONSTRAINT {UNTIL}",
    ]


def _switch(alias: str, cursor: Any) -> list[str]:
    """Return what makes the table the first partition, of all made before the day after
    tomorrow.

    Raises ``NotConvertible`` if something would be lost.
    """
    cursor.execute(OBSTACLES)
    if obstacles := [obstacle for (obstacle,) in cursor.fetchall()]:
        raise NotConvertible(
            f"These are in the way or would be lost: {'; '.join(obstacles)}"
        )
    cursor.execute(INDEXES)
    indexes = cursor.fetchall()
    cursor.execute(GRANTS)
    grants = [grant for (grant,) in cursor.fetchall()]
    layout = read_layout(using=alias)
    like = template(cursor, layout.partitions)
    boundary = midnight(layout.now) + 2 * DAY
    name, first = f"{layout.schema}.{TABLE}", f"{layout.schema}.{FIRST}"
    return [
        f"LOCK TABLE {name} IN ACCESS EXCLUSIVE MODE",
        f"ALTER TABLE {name} RENAME TO {FIRST}",
        *(
            f"ALTER INDEX {layout.schema}.{index} RENAME TO {aside}"
            for index, aside, _definition, _primary in indexes
        ),
        (
            f"CREATE TABLE {name} (LIKE {first} INCLUDING ALL EXCLUDING INDEXES)"
            " PARTITION BY RANGE (created_at)"
        ),
        FORGET,
        *(
            definition
            for _name, _aside, definition, is_primary in indexes
            if not is_primary
        ),
        *like.owned(name),
        *grants,
        (
            f"ALTER TABLE {name} ATTACH PARTITION {first} FOR VALUES FROM (MINVALUE) TO"
            f" ('{stamp(boundary)}')"
        ),
        f"ALTER TABLE {first} DROP CONSTRAINT {UNTIL}",
        *creation(
            layout.schema,
            name_of(layout.schema, boundary),
            boundary,
            boundary + DAY,
            like,
        ),
    ]


def _convert(alias: str, cursor: Any) -> None:
    """Plan the switch under the table's lock and run it: something that would be lost
    may have come before that.
    """
    cursor.execute(f"LOCK TABLE {TABLE} IN ACCESS EXCLUSIVE MODE")
    for statement in _switch(alias, cursor):
        cursor.execute(statement)


def _patiently(alias: str, work: Callable[[Any], None]) -> None:
    """Run ``work`` in one transaction, and begin it again until it has its locks."""

    def convert() -> None:
        with short_transaction(alias, lock_timeout=LOCK_TIMEOUT) as cursor:
            keep_autovacuum_away(cursor, TABLE)
            work(cursor)

    try:
        patiently(convert, attempts=ATTEMPTS)
    except DatabaseError as error:
        if not is_conflict(error):
            raise
        message = (
            f"The lock on {TABLE} could not be obtained in {ATTEMPTS} attempts. Try"
            " again when it is not in use."
        )
        raise NotConvertible(message) from error


def _take_back(alias: str) -> None:
    try:
        if read_layout(using=alias).halfway:
            _patiently(alias, methodcaller("execute", FORGET))
    except (DatabaseError, NotConvertible) as error:
        message = "%s was left on %s: run idempotency_partitions enable again (%s)"
        log(logging.ERROR, "half_way", message, UNTIL, TABLE, cause(error))


@contextmanager
def _alone(alias: str) -> Iterator[None]:
    with connections[alias].cursor() as cursor:
        cursor.execute(f"SELECT pg_try_advisory_lock({CONVERTING})")
        if cursor.fetchone() != (True,):
            raise NotConvertible("Another session is converting the table.")
        try:
            yield
        finally:
            cursor.execute(f"SELECT pg_advisory_unlock({CONVERTING})")
