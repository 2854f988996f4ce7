"""Make the record table partitioned, in place and under load, or make it plain again.

What is read from the catalog becomes a ``Plan``, a list of statements. Nothing but the plan is run.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from operator import methodcaller
from typing import Any, TypeVar

from django.db import DatabaseError, connections

from django_idempotency.contrib.partitions.catalog import postgresql, read_layout
from django_idempotency.contrib.partitions.layout import DAY, TABLE, UNTIL, Bounds, Layout, half_detached, stamp
from django_idempotency.contrib.partitions.locks import (
    LOCK_TIMEOUT,
    at_work,
    keep_autovacuum_away,
    patiently,
    short_transaction,
    take_back_check,
)
from django_idempotency.contrib.partitions.templates import Template, creation, name_of, template
from django_idempotency.exceptions import NotConvertible
from django_idempotency.maintenance.sweep import stepwise
from django_idempotency.reporting.logs import cause, log
from django_idempotency.stores.errors import is_conflict

T = TypeVar("T")

ATTEMPTS = 100
FIRST, AWAY = f"{TABLE}_p0", f"{TABLE}_away"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """``before``: each in a transaction of its own. ``switch``: all in one transaction, for which claims wait."""

    before: tuple[str, ...] = ()
    switch: tuple[str, ...] = ()

    @property
    def statements(self) -> list[str]:
        return [*self.before, "BEGIN", *self.switch, "COMMIT"] if self.switch else []


@dataclass(frozen=True, slots=True, kw_only=True)
class Converted:
    """``partitioned``: what the table is now. ``changed``: false if it was that already."""

    partitioned: bool = False
    changed: bool = False

    def __add__(self, later: Converted) -> Converted:
        return later


@dataclass(frozen=True, slots=True)
class Index:
    """``aside``: the index's name once it belongs to the first partition."""

    name: str
    aside: str
    definition: str
    primary: bool


@dataclass(frozen=True, slots=True)
class Table:
    """What a table has beside its columns. Definitions and grants are statements about whatever has its name then.

    ``grants``: including its comment and publications. ``published``: whether any publication includes it, even one for
    all tables.
    """

    layout: Layout
    indexes: tuple[Index, ...]
    like: Template
    grants: tuple[str, ...]
    published: bool

    @property
    def name(self) -> str:
        return f"{self.layout.schema}.{TABLE}"

    @property
    def belongings(self) -> list[str]:
        indexes = (index.definition for index in self.indexes if not index.primary)
        return [*indexes, *self.like.owned(self.name), *self.grants]


# --- Reading the catalog ---------------------------------------------------------------------------------------------

INDEXES = f"""
SELECT quote_ident(relname), quote_ident(left(relname, 60) || '_p0'),
    replace(pg_get_indexdef(indexrelid), ' ON ONLY ', ' ON '), indisprimary
FROM pg_index JOIN pg_class ON oid = indexrelid WHERE indrelid = '{TABLE}'::regclass ORDER BY relname
"""

# The owner's own rights come with the table.
GRANTS = f"""
SELECT format(
    'GRANT %s ON {TABLE} TO %s%s', string_agg(privilege_type, ', ' ORDER BY privilege_type),
    CASE grantee WHEN 0 THEN 'PUBLIC' ELSE grantee::regrole::text END,
    CASE WHEN is_grantable THEN ' WITH GRANT OPTION' ELSE '' END
)
FROM pg_class, aclexplode(relacl) WHERE oid = '{TABLE}'::regclass AND grantee <> relowner
GROUP BY grantee, is_grantable
UNION ALL
SELECT format('COMMENT ON TABLE {TABLE} IS %L', obj_description('{TABLE}'::regclass))
WHERE obj_description('{TABLE}'::regclass) IS NOT NULL
UNION ALL
SELECT format('ALTER PUBLICATION %I ADD TABLE {TABLE}', pubname)
FROM pg_publication_rel JOIN pg_publication ON pg_publication.oid = prpubid WHERE prrelid = '{TABLE}'::regclass
"""

