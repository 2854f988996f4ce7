"""How the record table is divided: what partitions there are, by the catalog, and what there should be.

A key's record lies in the partition of its ``created_at``. Names tell nothing, so it does not matter who made them.
PostgreSQL only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Any

from django.db import connections

from django_idempotency.exceptions import PartitionsUnsupported
from django_idempotency.maintenance import database
from django_idempotency.models import LIVE, TERMINAL, IdempotencyRecord
from django_idempotency.stores.database import RETIRED, UNTIL

TABLE = IdempotencyRecord._meta.db_table
MOST = 100_000  # rows that are counted
LONGEST = timedelta(days=7)  # longer ones, such as months, are not all equally long: for others to make
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
RESERVED = 3  # days ahead that reserves see to, where intervals are shorter than a day
RESERVE = "idempotency_record_reserve_"  # a CHECK; what follows are the seconds of an interval
HAS_DEFAULT = "there is a default partition, beside which none can be detached concurrently"


class Interval(StrEnum):
    DAY = "day"
    HOUR = "hour"

    @property
    def width(self) -> timedelta:
        return timedelta(days=1) if self is Interval.DAY else timedelta(hours=1)


@dataclass(frozen=True, slots=True)
class Bounds:
    """From ``lower`` on, before ``upper``; ``None`` where there is no end."""

    lower: datetime | None
    upper: datetime | None

    def covers(self, when: datetime) -> bool:
        return (self.lower is None or self.lower <= when) and (self.upper is None or when < self.upper)

    @property
    def width(self) -> timedelta | None:
        return None if self.lower is None or self.upper is None else self.upper - self.lower


@dataclass(frozen=True, slots=True)
class Partition:
    """As the catalog has it. ``name`` is quoted.

    ``default``: takes what no other does. ``keyed``: an id can be in it once. ``detaching``: somebody has begun to
    detach it. ``retired``: emptied by ``drop``, and closed to whatever might still arrive. ``reserve``: it stands for
    several, each of so many seconds, and is to be divided into them before its time comes.
    """

    oid: int
    name: str
    bounds: Bounds
    default: bool = False
    keyed: bool = True
    detaching: bool = False
    retired: bool = False
    reserve: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The table, ``now`` by the database's clock, and its partitions, oldest first; none if it is plain."""

    schema: str
    now: datetime
    partitioned: bool
    partitions: tuple[Partition, ...] = ()
    halfway: bool = False  # an interrupted ``enable`` has left its CHECK behind


@dataclass(frozen=True, slots=True)
class Contents:
    """What was in a partition ``now``; counts of up to ``MOST``."""

    live: int
    held: int
    purge_at: datetime | None  # of the last answer
    now: datetime


# --- What there should be, and what can go: pure ---------------------------------------------------------------------


def future_width(partitions: Sequence[Partition]) -> timedelta | None:
    """How long each further partition is to be: as long as the latest, or as what the latest reserve is meant for.

    Of these the longer: where two others leave a gap, what fills it may be short.
    """
    latest = [partition.bounds.width for partition in partitions if partition.bounds.width and not partition.reserve]
    meant = [timedelta(seconds=partition.reserve) for partition in partitions if partition.reserve]
    return max([*latest[-1:], *meant[-1:]], default=None)


def usual_ahead(width: timedelta | None) -> int:
    """How many future partitions ``ensure`` sees to, if it isn't told: a week of days, half a day of hours."""
    return 12 if width is not None and width < Interval.DAY.width else 7


def missing(partitions: Sequence[Partition], now: datetime, ahead: int) -> list[Bounds]:
    """The partitions to add, so that there is one for now and for each of the next ``ahead`` intervals.

    They go on in step with the latest, and are shorter where another one begins. What is past stays as it is.
    """
    width, taken = future_width(partitions), [partition.bounds for partition in partitions if not partition.default]
    if width is None or width > LONGEST:
        return []
    ends = [partition.bounds.upper for partition in partitions if partition.bounds.upper and not partition.reserve]
    found = _gaps(taken, now, now + ahead * width, width, in_step_with=max(ends, default=EPOCH))
    # What is in the default partition by now can't have another.
    has_default = len(taken) < len(partitions)
    return [bounds for bounds in found if not (has_default and bounds.covers(now))]


