"""Make partitions ahead of time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from typing import Any

from django.db import connections

from django_idempotency.contrib.partitions.catalog import postgresql, read_layout
from django_idempotency.contrib.partitions.layout import TABLE, Layout, covered_until, missing, stamp, why_short
from django_idempotency.contrib.partitions.locks import patiently, short_transaction, take_back_check
from django_idempotency.contrib.partitions.templates import creation, name_of, template
from django_idempotency.maintenance.sweep import stepwise

AHEAD = 7  # future days that `ensure` provides for
PATIENCE = "10s"  # for another ensure(), or another change of the table; no claim queues behind this wait


@dataclass(frozen=True, slots=True, kw_only=True)
class Ensured:
    """``created``: the partitions made. ``partitioned``: false if the table is plain, so that there is nothing to do.

    ``covered_until``: new records have a partition until then (ISO 8601); ``None``: for ever, or the table is plain.
    ``why_short``: why that is too soon although no more can be made; empty if it is not.
    """

    created: tuple[str, ...] = ()
    partitioned: bool = True
    covered_until: str | None = None
    why_short: str = ""

    def __add__(self, later: Ensured) -> Ensured:
        return replace(later, created=self.created + later.created)


@stepwise
def ensure(*, ahead: int = AHEAD, using: str | None = None) -> Iterator[Ensured]:
    """Make sure that there are partitions for now and for the ``ahead`` days to come.

    Two calls at once are harmless, and so is a call on a plain table.

    ``using``: the database's alias; default: the settings'. Raises ``PartitionsUnsupported`` on databases other than
    PostgreSQL.
    """
    alias = postgresql(using)
    if read_layout(using=alias).halfway:
        take_back_check(alias)
    while (ensured := patiently(partial(_fill_one, alias, ahead))).created:
        yield ensured
    yield ensured


def ensure_plan(*, ahead: int = AHEAD, using: str | None = None) -> list[str]:
    """Return the statements that ``ensure`` would run if nothing changed. Arguments and errors as for ``ensure``."""
    alias = postgresql(using)
    with connections[alias].cursor() as cursor:
        return list(chain(*_missing(cursor, read_layout(using=alias), ahead).values()))


def _fill_one(alias: str, ahead: int) -> Ensured:
    with short_transaction(alias, lock_timeout=PATIENCE) as cursor:
        if read_layout(using=alias).partitioned:
            # Another run of ensure() waits here. Claims don't: this lock conflicts with none of theirs.
            cursor.execute(f"LOCK TABLE ONLY {TABLE} IN SHARE UPDATE EXCLUSIVE MODE")
        made = dict(islice(_missing(cursor, read_layout(using=alias), ahead).items(), 1))
        for statement in chain(*made.values()):
            cursor.execute(statement)
        found = read_layout(using=alias)
    until = covered_until(found.partitions, found.now) if found.partitioned else None
    return Ensured(
        created=tuple(made),
        partitioned=found.partitioned,
        covered_until=stamp(until) if until else None,
        why_short="" if until is None or made else why_short(found.partitions, found.now, ahead),
    )


def _missing(cursor: Any, found: Layout, ahead: int) -> dict[str, list[str]]:
    """Return the statements that make each missing partition, or add what it lacks, by its name."""
    like = template(cursor, found.partitions)
    made = {
        partition.name: [f"ALTER TABLE {partition.name} ADD PRIMARY KEY (id)"]
        for partition in found.partitions
        if not partition.keyed and partition.lower is not None and partition.lower > found.now
    }
    for bounds in missing(found.partitions, found.now, ahead):
        name = _free_name(cursor, name_of(found.schema, bounds))
        made[name] = creation(found.schema, name, bounds, like)
    return made


def _free_name(cursor: Any, name: str) -> str:
    """Return ``name``, or ``name`` with a number if a table has it already, for example one that was detached."""
    for candidate in (name, *(f"{name}_{number}" for number in range(2, 100))):
        cursor.execute("SELECT to_regclass(%s) IS NULL", [candidate])
        if cursor.fetchone() == (True,):
            break
    return candidate
