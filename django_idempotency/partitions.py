"""Partitions of the record table, on PostgreSQL: retention by DROP instead of DELETE.

A key's record lies in the partition of its ``created_at``. What partitions there are is read from the catalog, never
from their names, so it does not matter who made them. ``django_idempotency.conversion`` makes a table partitioned.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from functools import reduce
from operator import add
from typing import Any, TypeVar

from django.db import DatabaseError, connections, transaction

from django_idempotency.exceptions import PartitionsUnsupported
from django_idempotency.maintenance import database
from django_idempotency.models import LIVE, TERMINAL, IdempotencyRecord
from django_idempotency.stores.database import RETIRED, UNTIL, is_conflict

T = TypeVar("T")

TABLE = IdempotencyRecord._meta.db_table
MOST = 100_000  # rows that are counted
GONE = "gone meanwhile"
IN_USE = "in use by a long transaction"
CONVERTED = "the table is being converted"
HAS_DEFAULT = "there is a default partition, beside which none can be detached concurrently"
LOCK_TIMEOUT = "100ms"  # nobody waits longer than that behind a lock that we are waiting for
ATTEMPTS, PAUSE = 20, 0.25  # for a lock that is not to be had, with so many seconds between
LONGEST = timedelta(days=7)  # longer ones, such as months, are not all equally long: for others to make
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """As the catalog has it. ``name`` is quoted.

    ``default``: takes what no other does. ``keyed``: an id can be in it once. ``detaching``: somebody has begun to
    detach it. ``retired``: emptied by ``drop``, and closed to whatever might still arrive.
    """

    oid: int
    name: str
    bounds: Bounds
    default: bool = False
    keyed: bool = True
    detaching: bool = False
    retired: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The table, ``now`` by the database's clock, and its partitions, oldest first; none if it is plain."""

    schema: str
    now: datetime
    partitioned: bool
    partitions: tuple[Partition, ...] = ()
    halfway: bool = False  # an interrupted ``enable`` has left its CHECK behind

    @property
    def table(self) -> str:
        return f"{self.schema}.{TABLE}"


@dataclass(frozen=True, slots=True)
class Contents:
    """What was in a partition ``now``; counts of up to ``MOST``."""

    live: int
    held: int
    purge_at: datetime | None  # of the last answer
    now: datetime


# --- What there should be, and what can go: pure ---------------------------------------------------------------------


def future_width(partitions: Sequence[Partition]) -> timedelta | None:
    """How long each further partition is to be: as long as the latest."""
    widths = [partition.bounds.width for partition in partitions if partition.bounds.width is not None]
    return widths[-1] if widths else None


def usual_ahead(width: timedelta) -> int:
    """How many future partitions ``ensure`` sees to, if it isn't told: a week of days, a day and a half of hours."""
    return 36 if width < Interval.DAY.width else 7


def missing(partitions: Sequence[Partition], now: datetime, ahead: int) -> list[Bounds]:
    """The partitions to add, so that there is one for now and for each of the next ``ahead`` intervals.

    They go on in step with the latest, and are shorter where another one begins. What is past stays as it is.
    """
    width, taken = future_width(partitions), [partition.bounds for partition in partitions if not partition.default]
    if width is None or width > LONGEST:
        return []
    last = max(bounds.upper for bounds in taken if bounds.upper is not None)
    found: list[Bounds] = []
    when: datetime | None = now
    while when is not None and when <= now + ahead * width:
        bounds = next((bounds for bounds in taken if bounds.covers(when)), None)
        if bounds is None:
            begin = last + (when - last) // width * width
            bounds = _free(begin, begin + width, when, taken)
            found.append(bounds)
        when = bounds.upper
    # What is in the default partition by now can't have another.
    has_default = len(taken) < len(partitions)
    return [bounds for bounds in found if not (has_default and bounds.covers(now))]


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
    """Whether fewer than two whole future days, or 24 future hours, are covered."""
    until, width = covered_until(partitions, now), future_width(partitions)
    if until is None or width is None:
        return until is not None
    least = 24 if width < Interval.DAY.width else 2
    return until < _floor(now, width) + (least + 1) * width