def reserves(partitions: Sequence[Partition], now: datetime, ahead: int) -> list[Bounds]:
    """The reserves to add: up to a day each, from where the intervals ahead end, if those are shorter than that.

    A claim looks into every partition, and finds few of them; and new records have one for days, whatever keeps
    ``ensure`` from running.
    """
    if not _has_reserves(partitions):
        return []
    taken = [partition.bounds for partition in partitions] + missing(partitions, now, ahead)
    return _gaps(taken, now, now + RESERVED * Interval.DAY.width, Interval.DAY.width, in_step_with=EPOCH)


def to_divide(partitions: Sequence[Partition], now: datetime, ahead: int) -> list[Partition]:
    """The reserves that begin within half of the next ``ahead`` intervals: seldom, and in time.

    And those whose division was interrupted.
    """
    if not _has_reserves(partitions):
        return []
    width = future_width(partitions)
    assert width is not None
    soon = now + (ahead + 1) // 2 * width
    return [
        partition
        for partition in partitions
        if partition.reserve and partition.bounds.lower and (partition.retired or now < partition.bounds.lower <= soon)
    ]


def _has_reserves(partitions: Sequence[Partition]) -> bool:
    width, has_default = future_width(partitions), any(partition.default for partition in partitions)
    return width is not None and width < Interval.DAY.width and not has_default


def _gaps(
    taken: Sequence[Bounds], now: datetime, until: datetime, width: timedelta, *, in_step_with: datetime
) -> list[Bounds]:
    """What is not taken from ``now`` up to and with ``until``, in pieces of ``width`` or less."""
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
    """What of the time from ``begin`` to ``end`` is free around ``when``."""
    before = [bounds.upper for bounds in taken if bounds.upper is not None and bounds.upper <= when]
    after = [bounds.lower for bounds in taken if bounds.lower is not None and bounds.lower > when]
    return Bounds(max([begin, *before]), min([end, *after]))


def covered_until(partitions: Sequence[Partition], now: datetime) -> datetime | None:
    """Up to when, from now on, every new record has its partition; ``None``: for ever."""
    until = now
    if any(partition.default for partition in partitions):
        return None
    for partition in partitions:
        if partition.bounds.covers(until) and not partition.detaching and not partition.retired:
            if partition.bounds.upper is None:
                return None
            until = partition.bounds.upper
    return until


