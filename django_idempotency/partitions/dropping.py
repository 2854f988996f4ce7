"""Drop partitions whose records are all past their time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from operator import add

from django.db import DatabaseError, connections
from django.utils.translation import gettext_noop

from django_idempotency.partitions.catalog import contents_of, left_behind, postgresql, read_layout
from django_idempotency.partitions.layout import (
    Partition,
    detachment,
    why_all_stay,
    why_it_stays,
)
from django_idempotency.partitions.locks import (
    LOCK_TIMEOUT,
    at_work,
    keep_autovacuum_away,
    patiently,
    short_transaction,
)
from django_idempotency.partitions.report import status
from django_idempotency.stores.errors import RETIRED, is_conflict

GONE = gettext_noop("gone in the meantime")
IN_USE = gettext_noop("in use by a long transaction")
CONVERTED = gettext_noop("the table is being converted")


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropped:
    """``dropped``: the partitions that are gone. ``kept``: those that are over but stay, with the reason.

    ``partitioned``: false if the table is plain, so that there is nothing to do.
    """

    dropped: tuple[str, ...] = ()
    kept: Mapping[str, str] = field(default_factory=dict)
    partitioned: bool = True

    def __add__(self, later: Dropped) -> Dropped:
        return replace(later, dropped=self.dropped + later.dropped, kept={**self.kept, **later.kept})


def drop(*, using: str | None = None) -> Dropped:
    """Drop the partitions in which no record is live, on hold or still to be kept: all responses are past ``purge_at``.

    If it is interrupted, the next call continues. Two calls at once are harmless, and so is a call on a plain table.

    ``using``: the database's alias; default: the settings'. Raises ``PartitionsUnsupported`` on databases other than
    PostgreSQL.
    """
    return reduce(add, drop_in_steps(using=using))


def drop_in_steps(*, using: str | None = None) -> Iterator[Dropped]:
    """Do the same as ``drop``, a partition at a time."""
    alias = postgresql(using)
    with at_work(alias, alone=False) as undisturbed:
        found = patiently(partial(read_layout, using=alias))
        over = [part for part in found.partitions if part.bounds.upper is not None and part.bounds.upper <= found.now]
        if not undisturbed:
            yield Dropped(partitioned=found.partitioned, kept={partition.name: CONVERTED for partition in over})
            return
        yield Dropped(partitioned=found.partitioned)
        for partition in over:
            yield _drop(alias, partition.name)
        for name in left_behind(alias):
            yield _drop_detached(alias, name)


def drop_plan(*, using: str | None = None) -> list[str]:
    """Return the statements that ``drop`` would run if nothing changed. Arguments and errors as for ``drop``."""
    found = status(using=using)
    plan = []
    for standing in found.partitions:
        if not standing.kept:
            plan += removal(standing.name, standing.retired, standing.detaching)
    return plan + [f"DROP TABLE {name}" for name in found.left_behind]


class _Stays(Exception):
    """The partition can't be dropped now. The argument says why."""


def _drop(alias: str, name: str) -> Dropped:
    try:
        _retire(alias, name)
        _detach(alias, name)
    except _Stays as reason:
        return Dropped(kept={name: str(reason)})
    return _drop_detached(alias, name)


def _examined(alias: str, name: str) -> Partition:
    """Return the partition as it is now. Raises ``_Stays`` if it can't go."""
    found = read_layout(using=alias)
    partition = next((partition for partition in found.partitions if partition.name == name), None)
    if partition is None:
        raise _Stays(GONE)
    if not partition.retired:
        with connections[alias].cursor() as cursor:
            contents = contents_of(cursor, partition)
        if reason := why_it_stays(found, partition, contents) or why_all_stay(found.partitions):
            raise _Stays(reason)
    return partition


def _looked_at(alias: str, name: str) -> Partition:
    """Call ``_examined`` outside a transaction: the check may be a deadlock's victim, and is then repeated."""
    return patiently(partial(_examined, alias, name))


def removal(name: str, retired: bool, detaching: bool) -> list[str]:
    closing = [] if retired else ["BEGIN", *_retirement(name), "COMMIT"]
    return [*closing, detachment(name, begun=detaching), f"DROP TABLE {name}"]


def _retirement(name: str) -> list[str]:
    # This waits for transactions that have locked, changed or made a row in the partition, so no row can come to life
    # between the check and the end. Later transactions find the partition empty and closed.
    return [
        f"LOCK TABLE {name} IN ACCESS EXCLUSIVE MODE",
        f"TRUNCATE TABLE {name}",
        f"ALTER TABLE {name} ADD CONSTRAINT {RETIRED} CHECK (false)",
    ]


def _retire(alias: str, name: str) -> None:
    """Empty the partition and close it for good."""

    def retire() -> None:
        lock, *closing = _retirement(name)
        with short_transaction(alias, lock_timeout=LOCK_TIMEOUT) as cursor:
            keep_autovacuum_away(cursor, name)
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
    """Wait for the transactions that use the table, and detach the partition. No other session waits for this one."""
    begun = _looked_at(alias, name).detaching
    try:
        with connections[alias].cursor() as cursor:
            cursor.execute(detachment(name, begun=begun))
    except DatabaseError as error:
        _looked_at(alias, name)
        raise _Stays(str(error).strip()) from error


def _drop_detached(alias: str, name: str) -> Dropped:
    if name not in left_behind(alias):
        return Dropped()  # another session has dropped it

    def remove() -> None:
        with connections[alias].cursor() as cursor:
            cursor.execute(f"DROP TABLE IF EXISTS {name}")

    patiently(remove)
    return Dropped(dropped=(name,))