# Publications of the table or its partitions, including those for all tables or for all of a schema.
PUBLICATIONS = f"""
    pg_publication_tables JOIN pg_publication USING (pubname)
        JOIN pg_namespace ON nspname = schemaname
        JOIN pg_class ON relnamespace = pg_namespace.oid AND relname = tablename AND (
            pg_class.oid = '{TABLE}'::regclass
            OR pg_class.oid IN (SELECT inhrelid FROM pg_inherits WHERE inhparent = '{TABLE}'::regclass)
        )
"""
PUBLISHED = f"SELECT EXISTS (SELECT FROM {PUBLICATIONS})"

# What would be lost, would stay behind at the old table, or takes a place that is needed; each with its name.
OBSTACLES = f"""
SELECT pg_describe_object(classid, objid, objsubid) FROM pg_depend
WHERE refclassid = 'pg_class'::regclass AND refobjid = '{TABLE}'::regclass AND deptype = 'n'
    AND classid IN ('pg_rewrite'::regclass, 'pg_proc'::regclass)
UNION ALL
SELECT pg_describe_object('pg_constraint'::regclass, oid, 0) FROM pg_constraint
WHERE contype = 'f' AND '{TABLE}'::regclass IN (conrelid, confrelid)
UNION ALL
SELECT pg_describe_object('pg_trigger'::regclass, oid, 0) FROM pg_trigger
WHERE tgrelid = '{TABLE}'::regclass AND NOT tgisinternal
UNION ALL
SELECT pg_describe_object('pg_policy'::regclass, oid, 0) FROM pg_policy WHERE polrelid = '{TABLE}'::regclass
UNION ALL
SELECT pg_describe_object('pg_class'::regclass, indexrelid, 0) || ', which is unique' FROM pg_index
WHERE indrelid = '{TABLE}'::regclass AND indisunique AND NOT indisprimary
UNION ALL
SELECT 'a grant on the column ' || quote_ident(attname) FROM pg_attribute
WHERE attrelid = '{TABLE}'::regclass AND attacl IS NOT NULL
UNION ALL
SELECT 'inheritance by or from ' || (CASE inhparent WHEN oid THEN inhrelid ELSE inhparent END)::regclass
FROM pg_inherits JOIN pg_class ON oid = '{TABLE}'::regclass
WHERE relkind = 'r' AND '{TABLE}'::regclass IN (inhrelid, inhparent)
UNION ALL
SELECT pg_describe_object('pg_class'::regclass, pg_class.oid, 0) || ', which an earlier partitioning has left'
FROM pg_class JOIN pg_class AS record USING (relnamespace)
WHERE pg_class.relname = '{FIRST}' AND record.oid = '{TABLE}'::regclass AND record.relkind = 'r'
UNION ALL
SELECT 'the table being UNLOGGED' FROM pg_class WHERE oid = '{TABLE}'::regclass AND relpersistence <> 'p'
UNION ALL
SELECT 'row level security, which is on' FROM pg_class
WHERE oid = '{TABLE}'::regclass AND (relrowsecurity OR relforcerowsecurity)
UNION ALL
SELECT pg_describe_object('pg_class'::regclass, indexrelid, 0) || ' in the tablespace ' || quote_ident(spcname)
FROM pg_index JOIN pg_class ON oid = indexrelid JOIN pg_tablespace ON pg_tablespace.oid = reltablespace
WHERE indrelid = '{TABLE}'::regclass
UNION ALL
SELECT format(
    'the publication %1$I, which would send its subscribers partitions: '
    'ALTER PUBLICATION %1$I SET (publish_via_partition_root)',
    pubname
)
FROM {PUBLICATIONS} WHERE relkind = 'r' AND NOT relispartition AND NOT pubviaroot
UNION ALL
SELECT DISTINCT format('the publication %I, whose subscribers would be sent every record again', pubname)
FROM {PUBLICATIONS} WHERE relkind = 'p' OR relispartition
UNION ALL
SELECT 'a column list or condition of the publication ' || quote_ident(pubname)
FROM pg_publication_rel JOIN pg_publication ON pg_publication.oid = prpubid
WHERE prrelid = '{TABLE}'::regclass
    AND jsonb_strip_nulls(to_jsonb(pg_publication_rel)) - '{{oid,prpubid,prrelid}}'::text[] <> '{{}}'
"""


