"""Checks of the databases that hold records."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from typing import Any
from zoneinfo import ZoneInfo

from django.core.checks import CheckMessage, Error, Tags, Warning, register
from django.core.exceptions import ImproperlyConfigured
from django.db import OperationalError, ProgrammingError, connections, transaction

from django_idempotency import conf
from django_idempotency.checks.settings import Apps, are_usable
from django_idempotency.checks.views import views
from django_idempotency.partitions.catalog import read_layout
from django_idempotency.partitions.layout import TABLE, Layout, covered_until, half_detached, is_short, stamp
from django_idempotency.policy import Mode, OnConflict, Policy
from django_idempotency.scopes import tenant_databases
from django_idempotency.stores.claim_function import can_claim
from django_idempotency.stores.configured import configured
from django_idempotency.stores.connections import aliases, has_psycopg3
from django_idempotency.stores.errors import UNTIL
from django_idempotency.stores.probing import Capabilities, probe


def record_databases() -> set[str]:
    """Return the aliases of the databases that hold records; none if the settings can't be read."""
    if not are_usable():
        return set()
    found = {alias for policy in _policies() if _in_database(policy) for alias in aliases(policy)}
    return found & set(connections)  # E075


def _in_database(policy: Policy) -> bool:
    try:
        return configured(policy.store).backend.transactional
    except ImproperlyConfigured:  # E070
        return False


@register(Tags.compatibility)
def check_databases(app_configs: Apps, **kwargs: Any) -> list[CheckMessage]:
    """E007: SQLite in production."""
    return [
        Error(
            f"The idempotency records are in SQLite (database {using!r}), and DEBUG is off.",
            hint="SQLite has no row locks, so every request waits for every other; use PostgreSQL or MariaDB.",
            id="django_idempotency.E007",
        )
        for using in record_databases()
        if connections[using].vendor == "sqlite" and not (conf.debug() or conf.in_test_run())
    ]


@register(Tags.compatibility)
def check_claims_by_lock(app_configs: Apps, **kwargs: Any) -> list[CheckMessage]:
    """E084: claims by lock in a database that is not PostgreSQL."""
    return [
        Error(
            f'claim is "lock", but the database {using!r} is {connections[using].vendor}, where claims are made by '
            "record.",
            hint='Only PostgreSQL has locks that a transaction can try to take. Set claim="record", or leave it out.',
            id="django_idempotency.E084",
        )
        for using in sorted(record_databases())
        if connections[using].vendor != "postgresql" and _has_claims_by_lock(using)
    ]


@register(Tags.compatibility)
def check_time_zones(app_configs: Apps, **kwargs: Any) -> list[CheckMessage]:
    """W057: psycopg2 in a time zone with summer time. It can't tell apart the two hours in autumn that look alike."""
    zones = {using: connections[using].timezone_name for using in sorted(record_databases()) if _is_psycopg2(using)}
    return [
        Warning(
            f"psycopg2 reads the database {using!r} in the time zone {zone}, which has daylight saving time.",
            hint="In the hour that repeats in autumn, leases and retentions may be an hour off. Install psycopg 3, "
            "or set USE_TZ = True and no TIME_ZONE for the database.",
            id="django_idempotency.W057",
        )
        for using, zone in zones.items()
        if _has_summer_time(ZoneInfo(zone))
    ]


def _is_psycopg2(using: str) -> bool:
    return connections[using].vendor == "postgresql" and not has_psycopg3(connections[using])


def _has_summer_time(zone: ZoneInfo) -> bool:
    year = datetime.now(UTC).year
    return len({datetime(year, month, 1, tzinfo=zone).utcoffset() for month in (1, 7)}) > 1


@register(Tags.database)
def check_row_locks(app_configs: Apps, databases: Iterable[str] | None = None, **kwargs: Any) -> list[CheckMessage]:
    """E008: a database without ``SKIP LOCKED`` or ``NOWAIT``."""
    return [
        Error(
            f"The database {using!r} does not support SELECT … FOR UPDATE with SKIP LOCKED and NOWAIT.",
            hint="Use PostgreSQL, or MariaDB 10.6 or later.",
            id="django_idempotency.E008",
        )
        for using in set(databases or ()) & record_databases()
        if not _locks_rows_without_waiting(using)
    ]


@register(Tags.database)
def check_transactions(app_configs: Apps, databases: Iterable[str] | None = None, **kwargs: Any) -> list[CheckMessage]:
    """E046: a pooler in statement mode."""
    return [
        Error(
            f"The database {using!r} is behind a pooler in statement mode, which refuses transactions.",
            hint="Every request with a key gets 503. Set PgBouncer's pool_mode to transaction or session.",
            id="django_idempotency.E046",
        )
        for using in sorted(set(databases or ()) & record_databases())
        if _refuses_transactions(using)
    ]


def _refuses_transactions(using: str) -> bool:
    """Whether PgBouncer says so in its message; its error code is that of any violation of the protocol."""
    try:
        with transaction.atomic(using=using), connections[using].cursor() as cursor:
            cursor.execute("SELECT 1")
    except OperationalError as error:
        return "statement pooling" in str(error)
    return False


