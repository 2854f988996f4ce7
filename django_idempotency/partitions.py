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

from django.db import DatabaseError, IntegrityError, connections, transaction

from django_idempotency.partition_layout import (
    RESERVE,
    TABLE,
    Bounds,
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
)
from django_idempotency.stores.database import RETIRED, UNTIL, is_conflict

T = TypeVar("T")

GONE = "gone meanwhile"
IN_USE = "in use by a long transaction"
HAS_RECORDS = "it has records already"
CONVERTED = "the table is being converted"
LOCK_TIMEOUT = "100ms"  # nobody waits longer than that behind a lock that we are waiting for
ATTEMPTS, PAUSE = 20, 0.25  # for a lock that is not to be had, with so many seconds between
DIVISIONS = 4  # attempts to divide a reserve; ``ensure`` comes again


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
        return replace(later, created=self.created + later.created)


def ensure(*, ahead: int | None = None, using: str | None = None) -> Ensured:
    """See to it that there are partitions for now and for the ``ahead`` intervals to come (default: 7 days, 12 hours).

    Where intervals are shorter than a day, reserves of up to a day each follow, for three days. One that begins within
    half of ``ahead`` is divided; it remains whole, and is as good for claims, where a long transaction is in the way.

    Two at once are harmless, and so is calling it on a plain table.
    """
    return reduce(add, ensuring(ahead=ahead, using=using))


def ensuring(*, ahead: int | None = None, using: str | None = None) -> Iterator[Ensured]:
    """``ensure``, a partition at a time."""
    alias = postgresql(using)
    if layout(using=alias).halfway:
        forget_half_way(alias)
    while (ensured := _ensure_one(alias, ahead)).created:
        yield ensured
    yield ensured
    for reserve in _reserves_due(layout(using=alias), ahead):
        yield _divide(alias, reserve.name, ahead)


def ensure_plan(*, ahead: int | None = None, using: str | None = None) -> list[str]:
    """The statements that ``ensure`` would run, if nothing changed meanwhile."""
    alias = postgresql(using)
    found = layout(using=alias)
    with connections[alias].cursor() as cursor:
        made = _due(cursor, found, ahead)
        plan = [statement for due in made for statement in due.statements]
        for reserve in _reserves_due(found, ahead):
            instead = [due for due in _creations(cursor, found, ahead, without=[reserve]) if due not in made]
            plan += _division(reserve, instead)
    return plan


def _ensure_one(alias: str, ahead: int | None) -> Ensured:
    with short_transaction(alias, lock_timeout="10s") as cursor:
        if layout(using=alias).partitioned:
            cursor.execute(LOCK)
        due = _due(cursor, layout(using=alias), ahead)[:1]
        for statement in due[0].statements if due else ():
            cursor.execute(statement)
        return _ensured(alias, created=tuple(one.name for one in due))


# Whoever else ensures, waits here; claims don't: it conflicts with none of their locks.
LOCK = f"LOCK TABLE ONLY {TABLE} IN SHARE UPDATE EXCLUSIVE MODE"


def _ensured(alias: str, **what: Any) -> Ensured:
    found = layout(using=alias)
    until = covered_until(found.partitions, found.now) if found.partitioned else None
    return Ensured(partitioned=found.partitioned, covered_until=None if until is None else stamp(until), **what)


class _Due(NamedTuple):
    name: str
    statements: list[str]


def _due(cursor: Any, found: Layout, ahead: int | None) -> list[_Due]:
    unkeyed = [
        _Due(partition.name, [f"ALTER TABLE {partition.name} ADD PRIMARY KEY (id)"])
        for partition in found.partitions
        if not partition.keyed and partition.bounds.lower is not None and partition.bounds.lower > found.now
    ]
    return unkeyed + _creations(cursor, found, ahead)


