"""How the record table is divided, which partitions there should be, and which can go:
pure.

A record is in the partition of its ``created_at``. Each new partition is a day, in UTC.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from django_idempotency import IdempotencyError
from django_idempotency.extending.stores import IdempotencyRecord

TABLE = IdempotencyRecord._meta.db_table
# The CHECKs of partitioning: on a table before it becomes the first partition, and on a
# partition to be dropped.
UNTIL, RETIRED = "idempotency_record_until", "idempotency_record_retired"
MOST = 100_000  # rows that are counted at most
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
DAY = timedelta(days=1)


class NotConvertible(IdempotencyError):
    """The table of the records can't be partitioned. The message says why."""


@dataclass(frozen=True)
class Partition:
    """A partition as the catalog has it: from ``lower`` (included) to ``upper``
    (excluded); ``None``: without a bound.

    ``name`` is quoted. ``detaching``: a session has begun to detach it. ``retired``:
    ``drop`` has emptied it, and closed it to whatever might still arrive.
    """

    lower: datetime | None
    upper: datetime | None
    oid: int
    name: str
    detaching: bool = False
    retired: bool = False

    def covers(self, when: datetime) -> bool:
        return (self.lower is None or self.lower <= when) and (
            self.upper is None or when < self.upper
        )

    @property
    def half_detached(self) -> str:
        """How to end a detachment that ``drop`` did not begin; empty if there is none.
        Claims don't see its keys.
        """
        if not self.detaching or self.retired:
            return ""
        return f"{self.name} is half detached: {detachment(self.name, begun=True)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The table, ``now`` by the database's clock, and the partitions, oldest first;
    none if the table is plain.
    """

    schema: str
    now: datetime
    partitioned: bool
    partitions: tuple[Partition, ...] = ()
    halfway: bool = False  # an interrupted ``enable`` has left its CHECK behind

    @property
    def covered_until(self) -> datetime | None:
        """Until when, from now on, every new record has its partition; ``None``: for
        ever, or the table is plain.
        """
        if not self.partitioned:
            return None
        until = self.now
        for partition in self.partitions:
            if (
                partition.covers(until)
                and not partition.detaching
                and not partition.retired
            ):
                if partition.upper is None:
                    return None
                until = partition.upper
        return until

    def is_short(self, *, days: int = 2) -> bool:
        """Whether fewer than this many whole future days are covered."""
        return (
            self.covered_until is not None
            and self.covered_until < midnight(self.now) + (days + 1) * DAY
        )

    def missing(self, ahead: int) -> list[tuple[datetime, datetime]]:
        """Return the bounds of the partitions to add for now and for the next ``ahead``
        days. The past stays.
        """
        found = []
        when, until = self.now, midnight(self.now) + (ahead + 1) * DAY
        while when < until:
            taken = next(
                (partition for partition in self.partitions if partition.covers(when)),
                None,
            )
            if taken is None:
                found.append(_free(self.partitions, when))
                when = found[-1][1]
            elif taken.upper is None:
                break
            else:
                when = taken.upper
        return found


def midnight(when: datetime) -> datetime:
    """Return when the day of ``when`` began, in UTC."""
    return EPOCH + (when - EPOCH) // DAY * DAY


def _free(partitions: Sequence[Partition], when: datetime) -> tuple[datetime, datetime]:
    """Return the part of the day that is free around ``when``."""
    before = [
        partition.upper
        for partition in partitions
        if partition.upper and partition.upper <= when
    ]
    after = [
        partition.lower
        for partition in partitions
        if partition.lower and partition.lower > when
    ]
    return max([midnight(when), *before]), min([midnight(when) + DAY, *after])


def why_kept(
    partition: Partition,
    live: int,
    on_hold: int,
    purge_at: datetime | None,
    now: datetime,
) -> str:
    """Return why a partition can't go, by what it contains ``now``; empty if it can.

    ``purge_at``: that of the last response.
    """
    if partition.upper is None or partition.upper > now:
        return "not over yet"
    if partition.half_detached:
        return partition.half_detached
    reasons = [
        f"{count} {what}"
        for count, what in ((live, "live"), (on_hold, "on hold"))
        if count
    ]
    if purge_at is not None and purge_at >= now:
        reasons.append(f"the last due at {stamp(purge_at)}")
    return ", ".join(reasons)


def detachment(name: str, *, begun: bool = False) -> str:
    return (
        f"ALTER TABLE {TABLE} DETACH PARTITION {name}"
        f" {'FINALIZE' if begun else 'CONCURRENTLY'}"
    )


def stamp(when: datetime) -> str:
    return when.astimezone(UTC).isoformat(" ")


# --- The statements that make a partition ---------------------------------------------


class Template(NamedTuple):
    """What a partition has beyond its columns: storage parameters, and the table's
    owner.

    ``owner`` is ``None`` if it is the role that makes the partition.
    """

    options: list[str]
    owner: str | None

    def owned(self, name: str) -> list[str]:
        return (
            [] if self.owner is None else [f"ALTER TABLE {name} OWNER TO {self.owner}"]
        )


def creation(
    schema: str,
    name: str,
    lower: datetime | None,
    upper: datetime | None,
    like: Template,
) -> list[str]:
    """Return the statements that make a partition. Their lock on the table conflicts
    with none of a claim's.
    """
    table = f"{schema}.{TABLE}"
    options = f" WITH ({', '.join(like.options)})" if like.options else ""
    begin, end = (bound and f"'{stamp(bound)}'" for bound in (lower, upper))
    return [
        f"CREATE TABLE {name} (LIKE {table} INCLUDING ALL){options}",
        f"ALTER TABLE {name} ADD PRIMARY KEY (id)",
        *like.owned(name),
        (
            f"ALTER TABLE {table} ATTACH PARTITION {name} FOR VALUES FROM"
            f" ({begin or 'MINVALUE'}) TO ({end or 'MAXVALUE'})"
        ),
    ]


def name_of(schema: str, lower: datetime) -> str:
    """Return the name of a partition: by its lower bound, as pg_partman does, which
    reads times from names.
    """
    precision = "%Y_%m_%d" if lower == midnight(lower) else "%Y_%m_%d_%H%M"
    return f"{schema}.{TABLE}_p{lower.astimezone(UTC):{precision}}"