def why_kept(bounds: Bounds, contents: Contents) -> str:
    """Why a partition can't go; empty if it can."""
    if bounds.upper is None or bounds.upper > contents.now:
        return "not over yet"
    reasons = [f"{count} {what}" for count, what in ((contents.live, "live"), (contents.held, "held")) if count]
    if contents.purge_at is not None and contents.purge_at >= contents.now:
        reasons.append(f"the last due at {stamp(contents.purge_at)}")
    return ", ".join(reasons)


def why_all_stay(partitions: Sequence[Partition]) -> str:
    """Why no partition can be detached; empty if they can."""
    return HAS_DEFAULT if any(partition.default for partition in partitions) else half_detached(partitions)


def half_detached(partitions: Sequence[Partition]) -> str:
    """Which one somebody else has begun to detach, and how that is ended. Claims don't see the keys in it."""
    names = [partition.name for partition in partitions if partition.detaching and not partition.retired]
    return "".join(f"{name} is half detached: {detachment(name, begun=True)}" for name in names)


def detachment(name: str, *, begun: bool = False) -> str:
    return f"ALTER TABLE {TABLE} DETACH PARTITION {name} {'FINALIZE' if begun else 'CONCURRENTLY'}"


def _floor(when: datetime, width: timedelta) -> datetime:
    return EPOCH + (when - EPOCH) // width * width


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
    inhdetachpending, EXISTS (SELECT FROM pg_constraint WHERE conrelid = part.oid AND conname = '{RETIRED}')
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
        found = tuple(_partition(*row) for row in cursor.fetchall()) if partitioned else ()
    return Layout(
        schema=schema,
        now=EPOCH + timedelta(microseconds=now),
        partitioned=partitioned,
        partitions=found,
        halfway=halfway,
    )


def _partition(oid: int, name: str, lower: int | None, upper: int | None, *flags: bool) -> Partition:
    default, keyed, detaching, retired = flags
    bounds = Bounds(_when(lower), _when(upper))
    return Partition(
        oid=oid, name=name, bounds=bounds, default=default, keyed=keyed, detaching=detaching, retired=retired
    )


def postgresql(using: str | None) -> str:
    """The alias of the records' database, which has to be PostgreSQL."""
    alias = database(using)
    if connections[alias].vendor != "postgresql":
        raise PartitionsUnsupported(alias)
    return alias


def _contents(cursor: Any, name: str) -> Contents:
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


# --- Changing it -----------------------------------------------------------------------------------------------------


@contextmanager
def short_transaction(alias: str, *, lock_timeout: str) -> Iterator[Any]:
    """A cursor in a transaction of its own that gives up where it would have to wait for a lock for longer."""
    with transaction.atomic(using=alias, durable=True), connections[alias].cursor() as cursor:
        cursor.execute("SET TRANSACTION ISOLATION LEVEL READ COMMITTED")
        cursor.execute(f"SET LOCAL lock_timeout = '{lock_timeout}'")
        yield cursor


# What a session holds while it converts the table; shared, while it drops partitions.
AT_WORK = f"hashtextextended('{TABLE} is being converted', 0)"
# Where the platform has it: the server ends a statement soon after the process that sent it is gone.
NOTICE_DEATH = """
DO $$ BEGIN
    PERFORM set_config('client_connection_check_interval', '100ms', false);
EXCEPTION WHEN invalid_parameter_value THEN NULL;
END $$
"""


