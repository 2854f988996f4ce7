"""Report how the partitions stand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import datetime

from django.db import connections, transaction

from django_idempotency.contrib.partitions.catalog import contents_of, left_behind, postgresql, read_layout
from django_idempotency.contrib.partitions.layout import (
    Contents,
    Layout,
    Partition,
    covered_until,
    is_short,
    why_it_stays,
)
from django_idempotency.contrib.partitions.locks import NO_TIMEOUTS
from django_idempotency.instrumentation.metrics import Figures, Gauge, GaugeFamily

GAUGES = (Gauge("partitions_ahead", "for how long, from now on, new records have partitions", {"": "ahead"}, unit="s"),)


@dataclass(frozen=True, kw_only=True)
class Standing(Partition):
    """How one partition stands. ``rows``: the database's estimate; ``None`` if it has none. ``bytes``: with indexes.

    ``live`` and ``on_hold``: counts of up to ``MOST``. ``purge_at``: of the last response in it. ``kept``: why it can't
    be dropped; empty if it can. If a ``drop`` of it was interrupted, the next ``drop`` continues.
    """

    rows: int | None
    bytes: int
    live: int
    on_hold: int
    purge_at: datetime | None
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


def standing(alias: str, name: str) -> Standing | None:
    """Return how one partition stands; ``None`` if there is none with this name."""
    found = read_layout(using=alias)
    partition = next((partition for partition in found.partitions if partition.name == name), None)
    return None if partition is None else _standing(alias, partition, found)


def _standing(alias: str, partition: Partition, found: Layout) -> Standing | None:
    """Return how one partition stands; ``None`` if it is gone meanwhile."""
    size = "SELECT nullif(reltuples, -1)::bigint, pg_total_relation_size(oid) FROM pg_class WHERE oid = %s"
    with transaction.atomic(using=alias), connections[alias].cursor() as cursor:
        cursor.execute(NO_TIMEOUTS)
        cursor.execute(size, [partition.oid])
        if (sized := cursor.fetchone()) is None:
            return None
        rows, bytes = sized
        # One that is retired is empty, and may be dropped by another session at any moment.
        contents = Contents(0, 0, None, found.now) if partition.retired else contents_of(cursor, partition)
    return Standing(
        **asdict(partition),
        rows=rows,
        bytes=bytes,
        live=contents.live,
        on_hold=contents.on_hold,
        purge_at=contents.purge_at,
        kept="" if partition.retired else why_it_stays(found, partition, contents),
    )


# --- For Prometheus and OpenTelemetry --------------------------------------------------------------------------------


def _ahead(using: str) -> Mapping[str, Figures]:
    """Return no figure if the table is plain, or if a default partition takes every record."""
    if connections[using].vendor != "postgresql":
        return {}
    found = read_layout(using=using)
    until = covered_until(found.partitions, found.now) if found.partitioned else None
    return {} if until is None else {using: {"ahead": (until - found.now).total_seconds()}}


FAMILY = GaugeFamily("database", GAUGES, _ahead)
