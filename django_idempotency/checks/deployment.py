"""System checks of ``check --deploy``: what is known to go wrong in production.

Those that have to query the database need ``check --deploy --database default``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from ipaddress import ip_address
from typing import Any

from django.core.checks import CheckMessage, Error, Tags, Warning, register
from django.db import connections

from django_idempotency import conf
from django_idempotency.checks.databases import record_databases
from django_idempotency.checks.settings import Apps, are_usable
from django_idempotency.maintenance.reaper import is_overdue
from django_idempotency.maintenance.records import records
from django_idempotency.models import IdempotencyRecord
from django_idempotency.stores.database import ahead

TABLE = IdempotencyRecord._meta.db_table
HOUR, DAY = 60 * 60, 24 * 60 * 60
LONGEST_LOCK = 300  # seconds that a lock may stay after its host is gone

NAMES = [
    "client_connection_check_interval",
    "default_transaction_isolation",
    "fsync",
    "full_page_writes",
    "idle_in_transaction_session_timeout",
    "synchronous_commit",
    "synchronous_standby_names",
    "tcp_keepalives_count",
    "tcp_keepalives_idle",
    "tcp_keepalives_interval",
    "tcp_user_timeout",
    "transaction_timeout",
]
ADDRESSES = "SELECT host(inet_client_addr()), host(inet_server_addr())"
KEEPALIVES = (
    "ALTER SYSTEM SET tcp_keepalives_idle = 30; ALTER SYSTEM SET tcp_keepalives_interval = 10; "
    "ALTER SYSTEM SET tcp_keepalives_count = 3; SELECT pg_reload_conf();"
)
CONNECTION_CHECK = "ALTER SYSTEM SET client_connection_check_interval = '10s'; SELECT pg_reload_conf();"
UNLOGGED = """
SELECT relname FROM pg_class
WHERE relpersistence = 'u' AND (oid = %s::regclass OR oid IN (SELECT relid FROM pg_partition_tree(%s::regclass)))
ORDER BY 1
"""
# A role that may not see the state of other sessions sees NULL.
STANDBYS = """
SELECT count(*) FROM pg_stat_replication AS standby
WHERE coalesce(standby.state, 'streaming') = 'streaming' AND NOT EXISTS (
    SELECT FROM pg_replication_slots WHERE active_pid = standby.pid AND slot_type = 'logical'
)
"""


@register(Tags.database, deploy=True)
def check_server(app_configs: Apps, databases: Iterable[str] | None = None, **kwargs: Any) -> list[CheckMessage]:
    """W013, W014, E015, W016, W017, W018 and W019, for every PostgreSQL database that holds records."""
    return [
        message
        for using in _asked(databases)
        if connections[using].vendor == "postgresql"
        for message in (*_locks(using), *_table(using), *_durability(using), *_isolation(using))
    ]


@register(Tags.database, deploy=True)
def check_maintenance(app_configs: Apps, databases: Iterable[str] | None = None, **kwargs: Any) -> list[CheckMessage]:
    """W020 and W021, judged by what has been left in the table."""
    return [message for using in _asked(databases) for message in _left(using)]


def _asked(databases: Iterable[str] | None) -> list[str]:
    """Return the databases that hold records, may be queried, and have been migrated."""
    wanted = sorted(set(databases or ()) & record_databases())
    return [using for using in wanted if TABLE in connections[using].introspection.table_names()]


# --- The server ------------------------------------------------------------------------------------------------------


def _settings(using: str) -> Mapping[str, str]:
    """Return the settings in force for the application's sessions: for its role, in its database."""
    return dict(_fetch(using, "SELECT name, setting FROM pg_settings WHERE name = ANY(%s)", NAMES))


def _fetch(using: str, query: str, *values: Any) -> Any:
    with connections[using].cursor() as cursor:
        cursor.execute(query, values)
        return cursor.fetchall()


def _locks(using: str) -> Iterator[CheckMessage]:
    if not is_remote(*_fetch(using, ADDRESSES)[0]):
        return
    settings = _settings(using)
    seconds = noticed_after(settings)
    if seconds > LONGEST_LOCK:
        yield Warning(
            f"The database {using!r} keeps the row locks of a dead host for {seconds:.0f} s: until then, requests "
            "with its keys get 409.",
            hint=f"On the server, as a superuser: {KEEPALIVES}",
            id="django_idempotency.W013",
        )
    if settings.get("client_connection_check_interval") == "0":
        yield Warning(
            f"The database {using!r} does not check whether a client is still connected while it executes a "
            "statement: a dead process's statement keeps its row locks until it ends.",
            hint=f"On the server, as a superuser: {CONNECTION_CHECK}",
            id="django_idempotency.W014",
        )


def is_remote(client: str | None, server: str | None) -> bool:
    """Whether a connection comes from another host. One over a Unix socket has no addresses."""
    return client is not None and client != server and not ip_address(client).is_loopback


def noticed_after(settings: Mapping[str, str]) -> float:
    """Seconds until a server with these settings ends the transaction of an idle client whose host is gone. Pure."""
    idle, interval, count = (int(settings[f"tcp_keepalives_{name}"]) for name in ("idle", "interval", "count"))
    unanswered = int(settings["tcp_user_timeout"]) / 1000
    # On Linux, tcp_user_timeout replaces tcp_keepalives_count.
    keepalive = max(idle + interval, unanswered) if unanswered else idle + interval * count
    timeouts = (
        int(settings.get(name, 0)) / 1000 for name in ("idle_in_transaction_session_timeout", "transaction_timeout")
    )
    return min([keepalive, *filter(None, timeouts)])


