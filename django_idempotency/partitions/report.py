"""Report how the partitions stand."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from django.db import connections, transaction

from django_idempotency.partitions.catalog import contents_of, left_behind, postgresql, read_layout
from django_idempotency.partitions.layout import Layout, Partition, covered_until, is_short, why_all_stay, why_it_stays
from django_idempotency.partitions.locks import NO_TIMEOUTS


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """One partition. ``rows``: the database's estimate; ``None`` if it has none. ``bytes``: with indexes.

    ``live`` and ``on_hold``: counts of up to ``MOST``. ``purge_at``: of the last response in it. ``keyed``: false if it
    lacks the index that claims use. ``retired`` and ``detaching``: a ``drop`` has emptied it, and begun to detach it;
    if that was interrupted, the next ``drop`` continues it. ``kept``: why it can't be dropped; empty if it can.
    """

    name: str
    lower: datetime | None
    upper: datetime | None
    rows: int | None
    bytes: int
    live: int
    on_hold: int
    purge_at: datetime | None
    keyed: bool
    retired: bool
    detaching: bool
    kept: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """``covered_until``: new records have a partition until then; ``None``: for ever. ``short``: that is too soon.

    ``halfway``: ``enable`` was interrupted; run it again, or run ``ensure``, which takes it back. ``left_behind``:
    partitions that an interrupted ``drop`` has detached; the next ``drop`` drops them.
    """

    partitioned: bool
    covered_until: datetime | None = None
    short: bool = False
    halfway: bool = False
    partitions: tuple[Standing, ...] = ()
    left_behind: tuple[str, ...] = ()


def status(*, using: str | None = None) -> Status:
    """Return how the partitions stand, oldest first.

    ``using``: the database's alias; default: the settings'. Raises ``PartitionsUnsupported`` on databases other than
    PostgreSQL.
    """
    alias = postgresql(using)
    found = read_layout(using=alias)
    return Status(
        partitioned=found.partitioned,
        covered_until=covered_until(found.partitions, found.now) if found.partitioned else None,
        short=found.partitioned and is_short(found.partitions, found.now),
        halfway=found.halfway,
        partitions=tuple(standing for part in found.partitions if (standing := _standing(alias, part, found))),
        left_behind=tuple(left_behind(alias)),
    )


def _standing(alias: str, partition: Partition, found: Layout) -> Standing | None:
    """Return how one partition stands; ``None`` if it is gone meanwhile."""
    size = "SELECT nullif(reltuples, -1)::bigint, pg_total_relation_size(oid) FROM pg_class WHERE oid = %s"
    with transaction.atomic(using=alias), connections[alias].cursor() as cursor:
        cursor.execute(NO_TIMEOUTS)
        cursor.execute(size, [partition.oid])
        if (sized := cursor.fetchone()) is None:
            return None
        rows, bytes = sized
        contents = contents_of(cursor, partition)
    return Standing(
        name=partition.name,
        lower=partition.bounds.lower,
        upper=partition.bounds.upper,
        rows=rows,
        bytes=bytes,
        live=contents.live,
        on_hold=contents.on_hold,
        purge_at=contents.purge_at,
        keyed=partition.keyed,
        retired=partition.retired,
        detaching=partition.detaching,
        kept="" if partition.retired else why_it_stays(found, partition, contents) or why_all_stay(found.partitions),
    )
