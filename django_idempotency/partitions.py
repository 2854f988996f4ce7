"""Partitions of the record table, on PostgreSQL: retention by DROP instead of DELETE.

``django_idempotency.partition_layout`` tells what there is and should be; ``django_idempotency.conversion`` makes a
table partitioned.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import partial, reduce
from operator import add
from typing import Any, NamedTuple, TypeVar

from django.db import DatabaseError, connections, transaction

from django_idempotency.partition_layout import (
    RESERVE,
    TABLE,
    Bounds,
    Contents,
    Interval,
    Layout,
    Partition,
    contents_of,
    covered_until,
    detachment,
    future_width,
    is_short,
    layout,
    missing,
    postgresql,
    reserves,
    stamp,
    to_divide,
    usual_ahead,
    why_all_stay,
    why_kept,
    why_last,
    why_undivided,
)
from django_idempotency.stores.database import RETIRED, UNTIL, is_conflict

T = TypeVar("T")

GONE = "gone meanwhile"
IN_USE = "in use by a long transaction"
CONVERTED = "the table is being converted"
LOCK_TIMEOUT = "100ms"  # nobody waits longer than that behind a lock that we are waiting for
ATTEMPTS, PAUSE = 20, 0.25  # for a lock that is not to be had, with so many seconds between


# --- Changing the table ----------------------------------------------------------------------------------------------


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
        try:
            cursor.execute(NOTICE_DEATH)
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


def forget_half_way(alias: str) -> None:
    """Take back the CHECK of an ``enable`` that is not at work any more: it refuses every record of a day to come."""

    def forget() -> None:
        with short_transaction(alias, lock_timeout=LOCK_TIMEOUT) as cursor:
            cursor.execute(f"SELECT pg_try_advisory_xact_lock({AT_WORK})")
            if cursor.fetchone() == (True,):
                cursor.execute(f"ALTER TABLE {TABLE} DROP CONSTRAINT IF EXISTS {UNTIL}")

    patiently(forget)


# --- Making a partition ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """What a partition has beyond its columns: ``options`` are storage parameters, ``identity`` as for replication."""

    options: tuple[str, ...] = ()
    identity: str = "DEFAULT"
    owner: str | None = None  # if it is not who makes the partition

    def created(self, name: str, columns: str) -> str:
        """The statement that makes a table with ``columns``, as those of LIKE."""
        options = f" WITH ({', '.join(self.options)})" if self.options else ""
        return f"CREATE TABLE {name} ({columns}){options}"

    def identified(self, name: str) -> list[str]:
        return [] if self.identity == "DEFAULT" else [f"ALTER TABLE {name} REPLICA IDENTITY {self.identity}"]

    def owned(self, name: str) -> list[str]:
        return [] if self.owner is None else [f"ALTER TABLE {name} OWNER TO {self.owner}"]


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


def creation(schema: str, name: str, bounds: Bounds, like: Template, *, reserve: int | None = None) -> list[str]:
    """The statements that make a partition. They hold up nobody: the table's lock conflicts with no claim's."""
    table = f"{schema}.{TABLE}"
    mark = "" if reserve is None else f", CONSTRAINT {RESERVE}{reserve} CHECK (true)"
    return [
        like.created(name, f"LIKE {table} INCLUDING ALL{mark}"),
        f"ALTER TABLE {name} ADD PRIMARY KEY (id)",
        *like.identified(name),
        *like.owned(name),
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

    ``undivided``: the reserves that are due to be divided but could not be, with the reason. ``covered_until``: new
    records have a partition up to then (ISO 8601); ``None``: for ever, or the table is plain.
    """

    created: tuple[str, ...] = ()
    undivided: Mapping[str, str] = field(default_factory=dict)
    partitioned: bool = True
    covered_until: str | None = None

    def __add__(self, later: Ensured) -> Ensured:
        return replace(later, created=self.created + later.created, undivided={**self.undivided, **later.undivided})


def ensure(*, ahead: int | None = None, using: str | None = None) -> Ensured:
    """See to it that there are partitions for now and for the ``ahead`` intervals to come (default: 7 days, 12 hours).

    Where intervals are shorter than a day, reserves of up to a day each follow, for three days. One that begins within
    half of ``ahead`` is divided. It remains whole, and is as good for claims, where it has a record already or a
    transaction has used the table for longer than a minute.

    Two at once are harmless, and so is calling it on a plain table.
    """
    return reduce(add, ensuring(ahead=ahead, using=using))


def ensuring(*, ahead: int | None = None, using: str | None = None) -> Iterator[Ensured]:
    """``ensure``, a partition at a time."""
    alias = postgresql(using)
    if layout(using=alias).halfway:
        forget_half_way(alias)
    yield from _filling(alias, ahead)
    for reserve in _reserves_due(layout(using=alias), ahead):
        kept = _clear(alias, reserve.name)
        yield _ensured(alias, undivided=kept)
        if not kept:
            yield from _filling(alias, ahead)