def _table(using: str) -> Iterator[CheckMessage]:
    for (name,) in _fetch(using, UNLOGGED, TABLE, TABLE):
        yield Error(
            f"The table {name} in the database {using!r} is UNLOGGED: a crash of the server empties it, and every "
            "operation whose key was in it can run again.",
            hint=f"ALTER TABLE {name} SET LOGGED",
            id="django_idempotency.E015",
        )


def _durability(using: str) -> Iterator[CheckMessage]:
    settings = _settings(using)
    commit, standbys = settings["synchronous_commit"], settings["synchronous_standby_names"]
    if commit == "off" or (commit == "local" and standbys):
        lost = "a crash of the server" if commit == "off" else "a failover"
        yield Warning(
            f"synchronous_commit is {commit} in the database {using!r}: {lost} may lose responses that clients have "
            "received, and in lease mode keys whose effects remain.",
            hint="Leave synchronous_commit on for the role and the database; claims do without it where they can.",
            id="django_idempotency.W016",
        )
    unsafe = [name for name in ("fsync", "full_page_writes") if settings[name] == "off"]
    if unsafe:
        yield Warning(
            f"{' and '.join(unsafe)} off on the server of the database {using!r}: a crash of its machine can corrupt "
            "any table, including the records'.",
            hint="Turn them on. No guarantee holds without them.",
            id="django_idempotency.W017",
        )
    ((streaming,),) = _fetch(using, STANDBYS)
    if streaming and not standbys:
        yield Warning(
            f"The database {using!r} has {streaming} streaming standbys, none of them synchronous: a failover may "
            "lose the latest responses and keys, and in lease mode keys whose effects remain.",
            hint="Set synchronous_standby_names, or accept this: see Durability on the page about deployment.",
            id="django_idempotency.W018",
        )


def _isolation(using: str) -> Iterator[CheckMessage]:
    connection: Any = connections[using]
    level = _settings(using)["default_transaction_isolation"]
    if "isolation_level" in connection.settings_dict["OPTIONS"]:
        level = connection.isolation_level.name.lower()
    if level == "serializable":
        yield Warning(
            f"Transactions in the database {using!r} are SERIALIZABLE: records of unrelated keys share index pages, "
            "so requests fail with serialization errors that would not occur without keys.",
            hint="Have clients retry 5xx with the same key, or use a lower isolation level for the views with keys.",
            id="django_idempotency.W019",
        )


# --- Maintenance -----------------------------------------------------------------------------------------------------


def _left(using: str) -> Iterator[CheckMessage]:
    if records(using).purgeable().filter(purge_at__lt=ahead(-DAY)).order_by("purge_at")[:1]:
        yield Warning(
            f"Records in the database {using!r} have been due for deletion for more than a day: idempotency_cleanup is "
            "not scheduled, or does not keep up.",
            hint="Schedule idempotency_cleanup; idempotency_stats shows how far behind it is.",
            id="django_idempotency.W020",
        )
    if is_overdue(older_than=HOUR, using=using):
        yield Warning(
            f"The owners of keys in the database {using!r} have been gone for more than an hour: idempotency_reap is "
            "not scheduled, or fails.",
            hint="Schedule idempotency_reap. Until then such records are never cleaned up.",
            id="django_idempotency.W021",
        )


@register(deploy=True)
def check_enabled(app_configs: Apps, **kwargs: Any) -> list[CheckMessage]:
    """W055: ``ENABLED`` is off."""
    if not are_usable() or conf.conf().enabled:
        return []
    return [
        Warning(
            "ENABLED is off in the IDEMPOTENCY setting: keys of requests are ignored, and retries run again.",
            hint="Turn it on, unless this is an emergency.",
            id="django_idempotency.W055",
        )
    ]


@register(deploy=True)
def check_observing(app_configs: Apps, **kwargs: Any) -> list[CheckMessage]:
    """W080: ``OBSERVE`` is on, so nothing is protected."""
    if not are_usable() or not conf.conf().observes:
        return []
    counts = "" if conf.conf().stats_retention else " Nothing is counted either: STATS_RETENTION is None."
    return [
        Warning(
            f"OBSERVE is on in the IDEMPOTENCY setting: requests are only observed, and retries run again.{counts}",
            hint="Remove it once you have seen enough.",
            id="django_idempotency.W080",
        )
    ]


@register(deploy=True)
def check_beat_schedule(app_configs: Apps, **kwargs: Any) -> list[CheckMessage]:
    """W022: Celery beat has a schedule, but our maintenance is not in it."""
    celery: Any = sys.modules.get("celery")
    scheduled = {entry.get("task") for entry in celery.current_app.conf.beat_schedule.values()} if celery else set()
    missing = sorted({"django_idempotency.cleanup", "django_idempotency.reap"} - scheduled)
    if not scheduled or not missing:
        return []
    return [
        Warning(
            f"Celery beat has a schedule, but {' and '.join(missing)} are not in it.",
            hint="Add django_idempotency.tasks.BEAT_SCHEDULE, or silence this if something else schedules maintenance.",
            id="django_idempotency.W022",
        )
    ]