@contextmanager
def at_work(alias: str, *, alone: bool) -> Iterator[bool]:
    """True if this is the only conversion, or, not ``alone``, if there is none: no name comes to mean another table."""
    shared = "" if alone else "_shared"
    with connections[alias].cursor() as cursor:
        cursor.execute(f"SELECT pg_try_advisory_lock{shared}({AT_WORK})")
        (had,) = cursor.fetchone()
        cursor.execute(NOTICE_DEATH)
        try:
            yield had
        finally:
            cursor.execute("RESET client_connection_check_interval")
            if had:
                cursor.execute(f"SELECT pg_advisory_unlock{shared}({AT_WORK})")


def patiently(work: Callable[[], T], *, attempts: int = ATTEMPTS) -> T:
    """``work``, begun again and again with pauses where a lock is not to be had."""
    for _attempt in range(attempts - 1):
        try:
            return work()
        except DatabaseError as error:
            if not is_conflict(error):
                raise
        time.sleep(PAUSE)
    return work()


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """What a partition has beyond its columns: ``options`` are storage parameters, ``identity`` as for replication."""

    options: tuple[str, ...] = ()
    identity: str = "DEFAULT"
    owner: str | None = None  # if it is not who makes the partition


TEMPLATE = f"""
SELECT coalesce(part.reloptions, '{{}}') || ARRAY(SELECT 'toast.' || unnest(toast.reloptions)),
    CASE part.relreplident WHEN 'f' THEN 'FULL' WHEN 'n' THEN 'NOTHING' ELSE 'DEFAULT' END,
    CASE WHEN parent.relowner <> current_user::regrole THEN parent.relowner::regrole::text END
FROM pg_class AS part LEFT JOIN pg_class AS toast ON toast.oid = part.reltoastrelid
    JOIN pg_class AS parent ON parent.oid = '{TABLE}'::regclass
WHERE part.oid = ANY (%(oids)s::oid[]) OR part.oid = parent.oid
ORDER BY part.oid = parent.oid, part.reloptions IS NULL, array_position(%(oids)s::oid[], part.oid) DESC
LIMIT 1
"""


def template(cursor: Any, partitions: Sequence[Partition]) -> Template:
    """That of the latest partition with storage parameters, or of the table itself, while it is plain."""
    cursor.execute(TEMPLATE, {"oids": [partition.oid for partition in partitions]})
    options, identity, owner = cursor.fetchone()
    return Template(options=tuple(options), identity=identity, owner=owner)


def creation(schema: str, name: str, bounds: Bounds, like: Template) -> list[str]:
    """The statements that make a partition. They hold up nobody: the table's lock conflicts with no claim's."""
    options = f" WITH ({', '.join(like.options)})" if like.options else ""
    table, identity = f"{schema}.{TABLE}", f"ALTER TABLE {name} REPLICA IDENTITY {like.identity}"
    return [
        f"CREATE TABLE {name} (LIKE {table} INCLUDING ALL){options}",
        f"ALTER TABLE {name} ADD PRIMARY KEY (id)",
        *([] if like.identity == "DEFAULT" else [identity]),
        *([] if like.owner is None else [f"ALTER TABLE {name} OWNER TO {like.owner}"]),
        f"ALTER TABLE {table} ATTACH PARTITION {name} FOR VALUES {_range(bounds)}",
    ]


def _range(bounds: Bounds) -> str:
    lower, upper = (end and f"'{stamp(end)}'" for end in (bounds.lower, bounds.upper))
    return f"FROM ({lower or 'MINVALUE'}) TO ({upper or 'MAXVALUE'})"


def name_of(schema: str, bounds: Bounds) -> str:
    """What a partition of ours is called: by its lower bound, as pg_partman does, which reads times from names."""
    assert bounds.lower is not None
    assert bounds.width is not None
    precision = "%Y_%m_%d" if bounds.width % Interval.DAY.width == timedelta() else "%Y_%m_%d_%H%M"
    return f"{schema}.{TABLE}_p{bounds.lower.astimezone(UTC):{precision}}"


