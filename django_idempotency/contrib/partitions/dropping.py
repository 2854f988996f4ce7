"""Drop partitions whose records have all expired."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from django.db import DatabaseError, connections

from django_idempotency.contrib.partitions.catalog import left_behind, postgresql, read_layout
from django_idempotency.contrib.partitions.layout import RETIRED, detachment
from django_idempotency.contrib.partitions.locks import (
    LOCK_TIMEOUT,
    at_work,
    keep_autovacuum_away,
    patiently,
    short_transaction,
)
from django_idempotency.contrib.partitions.report import Standing, standing, status
from django_idempotency.maintenance.sweep import stepwise
from django_idempotency.stores.errors import is_conflict

GONE = "gone in the meantime"
IN_USE = "in use by a long transaction"
CONVERTED = "the table is being converted"


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


@stepwise
def drop(*, using: str | None = None) -> Iterator[Dropped]:
    """Drop the partitions in which no record is live, on hold or still to be kept: all responses are past ``purge_at``.

    If it is interrupted, the next call continues. Two calls at once are harmless, and so is a call on a plain table.

    ``using``: the database's alias; default: the settings'. Raises ``PartitionsUnsupported`` on databases other than
    PostgreSQL.
    """
    alias = postgresql(using)
    with at_work(alias, alone=False) as undisturbed:
        found = patiently(partial(read_layout, using=alias))
        over = [part.name for part in found.partitions if part.upper is not None and part.upper <= found.now]
        if not undisturbed:
            yield Dropped(partitioned=found.partitioned, kept=dict.fromkeys(over, CONVERTED))
            return
        yield Dropped(partitioned=found.partitioned)
        for name in over:
            yield _drop(alias, name)
        for name in left_behind(alias):
            yield _drop_detached(alias, name)


def drop_plan(*, using: str | None = None) -> list[str]:
    """Return the statements that ``drop`` would run if nothing changed. Arguments and errors as for ``drop``."""
    found = status(using=using)
    plan = [statement for each in found.partitions if not each.kept for statement in _removal(each)]
    return plan + [f"DROP TABLE {name}" for name in found.left_behind]


def _removal(partition: Standing) -> list[str]:
    closing = [] if partition.retired else ["BEGIN", *_retirement(partition.name), "COMMIT"]
    return [*closing, detachment(partition.name, begun=partition.detaching), f"DROP TABLE {partition.name}"]


def _drop(alias: str, name: str) -> Dropped:
    for step in (_retire, _detach):
        partition = _seen(alias, name)
        if why := GONE if partition is None else partition.kept or step(alias, partition):
            return Dropped(kept={name: why})
    return _drop_detached(alias, name)


def _seen(alias: str, name: str) -> Standing | None:
    # Outside a transaction: this may be a deadlock's victim, and is then repeated.
    return patiently(partial(standing, alias, name))


def _why_kept(partition: Standing | None) -> str:
    return GONE if partition is None else partition.kept


def _retirement(name: str) -> list[str]:
    # This waits for transactions that have locked, changed or made a row in the partition, so no row can come to life
    # between the check and the end. Later transactions find the partition empty and closed.
    return [
        f"LOCK TABLE {name} IN ACCESS EXCLUSIVE MODE",
        f"TRUNCATE TABLE {name}",
        f"ALTER TABLE {name} ADD CONSTRAINT {RETIRED} CHECK (false)",
    ]


def _retire(alias: str, partition: Standing) -> str:
    """Empty the partition and close it for good. Return why it has to stay; empty if it need not."""
    name = partition.name

    def retire() -> str:
        lock, *closing = _retirement(name)
        with short_transaction(alias, lock_timeout=LOCK_TIMEOUT) as cursor:
            keep_autovacuum_away(cursor, name)
            cursor.execute(lock)
            locked = standing(alias, name)
            if locked and not locked.kept and not locked.retired:
                for statement in closing:
                    cursor.execute(statement)
            return _why_kept(locked)

    if partition.retired:
        return ""
    try:
        return patiently(retire)
    except DatabaseError as error:
        if is_conflict(error):
            return IN_USE
        if why := _why_kept(_seen(alias, name)):
            return why
        raise


def _detach(alias: str, partition: Standing) -> str:
    """Wait for the transactions that use the table, and detach the partition. No other session waits for this one.

    Return why it has to stay; empty if it need not.
    """
    try:
        with connections[alias].cursor() as cursor:
            cursor.execute(detachment(partition.name, begun=partition.detaching))
    except DatabaseError as error:
        return _why_kept(_seen(alias, partition.name)) or str(error).strip()
    return ""


def _drop_detached(alias: str, name: str) -> Dropped:
    if name not in left_behind(alias):
        return Dropped()  # another session has dropped it

    def remove() -> None:
        with connections[alias].cursor() as cursor:
            cursor.execute(f"DROP TABLE IF EXISTS {name}")

    patiently(remove)
    return Dropped(dropped=(name,))