@register(Tags.database)
def check_privileges(app_configs: Apps, databases: Iterable[str] | None = None, **kwargs: Any) -> list[CheckMessage]:
    """E040: a role that may not read and write the records."""
    return [
        Error(
            f"The application's role may not {', '.join(lacking)} the idempotency records in {using!r}.",
            hint=f"Requests with a key fail; in lease mode, after their effects. GRANT {', '.join(lacking)} ON "
            f"{TABLE} to that role.",
            id="django_idempotency.E040",
        )
        for using in sorted(set(databases or ()) & record_databases())
        if not _refuses_transactions(using) and (lacking := _lacking_privileges(using))
    ]


# Connections of a process outside its pool: for leases and for background writes; and another one if callers wait.
OWN_CONNECTIONS, OF_WAITERS = 2, 1
CONNECTION_LIMIT = """
SELECT least(
    current_setting('max_connections')::int - current_setting('superuser_reserved_connections')::int,
    (SELECT nullif(datconnlimit, -1) FROM pg_database WHERE datname = current_database()),
    (SELECT nullif(rolconnlimit, -1) FROM pg_roles WHERE rolname = current_user)
)
"""


@register(Tags.database)
def check_connections(app_configs: Apps, databases: Iterable[str] | None = None, **kwargs: Any) -> list[CheckMessage]:
    """E056: a pool that leaves the server no connection for the leases."""
    waits = any(policy.on_conflict == OnConflict.WAIT for policy in _policies()) if are_usable() else False
    own = OWN_CONNECTIONS + waits * OF_WAITERS
    return [
        Error(
            f"The pool of {using!r} may open {size} connections, but the server allows this role only {limit}.",
            hint=f"Each process needs {own} more outside the pool; without one, no lease is renewed. Lower the pool's "
            "max_size, or raise the limit.",
            id="django_idempotency.E056",
        )
        for using in sorted(set(databases or ()) & record_databases())
        if (size := _pool_size(using)) and size + own > (limit := _connection_limit(using))
    ]


def _pool_size(using: str) -> int:
    """Return the most connections that a process's pool opens; 0 without a pool."""
    pool = connections[using].settings_dict["OPTIONS"].get("pool")
    if not pool or connections[using].vendor != "postgresql":
        return 0
    options = pool if isinstance(pool, dict) else {}
    return int(options.get("max_size") or options.get("min_size", 4))


def _connection_limit(using: str) -> int:
    with connections[using].cursor() as cursor:
        cursor.execute(CONNECTION_LIMIT)
        (limit,) = cursor.fetchone()
    return int(limit)


# EXPLAIN needs the privilege of the statement, but doesn't run it.
STATEMENTS = {
    "SELECT": f"SELECT * FROM {TABLE}",
    "INSERT": f"INSERT INTO {TABLE} SELECT * FROM {TABLE}",
    "UPDATE": f"UPDATE {TABLE} SET token = NULL",
    "DELETE": f"DELETE FROM {TABLE}",
}


def _lacking_privileges(using: str) -> list[str]:
    if connections[using].vendor == "sqlite" or TABLE not in connections[using].introspection.table_names():
        return []
    return [privilege for privilege, statement in STATEMENTS.items() if not _may(statement, using)]


def _may(statement: str, using: str) -> bool:
    try:
        with transaction.atomic(using=using), connections[using].cursor() as cursor:
            cursor.execute(f"EXPLAIN {statement}")
    except (OperationalError, ProgrammingError):
        return False
    return True


@register(Tags.urls)
def check_tenants(app_configs: Apps, **kwargs: Any) -> list[CheckMessage]:
    """E041: records in a database without tenants if several others have some: no default scope tells them apart."""
    if not are_usable():
        return []
    tenants = set(tenant_databases())
    unscoped = [policy for policy in _policies() if policy.scope is None]
    return [
        Error(
            f"The records are in the database {using!r}, which has no tenants, while several others have them: the "
            "default scope can't tell whose key it is.",
            hint="Set a scope that names tenant and user, or set using=… to the database of the tenant's effects.",
            id="django_idempotency.E041",
        )
        for using in sorted({alias for policy in unscoped for alias in aliases(policy)} - tenants)
        if len(tenants) > 1
    ]


def _locks_rows_without_waiting(using: str) -> bool:
    features = connections[using].features
    return not features.has_select_for_update or bool(  # no row locks at all: SQLite, E007
        features.has_select_for_update_skip_locked and features.has_select_for_update_nowait
    )


@register(Tags.database)
def check_claim_function(
    app_configs: Apps, databases: Iterable[str] | None = None, **kwargs: Any
) -> list[CheckMessage]:
    """W025: a PostgreSQL database whose claim function is missing, or not for this role to call."""
    return [
        Warning(
            f"The database {using!r} has the table of the idempotency records, but no claim function that this role "
            "can call.",
            hint="Every claim takes more statements, or fails on a partitioned table. Run migrate, or grant the "
            "application's role EXECUTE on the function django_idempotency_claim.",
            id="django_idempotency.W025",
        )
        for using in set(databases or ()) & record_databases()
        if not can_claim(connections[using])
    ]