# --- Ensuring --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Ensured:
    """``created``: the partitions made. ``partitioned``: false if the table is plain, where there is nothing to do.

    ``covered_until``: new records have a partition up to then (ISO 8601); ``None``: for ever, or the table is plain.
    """

    created: tuple[str, ...] = ()
    partitioned: bool = True
    covered_until: str | None = None

    def __add__(self, later: Ensured) -> Ensured:
        return replace(later, created=self.created + later.created)


def ensure(*, ahead: int | None = None, using: str | None = None) -> Ensured:
    """See to it that there are partitions for now and for the ``ahead`` intervals to come (default: 7 days, 36 hours).

    Two at once are harmless, and so is calling it on a plain table.
    """
    return reduce(add, ensuring(ahead=ahead, using=using))


def ensuring(*, ahead: int | None = None, using: str | None = None) -> Iterator[Ensured]:
    """``ensure``, a partition at a time."""
    alias = postgresql(using)
    if layout(using=alias).halfway:
        forget_half_way(alias)
    while True:
        ensured = _ensure_one(alias, ahead)
        yield ensured
        if not ensured.created:
            return


def ensure_plan(*, ahead: int | None = None, using: str | None = None) -> list[str]:
    """The statements that ``ensure`` would run."""
    alias = postgresql(using)
    with connections[alias].cursor() as cursor:
        return [statement for _name, statements in _due(cursor, alias, ahead) for statement in statements]


def _ensure_one(alias: str, ahead: int | None) -> Ensured:
    with short_transaction(alias, lock_timeout="10s") as cursor:
        if layout(using=alias).partitioned:
            # Whoever else ensures, waits here; claims don't: it conflicts with none of their locks.
            cursor.execute(f"LOCK TABLE ONLY {TABLE} IN SHARE UPDATE EXCLUSIVE MODE")
        name, statements = next(iter(_due(cursor, alias, ahead)), (None, []))
        for statement in statements:
            cursor.execute(statement)
        found = layout(using=alias)
    until = covered_until(found.partitions, found.now) if found.partitioned else None
    return Ensured(
        created=() if name is None else (name,),
        partitioned=found.partitioned,
        covered_until=None if until is None else stamp(until),
    )


def _due(cursor: Any, alias: str, ahead: int | None) -> list[tuple[str, list[str]]]:
    found = layout(using=alias)
    if (width := future_width(found.partitions)) is None:
        return []
    like = template(cursor, found.partitions)
    wanted = missing(found.partitions, found.now, usual_ahead(width) if ahead is None else ahead)
    unkeyed = [
        (partition.name, [f"ALTER TABLE {partition.name} ADD PRIMARY KEY (id)"])
        for partition in found.partitions
        if not partition.keyed and partition.bounds.lower is not None and partition.bounds.lower > found.now
    ]
    named = [(_free_name(cursor, name_of(found.schema, bounds)), bounds) for bounds in wanted]
    return unkeyed + [(name, creation(found.schema, name, bounds, like)) for name, bounds in named]


def _free_name(cursor: Any, name: str) -> str:
    """``name``, or that with a number, if a table has it: one that was detached, for instance."""
    for candidate in (name, *(f"{name}_{number}" for number in range(2, 100))):
        cursor.execute("SELECT to_regclass(%s) IS NULL", [candidate])
        if cursor.fetchone() == (True,):
            break
    return candidate


def forget_half_way(alias: str) -> None:
    """Take back the CHECK of an ``enable`` that is not at work any more: it refuses every record of a day to come."""

    def forget() -> None:
        with short_transaction(alias, lock_timeout=LOCK_TIMEOUT) as cursor:
            cursor.execute(f"SELECT pg_try_advisory_xact_lock({AT_WORK})")
            if cursor.fetchone() == (True,):
                cursor.execute(f"ALTER TABLE {TABLE} DROP CONSTRAINT IF EXISTS {UNTIL}")

    patiently(forget)


