"""How the record table is divided, which partitions there should be, and which can go: pure.

A record is in the partition of its ``created_at``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from django_idempotency.models import IdempotencyRecord

TABLE = IdempotencyRecord._meta.db_table
# The CHECKs of partitioning: on a table before it becomes the first partition, and on a partition to be dropped.
UNTIL, RETIRED = "idempotency_record_until", "idempotency_record_retired"
MOST = 100_000  # rows that are counted at most
LONGEST = timedelta(days=7)  # longer ones, such as months, differ in length and are left for others to make
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
DAY = timedelta(days=1)
HAS_DEFAULT = "there is a default partition, next to which none can be detached concurrently"


@dataclass(frozen=True)
class Bounds:
    """From ``lower`` (included) to ``upper`` (excluded); ``None`` if there is no bound."""

    lower: datetime | None
    upper: datetime | None

    def covers(self, when: datetime) -> bool:
        return (self.lower is None or self.lower <= when) and (self.upper is None or when < self.upper)

    @property
    def width(self) -> timedelta | None:
        return None if self.lower is None or self.upper is None else self.upper - self.lower


@dataclass(frozen=True)
class Partition(Bounds):
    """A partition as the catalog has it. ``name`` is quoted.

    ``default``: it takes what no other partition takes. ``keyed``: an id can be in it only once. ``detaching``: another
    session has begun to detach it. ``retired``: ``drop`` has emptied it, and closed it to whatever might still arrive.
    """

    oid: int
    name: str
    default: bool = False
    keyed: bool = True
    detaching: bool = False
    retired: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The table, ``now`` by the database's clock, and the partitions, oldest first; none if the table is plain."""

    schema: str
    now: datetime
    partitioned: bool
    partitions: tuple[Partition, ...] = ()
    halfway: bool = False  # an interrupted ``enable`` has left its CHECK behind


@dataclass(frozen=True, slots=True)
class Contents:
    """What was in a partition at ``now``. Counts go up to ``MOST``."""

    live: int
    on_hold: int
    purge_at: datetime | None  # of the last response
    now: datetime


# --- What there should be, and what can go: pure ---------------------------------------------------------------------


def future_width(partitions: Sequence[Partition]) -> timedelta | None:
    """Return the length of each further partition: that of the latest; ``None`` if that is not known."""
    widths = [partition.width for partition in partitions if partition.width]
    return widths[-1] if widths else None


def missing(partitions: Sequence[Partition], now: datetime, ahead: int) -> list[Bounds]:
    """Return the partitions to add, so that there is one for now and for each of the next ``ahead`` intervals.

    They continue in step with the latest partition, and are shorter if another one begins. The past stays as it is.
    """
    width, taken = future_width(partitions), [partition for partition in partitions if not partition.default]
    if width is None or width > LONGEST:
        return []
    ends = [partition.upper for partition in partitions if partition.upper]
    found = _gaps(taken, now, now + ahead * width, width, in_step_with=max(ends, default=EPOCH))
    # Rows of the present interval may be in the default partition by now, so no other partition can be made for them.
    has_default = len(taken) < len(partitions)
    return [bounds for bounds in found if not (has_default and bounds.covers(now))]


def _gaps(
    taken: Sequence[Bounds], now: datetime, until: datetime, width: timedelta, *, in_step_with: datetime
) -> list[Bounds]:
    """Return what is not taken from ``now`` through ``until``, in pieces of at most ``width``."""
    found: list[Bounds] = []
    when: datetime | None = now
    while when is not None and when <= until:
        bounds = next((bounds for bounds in taken if bounds.covers(when)), None)
        if bounds is None:
            begin = in_step_with + (when - in_step_with) // width * width
            bounds = _free(begin, begin + width, when, taken)
            found.append(bounds)
        when = bounds.upper
    return found


def _free(begin: datetime, end: datetime, when: datetime, taken: Sequence[Bounds]) -> Bounds:
    """Return the part of the time from ``begin`` to ``end`` that is free around ``when``."""
    before = [bounds.upper for bounds in taken if bounds.upper is not None and bounds.upper <= when]
    after = [bounds.lower for bounds in taken if bounds.lower is not None and bounds.lower > when]
    return Bounds(max([begin, *before]), min([end, *after]))


def covered_until(partitions: Sequence[Partition], now: datetime) -> datetime | None:
    """Return until when, from now on, every new record has its partition; ``None``: for ever."""
    until = now
    if any(partition.default for partition in partitions):
        return None
    for partition in partitions:
        if partition.covers(until) and not partition.detaching and not partition.retired:
            if partition.upper is None:
                return None
            until = partition.upper
    return until


def is_short(partitions: Sequence[Partition], now: datetime) -> bool:
    """Whether fewer than two whole future days are covered, or two intervals if those are longer."""
    until, width = covered_until(partitions, now), future_width(partitions)
    if until is None or width is None:
        return until is not None
    width = max(width, DAY)
    return until < EPOCH + ((now - EPOCH) // width + 3) * width


def why_short(partitions: Sequence[Partition], now: datetime, ahead: int) -> str:
    """Return why too little is covered where nothing is ``missing``; empty if it is enough, or what was asked for."""
    until, width = covered_until(partitions, now), future_width(partitions)
    if not is_short(partitions, now) or (until and width and until >= now + ahead * width):
        return ""
    return half_detached(partitions) or f"the latest partition is longer than {LONGEST.days} days, or without an end"


def why_kept(bounds: Bounds, contents: Contents) -> str:
    """Return why a partition can't go; empty if it can."""
    if bounds.upper is None or bounds.upper > contents.now:
        return "not over yet"
    reasons = [f"{count} {what}" for count, what in ((contents.live, "live"), (contents.on_hold, "on hold")) if count]
    if contents.purge_at is not None and contents.purge_at >= contents.now:
        reasons.append(f"the last due at {stamp(contents.purge_at)}")
    return ", ".join(reasons)


def why_last(partitions: Sequence[Partition], name: str) -> str:
    """Return why the partition ``name`` has to stay for the sake of those to come; empty if it need not."""
    others = [partition for partition in partitions if partition.name != name]
    goes_on = future_width(others) is not None or future_width(partitions) is None
    return "" if goes_on else "the last one that tells how long future ones have to be: run ensure"


def why_it_stays(found: Layout, partition: Partition, contents: Contents) -> str:
    """Return why a partition with these contents can't be dropped; empty if it can."""
    has_default = any(each.default for each in found.partitions)
    why_all_stay = HAS_DEFAULT if has_default else half_detached(found.partitions)
    return why_kept(partition, contents) or why_last(found.partitions, partition.name) or why_all_stay


def half_detached(partitions: Sequence[Partition]) -> str:
    """Return which partitions another session has begun to detach, and how to end that. Claims don't see their keys."""
    names = [partition.name for partition in partitions if partition.detaching and not partition.retired]
    return "".join(f"{name} is half detached: {detachment(name, begun=True)}" for name in names)


def detachment(name: str, *, begun: bool = False) -> str:
    return f"ALTER TABLE {TABLE} DETACH PARTITION {name} {'FINALIZE' if begun else 'CONCURRENTLY'}"


def stamp(when: datetime) -> str:
    return when.astimezone(UTC).isoformat(" ")