@register(Tags.database)
def check_capabilities(app_configs: Apps, databases: Iterable[str] | None = None, **kwargs: Any) -> list[CheckMessage]:
    """E076, E077, W078 and E084: what a database that calls itself PostgreSQL lacks, found by trying it."""
    found: list[CheckMessage] = []
    for using in sorted(set(databases or ()) & record_databases()):
        if _refuses_transactions(using):  # E046
            continue
        if connections[using].vendor == "postgresql" and TABLE in connections[using].introspection.table_names():
            found += _lacking(using, probe(using))
    return found


def _lacking(using: str, seen: Capabilities) -> Iterator[CheckMessage]:
    if not seen.unique:
        yield Error(
            f"In the database {using!r} a key can be claimed twice: the table is partitioned, and "
            f"{_why_not_unique(seen)}.",
            hint="Use a plain table, or a database whose advisory locks work.",
            id="django_idempotency.E076",
        )
    if seen.distributed and _has_claims_by_lock(using):
        yield Error(
            f'claim is "lock", but in the database {using!r} the records are on several servers, each with advisory '
            "locks of its own.",
            hint='Set claim="record", or leave it out: claims are made by record there, whatever the policy says.',
            id="django_idempotency.E084",
        )
    elif not seen.key_locks and _has_claims_by_lock(using):
        yield Error(
            f'claim is "lock", but advisory locks in the database {using!r} do not exclude other sessions: every '
            "duplicate would run until the record of one of them is written.",
            hint='Set claim="record", or leave it out.',
            id="django_idempotency.E084",
        )
    if seen.row_locks is False and any(_is_atomic_on(using, policy) for policy in _policies()):
        yield Error(
            f"A policy is in atomic mode, but row locks in the database {using!r} do not stop other sessions: nothing "
            "there proves that an owner is alive, and a run could be taken over while it is under way.",
            hint='Optimistic databases such as Aurora DSQL have no such locks. Set mode="lease".',
            id="django_idempotency.E077",
        )
    if seen.function and not seen.place:
        yield Warning(
            f"Rows in the database {using!r} are not found at the place that their claim returned.",
            hint="Everything works, but each run takes two more statements.",
            id="django_idempotency.W078",
        )


def _why_not_unique(seen: Capabilities) -> str:
    if not seen.function:
        return "the claim function can't be called"
    return "its rows are on several servers" if seen.distributed else "advisory locks do not exclude other sessions"


def _policies() -> list[Policy]:
    return [conf.conf().policy, *(policy for _view, policy in views())]


def _has_claims_by_lock(using: str) -> bool:
    return any(policy.claims_by_lock and _is_atomic_on(using, policy) for policy in _policies())


def _is_atomic_on(using: str, policy: Policy) -> bool:
    return policy.mode == Mode.ATOMIC and _in_database(policy) and using in aliases(policy)


@register(Tags.database)
def check_partitions(app_configs: Apps, databases: Iterable[str] | None = None, **kwargs: Any) -> list[CheckMessage]:
    """W026: few future partitions. W027: ones that claims read whole. W028, W029: a half ``enable`` or ``DETACH``."""
    found: list[CheckMessage] = []
    for using in sorted(set(databases or ()) & record_databases()):
        if connections[using].vendor == "postgresql" and TABLE in connections[using].introspection.table_names():
            found += _partition_messages(read_layout(using=using), using)
    return found


def _partition_messages(found: Layout, using: str) -> Iterator[CheckMessage]:
    command = f"manage.py idempotency_partitions ensure --database {using}"
    until = covered_until(found.partitions, found.now)
    if found.partitioned and until is not None and is_short(found.partitions, found.now):
        yield Warning(
            f"The idempotency records in {using!r} have partitions only until {stamp(until)}.",
            hint=f"Without a partition, requests with a key are refused. Run {command}, and schedule it.",
            id="django_idempotency.W026",
        )
    if unkeyed := [partition.name for partition in found.partitions if not partition.keyed and not partition.default]:
        yield Warning(
            f"Partitions of the idempotency records without a unique index on id: {', '.join(unkeyed)}.",
            hint=f"Every claim reads them in full. {command} fixes future ones.",
            id="django_idempotency.W027",
        )
    if found.halfway and not found.partitioned:
        yield Warning(
            f"Partitioning the idempotency records in {using!r} was interrupted and left a CHECK ({UNTIL}) behind.",
            hint=f"In a day or two it will refuse new records. Run {command}, which removes it, or run enable again.",
            id="django_idempotency.W028",
        )
    if pending := half_detached(found.partitions):
        yield Warning(
            f"Claims can't see a partition of the idempotency records in {using!r}: {pending}",
            hint="Operations with its keys can run again. Finish detaching it, and attach it again if the keys are "
            "still wanted.",
            id="django_idempotency.W029",
        )