# --- Dropping --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropped:
    """``dropped``: the partitions that are gone. ``kept``: those that are over but stay, with the reason.

    ``partitioned``: false if the table is plain, where there is nothing to do.
    """

    dropped: tuple[str, ...] = ()
    kept: Mapping[str, str] = field(default_factory=dict)
    partitioned: bool = True

    def __add__(self, later: Dropped) -> Dropped:
        return replace(later, dropped=self.dropped + later.dropped, kept={**self.kept, **later.kept})


def drop(*, using: str | None = None) -> Dropped:
    """Drop the partitions in which nothing is live, held, or still to be kept: all their answers are past ``purge_at``.

    Begun again after an interruption, it goes on; two at once are harmless, and so is calling it on a plain table.
    """
    return reduce(add, dropping(using=using))


def dropping(*, using: str | None = None) -> Iterator[Dropped]:
    """``drop``, a partition at a time."""
    alias = postgresql(using)
    with at_work(alias, alone=False) as undisturbed:
        found = layout(using=alias)
        over = [part for part in found.partitions if part.bounds.upper is not None and part.bounds.upper <= found.now]
        if not undisturbed:
            yield Dropped(partitioned=found.partitioned, kept={partition.name: CONVERTED for partition in over})
            return
        yield Dropped(partitioned=found.partitioned)
        for partition in over:
            yield _drop(alias, partition.name)
        for name in _left_behind(alias):
            yield _drop_detached(alias, name)


def drop_plan(*, using: str | None = None) -> list[str]:
    """The statements that ``drop`` would run, if nothing changed meanwhile."""
    found = status(using=using)
    plan = []
    for standing in found.partitions:
        if not standing.kept:
            plan += [] if standing.retired else _retirement(standing.name)
            plan += [detachment(standing.name, begun=standing.detaching), f"DROP TABLE {standing.name}"]
    return plan + [f"DROP TABLE {name}" for name in found.left_behind]


class _Stays(Exception):
    """The partition can't be dropped now, and why."""


def _drop(alias: str, name: str) -> Dropped:
    try:
        _retire(alias, name)
        _detach(alias, name)
    except _Stays as reason:
        return Dropped(kept={name: str(reason)})
    return _drop_detached(alias, name)


def _examined(alias: str, name: str) -> Partition:
    """The partition as it is by now. Raises ``_Stays`` unless it can go."""
    found = layout(using=alias)
    partition = next((partition for partition in found.partitions if partition.name == name), None)
    if partition is None:
        raise _Stays(GONE)
    if not partition.retired:
        with connections[alias].cursor() as cursor:
            contents = _contents(cursor, name)
        if reason := why_kept(partition.bounds, contents) or why_all_stay(found.partitions):
            raise _Stays(reason)
    return partition


def _retirement(name: str) -> list[str]:
    # Whoever has locked, changed or made a row in it is waited for: nothing in it can come to life between the look
    # and the end. And whoever comes later finds it empty, and closed.
    return [
        f"LOCK TABLE {name} IN ACCESS EXCLUSIVE MODE",
        f"TRUNCATE TABLE {name}",
        f"ALTER TABLE {name} ADD CONSTRAINT {RETIRED} CHECK (false)",
    ]


def _retire(alias: str, name: str) -> None:
    """Empty it and close it for good."""

    def retire() -> None:
        lock, *closing = _retirement(name)
        with short_transaction(alias, lock_timeout=LOCK_TIMEOUT) as cursor:
            cursor.execute(lock)
            if not _examined(alias, name).retired:
                for statement in closing:
                    cursor.execute(statement)

    if _examined(alias, name).retired:
        return
    try:
        patiently(retire)
    except DatabaseError as error:
        if is_conflict(error):
            raise _Stays(IN_USE) from error
        _examined(alias, name)
        raise