def _convertible(alias: str) -> Table:
    """Return what the table has. Raises ``NotConvertible`` if a conversion would lose something."""
    found = read_layout(using=alias)
    with connections[alias].cursor() as cursor:
        cursor.execute(OBSTACLES)
        obstacles = [*(obstacle for (obstacle,) in cursor.fetchall()), half_detached(found.partitions)]
        if any(obstacles):
            raise NotConvertible(f"These are in the way or would be lost: {'; '.join(filter(None, obstacles))}")
        cursor.execute(INDEXES)
        indexes = tuple(Index(*index) for index in cursor.fetchall())
        cursor.execute(GRANTS)
        grants = tuple(grant for (grant,) in cursor.fetchall())
        cursor.execute(PUBLISHED)
        (published,) = cursor.fetchone()
        return Table(found, indexes, template(cursor, found.partitions), grants, published)


# --- Doing it --------------------------------------------------------------------------------------------------------


def enable_plan(*, using: str | None = None) -> Plan:
    """Return what ``enable`` would do; nothing if the table is partitioned. Arguments and errors as for ``enable``.

    The table becomes the first partition, of all made before the day after tomorrow.
    """
    table = _convertible(postgresql(using))
    if table.layout.partitioned:
        return Plan()
    schema = table.layout.schema
    midnight = table.layout.now.replace(hour=0, minute=0, second=0, microsecond=0)
    boundary = midnight + 2 * DAY
    first, next_one = f"{schema}.{FIRST}", Bounds(boundary, boundary + DAY)
    forget = f"DROP CONSTRAINT {UNTIL}"
    return Plan(
        before=(
            # With this CHECK, the table can be attached without a look at the rows. The switch drops it again.
            f"ALTER TABLE {table.name} ADD CONSTRAINT {UNTIL} CHECK (created_at < '{stamp(boundary)}') NOT VALID",
            f"ALTER TABLE {table.name} VALIDATE CONSTRAINT {UNTIL}",
        ),
        switch=(
            f"LOCK TABLE {table.name} IN ACCESS EXCLUSIVE MODE",
            f"ALTER TABLE {table.name} RENAME TO {FIRST}",
            *(f"ALTER INDEX {schema}.{index.name} RENAME TO {index.aside}" for index in table.indexes),
            f"CREATE TABLE {table.name} (LIKE {first} INCLUDING ALL EXCLUDING INDEXES) PARTITION BY RANGE (created_at)"
            + table.like.placed(),
            *table.like.measured(table.name),
            f"ALTER TABLE {table.name} {forget}",
            *table.belongings,
            *([f"ALTER TABLE {table.name} REPLICA IDENTITY FULL"] if table.published else []),
            f"ALTER TABLE {table.name} ATTACH PARTITION {first} FOR VALUES FROM (MINVALUE) TO ('{stamp(boundary)}')",
            f"ALTER TABLE {first} {forget}",
            *creation(schema, name_of(schema, next_one), next_one, table.like),
        ),
    )


@stepwise
def enable(*, using: str | None = None) -> Iterator[Converted]:
    """Make the table partitioned by day. Claims wait for it about 100 ms at a time, and go on as before.

    Existing keys are kept, live ones included. The partitions that ``ensure`` makes still have to be made afterwards.
    ``using``: the database's alias; default: the settings'. Raises ``NotConvertible`` if something is in the way or if
    a lock could not be had, and ``PartitionsUnsupported`` on databases other than PostgreSQL. Then nothing is changed,
    nor is it if the steps are left half-way.
    """
    alias = postgresql(using)
    with _alone(alias):
        if read_layout(using=alias).halfway:
            take_back_check(alias)
        plan = partial(enable_plan, using=alias)
        before = plan().before
        try:
            for statement in before:
                _patiently(alias, methodcaller("execute", statement))
                yield Converted()
            changed = bool(before) and _switch(alias, plan)
        except BaseException:  # Ctrl-C, too, must leave no table half converted
            _take_back(alias)
            raise
    yield Converted(partitioned=True, changed=changed)