def _creations(cursor: Any, found: Layout, ahead: int | None, *, without: Sequence[Partition] = ()) -> list[_Due]:
    if (width := future_width(found.partitions)) is None:
        return []
    ahead, like = _ahead(found, ahead), template(cursor, found.partitions)
    made = []
    for bounds in missing(found.partitions, found.now, ahead, without=without):
        name = _free_name(cursor, name_of(found.schema, bounds))
        made.append(_Due(name, creation(found.schema, name, bounds, like)))
    for bounds in reserves(found.partitions, found.now, ahead, without=without):
        name = _free_name(cursor, name_of(found.schema, bounds) + "_reserve")
        made.append(_Due(name, creation(found.schema, name, bounds, like, reserve=int(width.total_seconds()))))
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


# --- Dividing a reserve ----------------------------------------------------------------------------------------------


def _reserves_due(found: Layout, ahead: int | None) -> list[Partition]:
    return to_divide(found.partitions, found.now, _ahead(found, ahead))


def _divide(alias: str, name: str, ahead: int | None) -> Ensured:
    try:
        return patiently(partial(_divide_now, alias, name, ahead), attempts=DIVISIONS)
    except IntegrityError:
        return _ensured(alias, undivided={name: HAS_RECORDS})
    except DatabaseError as error:
        if not is_conflict(error):
            raise
        return _ensured(alias, undivided={name: IN_USE})


def _divide_now(alias: str, name: str, ahead: int | None) -> Ensured:
    with short_transaction(alias, lock_timeout=LOCK_TIMEOUT) as cursor:
        cursor.execute(LOCK)
        found = layout(using=alias)
        reserve = next((partition for partition in _reserves_due(found, ahead) if partition.name == name), None)
        if reserve is None:
            return _ensured(alias)
        made = _creations(cursor, found, ahead, without=[reserve])
        for statement in _division(reserve, made):
            cursor.execute(statement)
        return _ensured(alias, created=tuple(due.name for due in made))


def _division(reserve: Partition, made: Sequence[_Due]) -> list[str]:
    """Claims wait while one takes the other's place, but not for the making. A record in it makes this fail."""
    return [
        *(statement for due in made for statement in due.statements[:-1]),
        f"LOCK TABLE ONLY {TABLE} IN ACCESS EXCLUSIVE MODE",
        f"ALTER TABLE {reserve.name} ADD CONSTRAINT {RETIRED} CHECK (false)",
        f"DROP TABLE {reserve.name}",
        *(due.statements[-1] for due in made),
    ]


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
            contents = contents_of(cursor, name)
        if reason := why_kept(partition.bounds, contents) or why_all_stay(found.partitions):
            raise _Stays(reason)
    return partition


def _looked_at(alias: str, name: str) -> Partition:
    """``_examined``, in no transaction: whoever looks may be a deadlock's victim, and looks again."""
    return patiently(partial(_examined, alias, name))


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

    if _looked_at(alias, name).retired:
        return
    try:
        patiently(retire)
    except DatabaseError as error:
        if is_conflict(error):
            raise _Stays(IN_USE) from error
        _looked_at(alias, name)
        raise


def _detach(alias: str, name: str) -> None:
    """Wait until the transactions that use the table have ended; nobody waits for us meanwhile."""
    begun = _looked_at(alias, name).detaching
    try:
        with connections[alias].cursor() as cursor:
            cursor.execute(detachment(name, begun=begun))
    except DatabaseError as error:
        _looked_at(alias, name)
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
        partitions=tuple(_standing(alias, partition, found) for partition in found.partitions),
        left_behind=tuple(_left_behind(alias)),
    )


def _standing(alias: str, partition: Partition, found: Layout) -> Standing:
    size = "SELECT nullif(reltuples, -1)::bigint, pg_total_relation_size(oid) FROM pg_class WHERE oid = %s"
    with connections[alias].cursor() as cursor:
        cursor.execute(size, [partition.oid])
        rows, bytes = cursor.fetchone()
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
        kept="" if partition.retired else why_kept(partition.bounds, contents) or why_all_stay(found.partitions),
    )