def ensure_plan(*, ahead: int | None = None, using: str | None = None) -> list[str]:
    """The statements that ``ensure`` would run, if nothing changed meanwhile."""
    alias = postgresql(using)
    found = layout(using=alias)
    due = _reserves_due(found, ahead)
    plan = [statement for reserve in due for statement in _removal(reserve.name, reserve.retired, reserve.detaching)]
    left = tuple(partition for partition in found.partitions if partition not in due)
    with connections[alias].cursor() as cursor:
        for making in _missing(cursor, replace(found, partitions=left), ahead):
            plan += making.statements
    return plan


def _filling(alias: str, ahead: int | None) -> Iterator[Ensured]:
    while (ensured := _fill_one(alias, ahead)).created:
        yield ensured
    yield ensured


def _fill_one(alias: str, ahead: int | None) -> Ensured:
    with short_transaction(alias, lock_timeout="10s") as cursor:
        if layout(using=alias).partitioned:
            # Whoever else ensures, waits here; claims don't: it conflicts with none of their locks.
            cursor.execute(f"LOCK TABLE ONLY {TABLE} IN SHARE UPDATE EXCLUSIVE MODE")
        made = _missing(cursor, layout(using=alias), ahead)[:1]
        for statement in (statement for making in made for statement in making.statements):
            cursor.execute(statement)
        return _ensured(alias, created=tuple(making.name for making in made))


def _ensured(alias: str, **what: Any) -> Ensured:
    found = layout(using=alias)
    until = covered_until(found.partitions, found.now) if found.partitioned else None
    return Ensured(partitioned=found.partitioned, covered_until=None if until is None else stamp(until), **what)


class _Making(NamedTuple):
    """What makes a partition, or what it lacks."""

    name: str
    statements: list[str]


def _missing(cursor: Any, found: Layout, ahead: int | None) -> list[_Making]:
    if (width := future_width(found.partitions)) is None:
        return []
    wanted_ahead, like = _ahead(found, ahead), template(cursor, found.partitions)
    made = [
        _Making(partition.name, [f"ALTER TABLE {partition.name} ADD PRIMARY KEY (id)"])
        for partition in found.partitions
        if not partition.keyed and partition.bounds.lower is not None and partition.bounds.lower > found.now
    ]
    for bounds in missing(found.partitions, found.now, wanted_ahead):
        name = _free_name(cursor, name_of(found.schema, bounds))
        made.append(_Making(name, creation(found.schema, name, bounds, like)))
    for bounds in reserves(found.partitions, found.now, wanted_ahead):
        name, seconds = _free_name(cursor, name_of(found.schema, bounds) + "_reserve"), int(width.total_seconds())
        made.append(_Making(name, creation(found.schema, name, bounds, like, reserve=seconds)))
    return made


def _ahead(found: Layout, ahead: int | None) -> int:
    return usual_ahead(future_width(found.partitions)) if ahead is None else ahead


def _free_name(cursor: Any, name: str) -> str:
    """``name``, or that with a number, if a table has it: one that was detached, for instance."""
    for candidate in (name, *(f"{name}_{number}" for number in range(2, 100))):
        cursor.execute("SELECT to_regclass(%s) IS NULL", [candidate])
        if cursor.fetchone() == (True,):
            break
    return candidate


# --- Clearing away a reserve, for the partitions that it stands for --------------------------------------------------

# Until the last of these has ended, the time of the reserve would have no partition at all.
LONG_USE = f"""
SELECT EXISTS (
    SELECT FROM pg_locks JOIN pg_stat_activity USING (pid)
    WHERE relation = '{TABLE}'::regclass AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
        AND xact_start < statement_timestamp() - interval '1 min'
)
"""


def _reserves_due(found: Layout, ahead: int | None) -> list[Partition]:
    return to_divide(found.partitions, found.now, _ahead(found, ahead))


def _clear(alias: str, name: str) -> Mapping[str, str]:
    """Drop an empty reserve; or tell why not."""

    def why(_found: Layout, _partition: Partition, contents: Contents) -> str:
        return why_undivided(contents)

    with at_work(alias, alone=False) as undisturbed, connections[alias].cursor() as cursor:
        cursor.execute(LONG_USE)
        if cursor.fetchone() == (True,):
            return {name: IN_USE}
        kept = _drop(alias, name, why).kept if undisturbed else {name: CONVERTED}
    return {name: reason for name, reason in kept.items() if reason != GONE}


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
        found = patiently(partial(layout, using=alias))
        over = [part for part in found.partitions if part.bounds.upper is not None and part.bounds.upper <= found.now]
        if not undisturbed:
            yield Dropped(partitioned=found.partitioned, kept={partition.name: CONVERTED for partition in over})
            return
        yield Dropped(partitioned=found.partitioned)
        for partition in over:
            yield _drop(alias, partition.name, _why_kept)
        for name in _left_behind(alias):
            yield _drop_detached(alias, name)


