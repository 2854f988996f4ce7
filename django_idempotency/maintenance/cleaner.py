"""Delete expired records, and drop bodies that are no longer needed."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, Unpack
from uuid import UUID

from django.db import connections
from django.db.models import TextField
from django.db.models.expressions import RawSQL

from django_idempotency.conf import conf
from django_idempotency.maintenance.companions import companions
from django_idempotency.maintenance.records import TABLE, Records, is_sharded, records
from django_idempotency.maintenance.sweep import (
    Batch,
    Bounds,
    Change,
    Oldest,
    Swept,
    sweep,
)
from django_idempotency.models import DatabaseNow
from django_idempotency.stores.connections import record_database
from django_idempotency.values.registry import Registry

# On PostgreSQL, a batch is one statement. It finds each row by the place where it was
# locked, which saves a descent of the primary key; by the time of creation, which leads
# to the partition; and by the id, which alone identifies the record. A row that was
# changed after the statement began has left its place, and waits for another pass.
AT_ONCE = f"""
WITH picked (id, created_at, place, due) AS MATERIALIZED (
    {{picked}}
), swept AS (
    {{statement}}
    WHERE {TABLE}.id = picked.id AND {TABLE}.created_at = picked.created_at
        AND {TABLE}.ctid = picked.place
    RETURNING {TABLE}.id
)
SELECT (SELECT array_agg(id) FROM swept), count(*), max(due), statement_timestamp()
    FROM picked
"""
PLACE = RawSQL(f"{TABLE}.ctid", (), output_field=TextField())  # nosec B611  # of the model's own table
DELETE = f"DELETE FROM {TABLE} USING picked"
DROP_BODY = (
    f"UPDATE {TABLE} SET response_body = NULL, fingerprint = '', updated_at ="
    " statement_timestamp() FROM picked"
)

# Each clean-up calls them with the alias of a database as ``using``. They delete a
# bounded number of an app's own rows.
prunes: Registry[Callable[..., object]] = Registry()


def cleanup(**bounds: Unpack[Bounds]) -> Swept:
    """Delete the records past ``purge_at``, oldest first, and what wings keep and no
    longer need.

    Records that are started, processing or on hold are not touched. Locked records are
    passed over.

    The arguments are those of ``Bounds``; the default of ``batch`` is ``SWEEP_BATCH``.
    """
    if not bounds.get("dry_run"):
        for prune in prunes:
            prune(using=record_database(bounds.get("using")))
    return _clean(Records.purgeable, "purge_at", "deleted", delete_rows, DELETE, bounds)


def drop_bodies(**bounds: Unpack[Bounds]) -> Swept:
    """Drop the response bodies and the fingerprints of records past ``expires_at`` that
    are kept for audit.

    Arguments as for ``cleanup``.
    """
    return _clean(
        Records.with_needless_body,
        "expires_at",
        "dropped",
        _drop_body,
        DROP_BODY,
        bounds,
    )


def delete_rows(rows: Records) -> object:
    return rows._raw_delete(rows.db)


def delete_companions(ids: Collection[UUID], using: str) -> None:
    """Delete what wings keep about records that are deleted in this transaction."""
    for companion in companions if ids else ():
        companion.delete(ids, using)


def _drop_body(rows: Records) -> object:
    return rows.update(response_body=None, fingerprint=b"", updated_at=DatabaseNow())


def _clean(
    due_of: Callable[[Records], Records],
    due: str,
    done: str,
    change: Callable[[Records], object],
    statement: str,
    bounds: Bounds,
) -> Swept:
    rows = due_of(records(bounds.get("using")))
    at_once = connections[rows.db].vendor == "postgresql" and not is_sharded(rows.db)
    changes = _at_once(due, statement) if at_once else _locked_first(due, change)
    source, batch = Oldest(lambda: rows, due), conf().sweep_batch
    return sweep(
        source,
        changes,
        bounds,
        lambda one: Swept(done={done: len(one.changed)}),
        batch=batch,
    )


def _locked_first(due: str, change: Callable[[Records], object]) -> Change:
    def changes(rows: Records) -> Batch:
        picked: list[Any] = list(rows.values_list("pk", due, DatabaseNow()))
        ids = [id for id, _due, _now in picked]
        change(records(rows.db).filter(pk__in=ids))
        if change is delete_rows:
            delete_companions(ids, rows.db)
        _id, last, now = picked[-1] if picked else (None, None, None)
        return Batch(changed=ids, picked=len(ids), last=last, now=now)

    return changes


def _at_once(due: str, statement: str) -> Change:
    def changes(rows: Records) -> Batch:
        picked = rows.values_list("pk", "created_at", PLACE, due)
        sql, values = picked.query.get_compiler(rows.db).as_sql()
        with connections[rows.db].cursor() as cursor:
            cursor.execute(AT_ONCE.format(picked=sql, statement=statement), values)
            swept, count, last, now = cursor.fetchone()
        if statement is DELETE:
            delete_companions(swept or (), rows.db)
        return Batch(changed=swept or (), picked=count, last=last, now=now)

    return changes
