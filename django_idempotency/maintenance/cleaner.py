"""Delete expired records, and drop bodies that are no longer needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Unpack

from django.db import connections
from django.db.models import TextField
from django.db.models.expressions import RawSQL

from django_idempotency.conf import conf
from django_idempotency.maintenance.records import TABLE, Records, is_sharded, records
from django_idempotency.maintenance.sweep import Batch, Bounds, Change, Oldest, Swept, of_oldest, stepwise, sweep
from django_idempotency.models import DatabaseNow
from django_idempotency.stores.connections import record_database

# On PostgreSQL, a batch is one statement. It finds each row by the place where it was locked, which saves a descent of
# the primary key; by the time of creation, which leads to the partition; and by the id, which alone identifies the
# record. A row that was changed after the statement began has left its place, and waits for another pass.
AT_ONCE = f"""
WITH picked (id, created_at, place, due) AS MATERIALIZED (
    {{picked}}
), swept AS (
    {{statement}}
    WHERE {TABLE}.id = picked.id AND {TABLE}.created_at = picked.created_at AND {TABLE}.ctid = picked.place
    RETURNING 1
)
SELECT (SELECT count(*) FROM swept), count(*), max(due), statement_timestamp() FROM picked
"""
PLACE = RawSQL(f"{TABLE}.ctid", (), output_field=TextField())  # nosec B611  # of the model's own table
DELETE = f"DELETE FROM {TABLE} USING picked"
DROP_BODY = f"UPDATE {TABLE} SET response_body = NULL, fingerprint = '', updated_at = statement_timestamp() FROM picked"


_prunes: list[Callable[..., object]] = []


def register(prune: Callable[..., object]) -> None:
    """Have each clean-up call ``prune``, with the alias of a database as ``using``, in the ``ready()`` of an app.

    It deletes a bounded number of the app's own rows that have expired.
    """
    if prune not in _prunes:  # an AppConfig can get ready again
        _prunes.append(prune)


@stepwise
def cleanup(**bounds: Unpack[Bounds]) -> Iterator[Swept]:
    """Delete the records past ``purge_at``, oldest first, and what wings keep and no longer need.

    Records that are started, processing or on hold are not touched. Locked records are passed over.

    The arguments are those of ``Bounds``; the default of ``batch`` is ``SWEEP_BATCH``.
    """
    if not bounds.get("dry_run"):
        for prune in _prunes:
            prune(using=record_database(bounds.get("using")))
    yield from _clean(Records.purgeable, "purge_at", "deleted", delete_rows, DELETE, bounds)


@stepwise
def drop_bodies(**bounds: Unpack[Bounds]) -> Iterator[Swept]:
    """Drop the response bodies and the fingerprints of records past ``expires_at`` that are kept for audit.

    Arguments as for ``cleanup``.
    """
    return _clean(Records.with_needless_body, "expires_at", "dropped", _drop_body, DROP_BODY, bounds)


def delete_rows(rows: Records) -> object:
    return rows._raw_delete(rows.db)


def _drop_body(rows: Records) -> object:
    return rows.update(response_body=None, fingerprint=b"", updated_at=DatabaseNow())


def _clean(
    due_of: Callable[[Records], Records],
    due: str,
    done: str,
    change: Callable[[Records], object],
    statement: str,
    bounds: Bounds,
) -> Iterator[Swept]:
    rows = due_of(records(bounds.get("using")))
    at_once = connections[rows.db].vendor == "postgresql" and not is_sharded(rows)
    changes = _at_once(due, statement) if at_once else of_oldest(due, change)
    for one, swept in sweep(Oldest(lambda: rows, due), changes, bounds, batch=conf().sweep_batch):
        yield replace(swept, done={done: len(one.changed)})


def _at_once(due: str, statement: str) -> Change:
    def changes(rows: Records) -> Batch:
        picked = rows.values_list("pk", "created_at", PLACE, due)
        sql, values = picked.query.get_compiler(rows.db).as_sql()
        with connections[rows.db].cursor() as cursor:
            cursor.execute(AT_ONCE.format(picked=sql, statement=statement), values)
            swept, count, last, now = cursor.fetchone()
        return Batch(changed=range(swept), picked=count, last=last, now=now)

    return changes