def _detach(alias: str, name: str) -> None:
    """Wait until the transactions that use the table have ended; nobody waits for us meanwhile."""
    begun = _examined(alias, name).detaching
    try:
        with connections[alias].cursor() as cursor:
            cursor.execute(detachment(name, begun=begun))
    except DatabaseError as error:
        _examined(alias, name)
        raise _Stays(str(error).strip()) from error


LEFT_BEHIND = f"""
SELECT format('%I.%I', nspname, relname)
FROM pg_constraint JOIN pg_class ON pg_class.oid = conrelid JOIN pg_namespace ON pg_namespace.oid = relnamespace
WHERE conname = '{RETIRED}' AND NOT relispartition
    AND relnamespace = (SELECT relnamespace FROM pg_class WHERE oid = '{TABLE}'::regclass)
ORDER BY 1
"""


def _left_behind(alias: str) -> list[str]:
    """Retired partitions that are detached, but not dropped yet."""
    with connections[alias].cursor() as cursor:
        cursor.execute(LEFT_BEHIND)
        return [name for (name,) in cursor.fetchall()]


def _drop_detached(alias: str, name: str) -> Dropped:
    if name not in _left_behind(alias):
        return Dropped()  # somebody else has dropped it
    with connections[alias].cursor() as cursor:
        cursor.execute(f"DROP TABLE IF EXISTS {name}")
    return Dropped(dropped=(name,))


# --- Status ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """One partition. ``rows`` and ``bytes``, indexes included, as the database estimates them; ``None`` if it doesn't.

    ``live`` and ``held``: counts of up to ``MOST``. ``purge_at``: of the last answer in it. ``keyed``: false if it
    lacks the index that a claim looks by. ``retired`` and ``detaching``: a ``drop`` has emptied it, and begun to detach
    it; one that was interrupted goes on. ``kept``: why it can't be dropped; empty if it can.
    """

    name: str
    lower: datetime | None
    upper: datetime | None
    rows: int | None
    bytes: int
    live: int
    held: int
    purge_at: datetime | None
    keyed: bool
    retired: bool
    detaching: bool
    kept: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """``covered_until``: new records have a partition up to then; ``None``: for ever. ``short``: that is too soon.

    ``halfway``: ``enable`` was interrupted; run it again, or ``ensure``, which takes it back. ``left_behind``: detached
    by a ``drop`` that was interrupted; the next one drops them.
    """

    partitioned: bool
    covered_until: datetime | None = None
    short: bool = False
    halfway: bool = False
    partitions: tuple[Standing, ...] = ()
    left_behind: tuple[str, ...] = ()


def status(*, using: str | None = None) -> Status:
    """How the partitions stand, oldest first."""
    alias = postgresql(using)
    found = layout(using=alias)
    return Status(
        partitioned=found.partitioned,
        covered_until=covered_until(found.partitions, found.now) if found.partitioned else None,
        short=found.partitioned and is_short(found.partitions, found.now),
        halfway=found.halfway,
        partitions=tuple(_standing(alias, partition, found) for partition in found.partitions),
        left_behind=tuple(_left_behind(alias)),
    )


def _standing(alias: str, partition: Partition, found: Layout) -> Standing:
    size = "SELECT nullif(reltuples, -1)::bigint, pg_total_relation_size(oid) FROM pg_class WHERE oid = %s"
    with connections[alias].cursor() as cursor:
        cursor.execute(size, [partition.oid])
        rows, bytes = cursor.fetchone()
        contents = _contents(cursor, partition.name)
    return Standing(
        name=partition.name,
        lower=partition.bounds.lower,
        upper=partition.bounds.upper,
        rows=rows,
        bytes=bytes,
        live=contents.live,
        held=contents.held,
        purge_at=contents.purge_at,
        keyed=partition.keyed,
        retired=partition.retired,
        detaching=partition.detaching,
        kept="" if partition.retired else why_kept(partition.bounds, contents) or why_all_stay(found.partitions),
    )