def disable_plan(*, using: str | None = None) -> Plan:
    """Return what ``disable`` would do; nothing if the table is plain. Arguments and errors as for ``enable``."""
    table = _convertible(postgresql(using))
    if not table.layout.partitioned:
        return Plan()
    away = f"{table.layout.schema}.{AWAY}"
    return Plan(
        switch=(
            f"LOCK TABLE {table.name} IN ACCESS EXCLUSIVE MODE",
            f"ALTER TABLE {table.name} RENAME TO {AWAY}",
            table.like.created(table.name, f"LIKE {away} INCLUDING ALL EXCLUDING INDEXES"),
            f"INSERT INTO {table.name} SELECT * FROM {away}",
            f"DROP TABLE {away}",
            f"ALTER TABLE {table.name} ADD CONSTRAINT {TABLE}_pkey PRIMARY KEY (id)",
            *table.like.measured(table.name),
            *table.like.identified(table.name),
            *table.belongings,
        ),
    )


def disable(*, using: str | None = None) -> Converted:
    """Make the table plain again. All rows are copied, and claims wait for as long as that takes.

    Arguments and errors as for ``enable``.
    """
    alias = postgresql(using)
    with _alone(alias):
        plan = partial(disable_plan, using=alias)
        return Converted(partitioned=False, changed=bool(plan().switch) and _switch(alias, plan))


def _take_back(alias: str) -> None:
    try:
        if read_layout(using=alias).halfway:
            take_back_check(alias)
    except DatabaseError as error:
        message = "%s was left on %s: run idempotency_partitions ensure (%s)"
        log(logging.ERROR, "half_way", message, UNTIL, TABLE, cause(error))


def _switch(alias: str, plan: Callable[[], Plan]) -> bool:
    """Make the plan under the table's lock and run it: something that would be lost may have come before that."""

    def switch(cursor: Any) -> bool:
        cursor.execute(f"LOCK TABLE {TABLE} IN ACCESS EXCLUSIVE MODE")
        statements = plan().switch
        for statement in statements:
            cursor.execute(statement)
        return bool(statements)

    return _patiently(alias, switch)


def _patiently(alias: str, work: Callable[[Any], T]) -> T:
    """Run ``work`` in one transaction, and begin it again until it has its locks."""

    def convert() -> T:
        with short_transaction(alias, lock_timeout=LOCK_TIMEOUT) as cursor:
            keep_autovacuum_away(cursor, TABLE)
            return work(cursor)

    try:
        return patiently(convert, attempts=ATTEMPTS)
    except DatabaseError as error:
        if not is_conflict(error):
            raise
        raise NotConvertible(
            f"The lock on {TABLE} could not be obtained in {ATTEMPTS} attempts. {_users(alias)} Try again when it is "
            "not in use."
        ) from error


# A role without pg_read_all_stats sees no more of other roles' sessions than that they exist.
USERS = f"""
SELECT DISTINCT format(
    '%s (%s%s)', pid, coalesce(backend_type, 'unknown'),
    ', for ' || round(extract(epoch FROM statement_timestamp() - xact_start)) || ' s'
)
FROM pg_locks JOIN pg_stat_activity USING (pid)
WHERE relation = '{TABLE}'::regclass AND granted AND pid <> pg_backend_pid() ORDER BY 1 LIMIT 10
"""


def _users(alias: str) -> str:
    """Return a sentence that lists the sessions that use the table now, by process id."""
    with connections[alias].cursor() as cursor:
        cursor.execute(USERS)
        users = ", ".join(user for (user,) in cursor.fetchall())
    return f"In use now by {users}." if users else "Nothing is using it now."


@contextmanager
def _alone(alias: str) -> Iterator[None]:
    with at_work(alias, alone=True) as alone:
        if not alone:
            raise NotConvertible("Another session is converting the table or dropping partitions of it.")
        yield