def drop_plan(*, using: str | None = None) -> list[str]:
    """The statements that ``drop`` would run, if nothing changed meanwhile."""
    found = status(using=using)
    plan = []
    for standing in found.partitions:
        if not standing.kept:
            plan += _removal(standing.name, standing.retired, standing.detaching)
    return plan + [f"DROP TABLE {name}" for name in found.left_behind]


class _Stays(Exception):
    """The partition can't be dropped now, and why."""


Why = Callable[[Layout, Partition, Contents], str]  # a partition stays; empty if it can go


def _why_kept(found: Layout, partition: Partition, contents: Contents) -> str:
    return why_kept(partition.bounds, contents) or why_last(found.partitions, partition.name)


def _drop(alias: str, name: str, why: Why) -> Dropped:
    try:
        _retire(alias, name, why)
        _detach(alias, name, why)
    except _Stays as reason:
        return Dropped(kept={name: str(reason)})
    return _drop_detached(alias, name)


def _examined(alias: str, name: str, why: Why) -> Partition:
    """The partition as it is by now. Raises ``_Stays`` unless it can go."""
    found = layout(using=alias)
    partition = next((partition for partition in found.partitions if partition.name == name), None)
    if partition is None:
        raise _Stays(GONE)
    if not partition.retired:
        with connections[alias].cursor() as cursor:
            contents = contents_of(cursor, name)
        if reason := why(found, partition, contents) or why_all_stay(found.partitions):
            raise _Stays(reason)
    return partition


def _looked_at(alias: str, name: str, why: Why) -> Partition:
    """``_examined``, in no transaction: whoever looks may be a deadlock's victim, and looks again."""
    return patiently(partial(_examined, alias, name, why))


def _removal(name: str, retired: bool, detaching: bool) -> list[str]:
    closing = [] if retired else ["BEGIN", *_retirement(name), "COMMIT"]
    return [*closing, detachment(name, begun=detaching), f"DROP TABLE {name}"]


def _retirement(name: str) -> list[str]:
    # Whoever has locked, changed or made a row in it is waited for: nothing in it can come to life between the look
    # and the end. And whoever comes later finds it empty, and closed.
    return [
        f"LOCK TABLE {name} IN ACCESS EXCLUSIVE MODE",
        f"TRUNCATE TABLE {name}",
        f"ALTER TABLE {name} ADD CONSTRAINT {RETIRED} CHECK (false)",
    ]


def _retire(alias: str, name: str, why: Why) -> None:
    """Empty it and close it for good."""

    def retire() -> None:
        lock, *closing = _retirement(name)
        with short_transaction(alias, lock_timeout=LOCK_TIMEOUT) as cursor:
            cursor.execute(lock)
            if not _examined(alias, name, why).retired:
                for statement in closing:
                    cursor.execute(statement)

    if _looked_at(alias, name, why).retired:
        return
    try:
        patiently(retire)
    except DatabaseError as error:
        if is_conflict(error):
            raise _Stays(IN_USE) from error
        _looked_at(alias, name, why)
        raise


def _detach(alias: str, name: str, why: Why) -> None:
    """Wait until the transactions that use the table have ended; nobody waits for us meanwhile."""
    begun = _looked_at(alias, name, why).detaching
    try:
        with connections[alias].cursor() as cursor:
            cursor.execute(detachment(name, begun=begun))
    except DatabaseError as error:
        _looked_at(alias, name, why)
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

    def remove() -> None:
        with connections[alias].cursor() as cursor:
            cursor.execute(f"DROP TABLE IF EXISTS {name}")

    patiently(remove)
    return Dropped(dropped=(name,))


# --- Status ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """One partition. ``rows`` and ``bytes``, indexes included, as the database estimates them; ``None`` if it doesn't.

    ``live`` and ``held``: counts of up to ``MOST``. ``purge_at``: of the last answer in it. ``keyed``: false if it
    lacks the index that a claim looks by. ``reserve``: it is to be divided before its time comes. ``retired`` and
    ``detaching``: a ``drop`` has emptied it, and begun to detach it; one that was interrupted goes on. ``kept``: why it
    can't be dropped; empty if it can.
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
    reserve: bool
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
        partitions=tuple(standing for part in found.partitions if (standing := _standing(alias, part, found))),
        left_behind=tuple(_left_behind(alias)),
    )


def _standing(alias: str, partition: Partition, found: Layout) -> Standing | None:
    """``None`` if it is gone meanwhile."""
    size = "SELECT nullif(reltuples, -1)::bigint, pg_total_relation_size(oid) FROM pg_class WHERE oid = %s"
    with connections[alias].cursor() as cursor:
        cursor.execute(size, [partition.oid])
        if (sized := cursor.fetchone()) is None:
            return None
        rows, bytes = sized
        contents = contents_of(cursor, partition.name)
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
        reserve=partition.reserve is not None,
        retired=partition.retired,
        detaching=partition.detaching,
        kept="" if partition.retired else _why_kept(found, partition, contents) or why_all_stay(found.partitions),
    )
