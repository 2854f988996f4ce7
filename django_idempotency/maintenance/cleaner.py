"""Delete records that are past their time, and drop bodies that are no longer needed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from uuid import UUID

from django.db import connections
from django.db.models import TextField
from django.db.models.expressions import RawSQL

from django_idempotency.conf import conf
from django_idempotency.maintenance.batches import batch_size, deadline, in_transaction, sum_of
from django_idempotency.maintenance.records import (
    TABLE,
    Records,
    locked,
    records,
)
from django_idempotency.models import DatabaseNow
from django_idempotency.stats import counters, observations
from django_idempotency.stores.connections import record_database
from django_idempotency.stores.distribution import in_shards, is_distributed

LONG_AGO = datetime.min.replace(tzinfo=UTC)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cleaned:
    """The result of a cleanup. ``seconds``: how long it took, pauses included.

    ``lag``: for how many seconds the records that are left have been due. ``finished``: nothing was left.
    """

    rows: int = 0
    seconds: float = 0.0
    lag: float = 0.0
    finished: bool = True

    @property
    def rate(self) -> float:
        """Rows per second."""
        return self.rows / self.seconds if self.seconds else 0.0

    def __add__(self, later: Cleaned) -> Cleaned:
        return Cleaned(
            rows=self.rows + later.rows,
            seconds=self.seconds + later.seconds,
            lag=later.lag,
            finished=later.finished,
        )


def cleanup(
    *,
    batch: int | None = None,
    pause: float | None = None,
    max_seconds: float | None = None,
    using: str | None = None,
) -> Cleaned:
    """Delete the records past ``purge_at``, oldest first, and the counters past ``STATS_RETENTION``.

    Records that are started, processing or on hold are not touched. Locked records are passed over.

    ``batch``: records per transaction; default: ``CLEANUP_BATCH``. ``pause``: seconds between two batches; default:
    ``CLEANUP_PAUSE``. ``max_seconds``: begin no further batch after that. ``using``: the database's alias. Raises
    ``ValueError`` if ``batch`` is less than 1.
    """
    return sum_of(cleanup_in_batches(batch=batch, pause=pause, max_seconds=max_seconds, using=using))


def cleanup_in_batches(
    *,
    batch: int | None = None,
    pause: float | None = None,
    max_seconds: float | None = None,
    using: str | None = None,
) -> Iterator[Cleaned]:
    """Do the same as ``cleanup``, batch by batch, as the iterator is asked for them."""
    counters.prune(using=record_database(using))
    observations.prune(using=record_database(using))
    return _sweeping(records(using).purgeable(), DELETE, batch, pause, max_seconds)


def drop_bodies(
    *,
    batch: int | None = None,
    pause: float | None = None,
    max_seconds: float | None = None,
    using: str | None = None,
) -> Cleaned:
    """Drop the response bodies and the fingerprints of records past ``expires_at`` that are kept for audit.

    Arguments as for ``cleanup``.
    """
    return sum_of(drop_bodies_in_batches(batch=batch, pause=pause, max_seconds=max_seconds, using=using))


def drop_bodies_in_batches(
    *,
    batch: int | None = None,
    pause: float | None = None,
    max_seconds: float | None = None,
    using: str | None = None,
) -> Iterator[Cleaned]:
    """Do the same as ``drop_bodies``, batch by batch."""
    return _sweeping(records(using).with_needless_body(), DROP_BODY, batch, pause, max_seconds)


Change = Callable[[Records], object]


def delete_rows(rows: Records) -> object:
    return rows._raw_delete(rows.db)


def _drop_body(rows: Records) -> object:
    return rows.update(response_body=None, fingerprint=b"", updated_at=DatabaseNow())


@dataclass(frozen=True, slots=True)
class Sweep:
    """A change of records once the time ``due`` is past. ``statement``: the same on PostgreSQL, to those ``picked``."""

    due: str
    change: Change
    statement: str


DELETE = Sweep("purge_at", delete_rows, f"DELETE FROM {TABLE} USING picked")
DROP_BODY = Sweep(
    "expires_at",
    _drop_body,
    f"UPDATE {TABLE} SET response_body = NULL, fingerprint = '', updated_at = statement_timestamp() FROM picked",
)

# On PostgreSQL, a batch is one statement. It finds each row by the place where it was locked, which saves a descent of
# the primary key; by the time of creation, which leads to the partition; and by the id, which alone identifies the
# record. A row that was changed after the statement began has left its place, and waits for another pass.
SWEEP = f"""
WITH picked (id, created_at, place, due) AS MATERIALIZED (
    {{picked}}
), swept AS (
    {{statement}}
    WHERE {TABLE}.id = picked.id AND {TABLE}.created_at = picked.created_at AND {TABLE}.ctid = picked.place
    RETURNING 1
)
SELECT count(*), max(due), statement_timestamp(), (SELECT count(*) FROM swept) FROM picked
"""
PLACE = RawSQL(f"{TABLE}.ctid", (), output_field=TextField())  # nosec B611  # of the model's own table


@dataclass(frozen=True, slots=True)
class Swept:
    """How many records were ``picked``, when the ``last`` of them was due, and how many ``rows`` were swept."""

    picked: int
    last: datetime
    now: datetime
    rows: int


def _sweeping(
    rows: Records, sweep: Sweep, batch: int | None, pause: float | None, max_seconds: float | None
) -> Iterator[Cleaned]:
    batch = batch_size(conf().cleanup_batch if batch is None else batch, rows.db)
    pause = conf().cleanup_pause if pause is None else pause
    ends = deadline(max_seconds)
    sweep_once = _way_to_sweep(rows.db)
    left, began = rows, time.monotonic()
    while True:
        swept = sweep_once(left.order_by(sweep.due), sweep, batch)
        finished = swept.picked < batch
        began, before = time.monotonic(), began
        lag = 0.0 if finished else (swept.now - swept.last).total_seconds()
        yield Cleaned(rows=swept.rows, seconds=began - before, lag=lag, finished=finished)
        if finished or ends():
            return
        # Not from the beginning: until it is vacuumed, that part of the index is full of dead entries.
        left = rows.filter(**{f"{sweep.due}__gte": swept.last})
        time.sleep(pause)


def _way_to_sweep(using: str) -> Callable[[Records, Sweep, int], Swept]:
    if is_distributed(using):
        return partial(_sweep_by_shard, passed=set())
    sweep_once = _sweep_at_once if connections[using].vendor == "postgresql" else _sweep
    return lambda *batch: in_transaction(using, partial(sweep_once, *batch))


def _sweep_by_shard(rows: Records, sweep: Sweep, batch: int, passed: set[UUID]) -> Swept:
    """Sweep a table in which no statement can lock rows of several shards.

    ``passed``: collects the ids of records that were locked.
    """
    left = rows.exclude(pk__in=passed).values_list("pk", sweep.due, DatabaseNow())
    due = in_transaction(rows.db, lambda: {id: times for id, *times in left[:batch]})
    swept = 0
    for part in in_shards(due, rows.db):
        rest = rows.filter(pk__in=part)
        done = in_transaction(rows.db, partial(_sweep, rest, sweep, batch)).rows
        passed.update(part if done < len(part) else ())
        swept += done
    last, now = max(due.values(), default=[LONG_AGO, LONG_AGO])
    return Swept(len(due), last, now, swept)


def _sweep(rows: Records, sweep: Sweep, batch: int) -> Swept:
    picked = list(locked(rows).values_list("pk", sweep.due, DatabaseNow())[:batch])
    sweep.change(records(rows.db).filter(pk__in=[id for id, _due, _now in picked]))
    _id, last, now = picked[-1] if picked else (None, LONG_AGO, LONG_AGO)
    return Swept(len(picked), last, now, len(picked))


def _sweep_at_once(rows: Records, sweep: Sweep, batch: int) -> Swept:
    picked = locked(rows).values_list("pk", "created_at", PLACE, sweep.due)[:batch]
    sql, values = picked.query.get_compiler(rows.db).as_sql()
    with connections[rows.db].cursor() as cursor:
        cursor.execute(SWEEP.format(picked=sql, statement=sweep.statement), values)
        return Swept(*cursor.fetchone())
