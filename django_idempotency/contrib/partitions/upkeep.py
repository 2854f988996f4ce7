"""Make partitions ahead of time, drop those whose records have all expired, and report
how they stand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timedelta
from functools import partial

from django.db import DatabaseError, connections, transaction

from django_idempotency.contrib.partitions.catalog import (
    left_behind,
    postgresql,
    read_layout,
    reason_to_keep,
    template,
)
from django_idempotency.contrib.partitions.layout import (
    RETIRED,
    TABLE,
    Layout,
    Partition,
    creation,
    detachment,
    name_of,
    stamp,
)
from django_idempotency.contrib.partitions.locks import (
    LOCK_TIMEOUT,
    NO_TIMEOUTS,
    keep_autovacuum_away,
    patiently,
    short_transaction,
)
from django_idempotency.extending import conf
from django_idempotency.extending.figures import Gauge, GaugeFamily
from django_idempotency.extending.stores import is_conflict

AHEAD = 7  # future days that `ensure` provides for
# for another ensure(), or another change of the table; no claim queues behind this wait
PATIENCE = "60s"
HOUR, DAY = 3600, 24 * 3600  # seconds
GONE = "gone in the meantime"
IN_USE = "in use by a long transaction"


@dataclass(frozen=True, kw_only=True)
class Standing(Partition):
    """``kept``: why the partition can't be dropped; empty if it can, or if an
    interrupted ``drop`` has begun to.
    """

    kept: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionStatus:
    """``covered_until``: new records have a partition until then; ``None``: for ever.
    ``short``: that is too soon.

    ``left_behind``: partitions that an interrupted ``drop`` has detached; the next
    ``drop`` drops them.
    """

    partitioned: bool
    covered_until: datetime | None = None
    short: bool = False
    partitions: tuple[Standing, ...] = ()
    left_behind: tuple[str, ...] = ()


def status(*, using: str | None = None) -> PartitionStatus:
    """Return how the partitions stand, oldest first.

    ``using``: the database's alias; default: the settings'. Raises ``NotConvertible``
    if it is not PostgreSQL.
    """
    alias = postgresql(using)
    found = read_layout(using=alias)
    return PartitionStatus(
        partitioned=found.partitioned,
        covered_until=found.covered_until,
        short=found.is_short(),
        partitions=tuple(_standing(alias, partition) for partition in found.partitions),
        left_behind=tuple(left_behind(alias)),
    )


def _standing(alias: str, partition: Partition) -> Standing:
    kept = ""
    # one that is retired is empty, and may be dropped by another session at any moment
    if not partition.retired:
        with transaction.atomic(using=alias), connections[alias].cursor() as cursor:
            cursor.execute(NO_TIMEOUTS)
            kept = reason_to_keep(cursor, partition)
    return Standing(**asdict(partition), kept=kept)


def _find(alias: str, name: str) -> Standing | None:
    found = (
        partition
        for partition in read_layout(using=alias).partitions
        if partition.name == name
    )
    return next((_standing(alias, partition) for partition in found), None)


# --- Making ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Ensured:
    """``created``: the partitions made. ``partitioned``: false if the table is plain,
    so that there is nothing to do.

    ``covered_until``: new records have a partition until then (ISO 8601); ``None``: for
    ever, or the table is plain. ``short``: that is too soon, and sooner than was asked
    for.
    """

    created: tuple[str, ...]
    partitioned: bool
    covered_until: str | None
    short: bool


def ensure(*, ahead: int = AHEAD, using: str | None = None) -> Ensured:
    """Make sure that there are partitions for now and for the ``ahead`` days to come.

    Two calls at once are harmless, and so is a call on a plain table.

    ``using``: the database's alias; default: the settings'. Raises ``NotConvertible``
    if it is not PostgreSQL.
    """
    alias = postgresql(using)
    created = []
    with short_transaction(alias, lock_timeout=PATIENCE) as cursor:
        found = read_layout(using=alias)
        if found.partitioned:
            # Another run of ensure() waits here. Claims don't: this lock conflicts with
            # none of theirs.
            cursor.execute(f"LOCK TABLE ONLY {TABLE} IN SHARE UPDATE EXCLUSIVE MODE")
            found = read_layout(using=alias)
            like = template(cursor, found.partitions)
            for lower, upper in found.missing(ahead):
                created.append(name_of(found.schema, lower))
                for statement in creation(
                    found.schema, created[-1], lower, upper, like
                ):
                    cursor.execute(statement)
            found = read_layout(using=alias)
    until = found.covered_until
    return Ensured(
        created=tuple(created),
        partitioned=found.partitioned,
        covered_until=stamp(until) if until else None,
        short=found.is_short(days=min(ahead, 2)),
    )


# --- Dropping -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropped:
    """``dropped``: the partitions that are gone. ``kept``: those that are over but
    stay, with the reason.

    ``partitioned``: false if the table is plain, so that there is nothing to do.
    """

    dropped: tuple[str, ...] = ()
    kept: Mapping[str, str] = field(default_factory=dict)
    partitioned: bool = True

    def __add__(self, later: Dropped) -> Dropped:
        return replace(
            self, dropped=self.dropped + later.dropped, kept={**self.kept, **later.kept}
        )


def drop(
    *, using: str | None = None, go_on: Callable[[Dropped], bool] = lambda _sum: True
) -> Dropped:
    """Drop the partitions in which no record is live, on hold or still to be kept: all
    responses are past ``purge_at``.

    If it is interrupted, the next call continues. Two calls at once are harmless, and
    so is a call on a plain table.

    ``using``: the database's alias; default: the settings'. ``go_on``: called with the
    sum after each partition; if it returns false, no further one is dropped. Raises
    ``NotConvertible`` if the database is not PostgreSQL.
    """
    alias = postgresql(using)
    found = patiently(partial(read_layout, using=alias))
    dropped = Dropped(partitioned=found.partitioned)
    for one in _dropped_one_by_one(alias, found):
        dropped += one
        if not go_on(dropped):
            break
    return dropped


def _dropped_one_by_one(alias: str, found: Layout) -> Iterator[Dropped]:
    for partition in found.partitions:
        if partition.upper is not None and partition.upper <= found.now:
            yield _drop(alias, partition.name)
    for name in left_behind(alias):
        yield _drop_detached(alias, name)


def _drop(alias: str, name: str) -> Dropped:
    for step in (_retire, _detach):
        # Outside a transaction: this may be a deadlock's victim, and is then repeated.
        partition = patiently(partial(_find, alias, name))
        if why := (
            GONE if partition is None else partition.kept or step(alias, partition)
        ):
            return Dropped(kept={name: why})
    return _drop_detached(alias, name)


def _retire(alias: str, partition: Partition) -> str:
    """Empty the partition and close it for good. Return why it has to stay; empty if it
    need not.

    The lock waits for transactions that have locked, changed or made a row in the
    partition, so no row can come to life between the check and the end. Later
    transactions find the partition empty and closed.
    """
    name = partition.name

    def retire() -> str:
        with short_transaction(alias, lock_timeout=LOCK_TIMEOUT) as cursor:
            keep_autovacuum_away(cursor, name)
            cursor.execute(f"LOCK TABLE {name} IN ACCESS EXCLUSIVE MODE")
            locked = _find(alias, name)
            if locked and not locked.kept and not locked.retired:
                cursor.execute(f"TRUNCATE TABLE {name}")
                cursor.execute(
                    f"ALTER TABLE {name} ADD CONSTRAINT {RETIRED} CHECK (false)"
                )
            return locked.kept if locked else GONE

    if partition.retired:
        return ""
    try:
        return patiently(retire)
    except DatabaseError as error:
        if is_conflict(error):
            return IN_USE
        if _find(alias, name) is None:
            return GONE
        raise


def _detach(alias: str, partition: Partition) -> str:
    """Wait for the transactions that use the table, and detach the partition. No other
    session waits for this one.

    Return why it has to stay; empty if it need not.
    """
    with connections[alias].cursor() as cursor:
        cursor.execute("SHOW statement_timeout")
        (timeout,) = cursor.fetchone()
        try:
            cursor.execute("SET statement_timeout = 0")
            cursor.execute(detachment(partition.name, begun=partition.detaching))
        except DatabaseError as error:
            return str(error).strip() if _find(alias, partition.name) else GONE
        finally:
            cursor.execute(f"SET statement_timeout = '{timeout}'")
    return ""


def _drop_detached(alias: str, name: str) -> Dropped:
    if name not in left_behind(alias):
        return Dropped()  # another session has dropped it

    def remove() -> None:
        with connections[alias].cursor() as cursor:
            cursor.execute(f"DROP TABLE IF EXISTS {name}")

    patiently(remove)
    return Dropped(dropped=(name,))


# --- Figures --------------------------------------------------------------------------

GAUGES = (
    Gauge(
        "partitions_ahead",
        "for how long, from now on, new records have partitions",
        {"": "ahead"},
        unit="s",
    ),
)


def _ahead(using: str) -> Mapping[str, Mapping[str, float]]:
    """Return no figure if the table is plain, or if a partition without an end takes
    every record.
    """
    if connections[using].vendor != "postgresql":
        return {}
    found = read_layout(using=using)
    until = found.covered_until
    return (
        {} if until is None else {using: {"ahead": (until - found.now).total_seconds()}}
    )


FAMILY = GaugeFamily("partitions", "database", GAUGES, _ahead)


def delay(using: str) -> float:
    """Return for how many seconds a record may be due before its partition can be
    dropped: one partition's time.

    The first partition is the table that there was before ``enable``. It takes records
    for two more days at most, and then waits for the last of them, and for ``drop``.
    """
    if connections[using].vendor != "postgresql":
        return 0.0
    found = read_layout(using=using)
    if not found.partitions:
        return 0.0
    first, kept_for = found.partitions[0], conf().policy.kept_for
    waits = timedelta(seconds=kept_for + 2 * HOUR)
    if first.lower is None and (first.upper is None or found.now < first.upper + waits):
        return 2 * DAY + kept_for
    return DAY