def is_short(partitions: Sequence[Partition], now: datetime) -> bool:
    """Whether fewer than two whole future days are covered; or two intervals, if those are longer."""
    until, width = covered_until(partitions, now), future_width(partitions)
    if until is None or width is None:
        return until is not None
    width = max(width, Interval.DAY.width)
    return until < EPOCH + ((now - EPOCH) // width + 3) * width


def why_kept(bounds: Bounds, contents: Contents) -> str:
    """Why a partition can't go; empty if it can."""
    if bounds.upper is None or bounds.upper > contents.now:
        return "not over yet"
    reasons = [f"{count} {what}" for count, what in ((contents.live, "live"), (contents.held, "held")) if count]
    if contents.purge_at is not None and contents.purge_at >= contents.now:
        reasons.append(f"the last due at {stamp(contents.purge_at)}")
    return ", ".join(reasons)


def why_undivided(contents: Contents) -> str:
    """Why a reserve can't give way to the partitions that it stands for; empty if it can."""
    return "it has records already" if contents.live or contents.held or contents.purge_at else ""


def why_last(partitions: Sequence[Partition], name: str) -> str:
    """Why the partition ``name`` has to stay for the sake of those to come; empty if it need not."""
    others = [partition for partition in partitions if partition.name != name]
    goes_on = future_width(others) is not None or future_width(partitions) is None
    return "" if goes_on else "the last that tells how long further ones are to be: run ensure"


def why_all_stay(partitions: Sequence[Partition]) -> str:
    """Why no partition can be detached; empty if they can."""
    return HAS_DEFAULT if any(partition.default for partition in partitions) else half_detached(partitions)


def half_detached(partitions: Sequence[Partition]) -> str:
    """Which one somebody else has begun to detach, and how that is ended. Claims don't see the keys in it."""
    names = [partition.name for partition in partitions if partition.detaching and not partition.retired]
    return "".join(f"{name} is half detached: {detachment(name, begun=True)}" for name in names)


def detachment(name: str, *, begun: bool = False) -> str:
    return f"ALTER TABLE {TABLE} DETACH PARTITION {name} {'FINALIZE' if begun else 'CONCURRENTLY'}"


def stamp(when: datetime) -> str:
    return when.astimezone(UTC).isoformat(" ")


# --- Reading the catalog ---------------------------------------------------------------------------------------------


def _microseconds(when: str) -> str:
    """A time in SQL, as the microseconds since 1970: the same in whatever zone and style the session has its times."""
    return f"(extract(epoch FROM {when}) * 1000000)::bigint"


def _when(microseconds: int | None) -> datetime | None:
    return None if microseconds is None else EPOCH + timedelta(microseconds=microseconds)


LAYOUT = f"""
SELECT quote_ident(nspname), {_microseconds("statement_timestamp()")}, relkind = 'p',
    EXISTS (SELECT FROM pg_constraint WHERE conrelid = pg_class.oid AND conname = '{UNTIL}')
FROM pg_class JOIN pg_namespace ON pg_namespace.oid = relnamespace WHERE pg_class.oid = '{TABLE}'::regclass
"""

# Infinity is no end, like MINVALUE and MAXVALUE.
LOWER, UPPER = (
    f"(regexp_match(bounds, '{end} [(]''((?!-?infinity)[^'']+)''[)]'))[1]::timestamptz" for end in ("FROM", "TO")
)
PARTITIONS = f"""
SELECT part.oid, name, {_microseconds(LOWER)} AS lower, {_microseconds(UPPER)} AS upper, bounds = 'DEFAULT',
    EXISTS (
        SELECT FROM pg_index JOIN pg_attribute ON attrelid = indrelid AND attname = 'id'
        WHERE indrelid = part.oid AND indisunique AND indisvalid AND indpred IS NULL AND indkey::text = attnum::text
    ),
    inhdetachpending, EXISTS (SELECT FROM pg_constraint WHERE conrelid = part.oid AND conname = '{RETIRED}'),
    (
        SELECT max(substring(conname FROM '^{RESERVE}([1-9][0-9]{{0,6}})$')::integer) FROM pg_constraint
        WHERE conrelid = part.oid
    )
FROM (
    SELECT pg_class.oid, format('%I.%I', nspname, relname) AS name, inhdetachpending,
        coalesce(pg_get_expr(relpartbound, pg_class.oid), '') AS bounds
    FROM pg_inherits JOIN pg_class ON pg_class.oid = inhrelid JOIN pg_namespace ON pg_namespace.oid = relnamespace
    WHERE inhparent = '{TABLE}'::regclass
) AS part
ORDER BY lower NULLS FIRST, upper
"""


def layout(*, using: str | None = None) -> Layout:
    """How the table is divided. Raises ``PartitionsUnsupported`` on a database other than PostgreSQL."""
    alias = postgresql(using)
    with connections[alias].cursor() as cursor:
        cursor.execute(LAYOUT)
        schema, now, partitioned, halfway = cursor.fetchone()
        cursor.execute(PARTITIONS)
        rows = cursor.fetchall() if partitioned else ()
    return Layout(
        schema=schema,
        now=EPOCH + timedelta(microseconds=now),
        partitioned=partitioned,
        partitions=tuple(
            Partition(oid, name, Bounds(_when(lower), _when(upper)), *flags) for oid, name, lower, upper, *flags in rows
        ),
        halfway=halfway,
    )


def postgresql(using: str | None) -> str:
    """The alias of the records' database, which has to be PostgreSQL."""
    alias = database(using)
    if connections[alias].vendor != "postgresql":
        raise PartitionsUnsupported(alias)
    return alias


def contents_of(cursor: Any, name: str) -> Contents:
    """By the partial indexes alone."""
    live, terminal = (", ".join(f"'{status.value}'" for status in statuses) for statuses in (LIVE, TERMINAL))
    cursor.execute(
        f"SELECT (SELECT count(*) FROM (SELECT FROM {name} WHERE status IN ({live}) LIMIT {MOST}) AS live),"
        f" (SELECT count(*) FROM (SELECT FROM {name} WHERE held AND locked_until IS NULL LIMIT {MOST}) AS held),"
        f" (SELECT {_microseconds('max(purge_at)')} FROM {name} WHERE status IN ({terminal})),"
        f" {_microseconds('statement_timestamp()')}"
    )
    of_live, of_held, purge_at, now = cursor.fetchone()
    return Contents(of_live, of_held, _when(purge_at), EPOCH + timedelta(microseconds=now))
