"""Tells the core which tables Citus distributes by ``id``, and how to distribute them."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from uuid import UUID

from django.apps import apps
from django.db import NotSupportedError, ProgrammingError, connections
from django.db.backends.base.base import BaseDatabaseWrapper

from django_idempotency.exceptions import NotConvertible
from django_idempotency.models import IdempotencyRecord
from django_idempotency.stores.claim_function import is_partitioned
from django_idempotency.stores.connections import record_database
from django_idempotency.stores.transactions import Transaction

TABLE = IdempotencyRecord._meta.db_table

ANY_ROWS = f"SELECT id FROM {TABLE} LIMIT 0 FOR NO KEY UPDATE"
# Always in the same order, so that two callers that lock these groups can't wait for each other.
BY_SHARD = f"""
SELECT array_agg(id ORDER BY id) FROM (
    SELECT id, get_shard_id_for_distribution_column('{TABLE}', id) AS shard FROM unnest(%s::uuid[]) AS id
) AS placed GROUP BY shard ORDER BY shard
"""

_distributed: dict[str, bool] = {}
# These tables are small, and are written by transactions of their own.
COPIED = "django_idempotency_dashboard"
# Effects and their events are written in one transaction.
LOCAL = "django_idempotency_outbox"

EXTENSION = "SELECT count(*) FROM pg_extension WHERE extname = 'citus'"
NODES = "SELECT count(*) FILTER (WHERE groupid = 0), count(*) FILTER (WHERE groupid > 0) FROM pg_dist_node"
KNOWN = "SELECT relname FROM pg_dist_partition JOIN pg_class ON pg_class.oid = logicalrelid"
FUNCTION = """
SELECT claim.oid::regprocedure::text, distributed.distribution_argument_index IS NOT NULL
FROM pg_proc AS claim LEFT JOIN pg_dist_object AS distributed
    ON distributed.classid = 'pg_proc'::regclass AND distributed.objid = claim.oid
WHERE claim.proname = 'django_idempotency_claim' AND pg_function_is_visible(claim.oid)
"""


def is_distributed(using: str) -> bool:
    """Return whether the rows are on several servers, so that no statement can lock arbitrary ones.

    Each process tries this once. False if there is no such table. Raises Django's ``OperationalError`` if the database
    can't be reached.
    """
    if using not in _distributed:
        _distributed[using] = connections[using].vendor == "postgresql" and not _locks_any(using)
    return _distributed[using]


def _locks_any(using: str) -> bool:
    try:
        with Transaction(using), connections[using].cursor() as cursor:
            cursor.execute(ANY_ROWS)
    except NotSupportedError:
        return False
    except ProgrammingError:  # no such table, or not for this role
        return True
    return True


def in_shards(ids: Collection[UUID], using: str) -> list[list[UUID]]:
    """Return ``ids`` in groups, each of which one statement can lock."""
    with connections[using].cursor() as cursor:
        cursor.execute(BY_SHARD, [list(ids)])
        return [found for (found,) in cursor.fetchall()]


# --- What is left to run to distribute the tables: this changes nothing ----------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class DistributionPlan:
    """``statements``: what is left to run on the coordinator, in this order. ``cautions``: what is left to you."""

    statements: tuple[str, ...]
    cautions: tuple[str, ...]


def distribution_plan(using: str | None = None) -> DistributionPlan:
    """Return what is left to run to distribute the tables of the database ``using`` with Citus.

    Raises ``NotConvertible`` if Citus is not installed, or if the table is partitioned.
    """
    connection = connections[record_database(using)]
    if connection.vendor != "postgresql" or not _ask(connection, EXTENSION)[0][0]:
        raise NotConvertible(
            "The extension Citus is not installed in this database. Run CREATE EXTENSION citus on every node."
        )
    if is_partitioned(connection):
        raise NotConvertible(
            "The table is partitioned: no constraint makes a key unique in it. First make it a plain table."
        )
    ((coordinator, workers),) = _ask(connection, NODES)
    known = {name for (name,) in _ask(connection, KNOWN)}
    there = set(connection.introspection.table_names())
    return DistributionPlan(
        statements=tuple(_statements(connection, there - known, has_coordinator=bool(coordinator))),
        cautions=tuple(_cautions(there - known, has_workers=bool(workers))),
    )


def _statements(connection: BaseDatabaseWrapper, plain: set[str], *, has_coordinator: bool) -> Iterator[str]:
    if not has_coordinator:
        yield "SELECT citus_set_coordinator_host('coordinator.example.com', 5432)"
    if TABLE in plain:
        yield f"SELECT create_distributed_table('{TABLE}', 'id', colocate_with := 'none')"
    for signature, distributed in _ask(connection, FUNCTION):
        if not distributed:
            yield f"SELECT create_distributed_function('{signature}', 'new_id', colocate_with := '{TABLE}')"
    for table in sorted(plain & _tables(COPIED)):
        yield f"SELECT create_reference_table('{table}')"
    for table in sorted(plain & _tables(LOCAL)):
        yield f"SELECT citus_add_local_table_to_metadata('{table}')"


def _cautions(plain: set[str], *, has_workers: bool) -> Iterator[str]:
    if not has_workers:
        yield "There are no workers yet. First run SELECT citus_add_node('worker.example.com', 5432) for each."
    if TABLE in plain:
        yield "Serve no requests with a key in the meantime, and restart every process of the application afterwards."
    if others := sorted((plain & _tables()) - _tables("django_idempotency", COPIED, LOCAL)):
        yield (
            "Citus does not know these tables. What a view writes to them is not committed in one step with its "
            "record. Distribute those that views write to, or add them with citus_add_local_table_to_metadata(…, "
            f"cascade_via_foreign_keys := true): {', '.join(others)}"
        )


def _tables(*labels: str) -> set[str]:
    """Return the tables of the apps with these labels, or of all."""
    models = (model._meta for model in apps.get_models(include_auto_created=True) if model._meta.managed)
    return {model.db_table for model in models if not labels or model.app_label in labels}


def _ask(connection: BaseDatabaseWrapper, question: str) -> list[tuple[object, ...]]:
    with connection.cursor() as cursor:
        cursor.execute(question)
        return list(cursor.fetchall())
