"""The one loop behind every pass of maintenance: batches, each of which is a short
transaction of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, Protocol, TypedDict, TypeVar
from uuid import UUID

from django.db import DatabaseError, connections, transaction

from django_idempotency.conf import conf
from django_idempotency.maintenance.records import Records, is_sharded, lockable, locked
from django_idempotency.maintenance.stats import MOST, at_most
from django_idempotency.stores.connections import record_database
from django_idempotency.stores.errors import brief, is_conflict, sqlstate

T = TypeVar("T")

ATTEMPTS = 5
# The limit in seconds for one statement of maintenance on PostgreSQL, whatever the
# role's statement_timeout is.
LONGEST = 600
OTHER_PARAMETERS = 50
# Classes of SQLSTATE that say nothing of a row: a database that takes no writes, a
# right or a table that is missing, resources, an operator, a server in trouble.
OF_ANY_ROW = ("25", "42", "53", "57", "58")


class Bounds(TypedDict, total=False):
    """How a pass is bounded.

    - ``batch``: records per transaction; a pass that walks the table examines this
      many. Each pass has its own default.
    - ``pause``: seconds between two batches; default: ``SWEEP_PAUSE``.
    - ``max_seconds``: begin no further batch after that.
    - ``using``: the database's alias.
    - ``dry_run``: only count, and change nothing.
    - ``go_on``: called with the sum after each batch but the last; if it returns false,
      no further batch begins.

    A ``batch`` below 1 raises ``ValueError``.
    """

    batch: int
    pause: float
    max_seconds: float | None
    using: str | None
    dry_run: bool
    go_on: Callable[[Swept], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Swept:
    """The result of a pass.

    - ``done``: the number of records by what was done to them, such as ``{"deleted":
      3}``.
    - ``left``: the number of selected records that were left alone, by reason, such as
      ``{"live": 1}``.
    - ``bad``: the records that could not be written, by id, with the error.
    - ``seconds``: how long it took, pauses included.
    - ``lag``: for how many seconds the records that are left have been due, in a pass
      that takes the oldest first.
    - ``after``: the id of the last record that was examined, in a pass that walks the
      table.
    - ``cached_for``: for how many seconds a cache in front of the database may still
      replay what was erased.
    - ``finished``: nothing is left to examine.
    """

    done: Mapping[str, int] = field(default_factory=dict)
    left: Mapping[str, int] = field(default_factory=dict)
    bad: Mapping[str, str] = field(default_factory=dict)
    seconds: float = field(default=0.0, compare=False)
    lag: float = 0.0
    after: UUID | None = None
    cached_for: float = 0.0
    finished: bool = True

    @property
    def rows(self) -> int:
        """How many records were changed."""
        return sum(self.done.values())

    @property
    def complete(self) -> bool:
        """Whether nothing is left of what was to be done."""
        return self.finished and not (
            any(self.left.values()) or self.bad or self.cached_for
        )


def _sum(one: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    return {name: one.get(name, 0) + other.get(name, 0) for name in {**one, **other}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What became of one batch.

    ``changed``: what the change returned for each record. ``picked``: how many records
    were locked, whether changed or not. ``last``, ``now``: when the last of them was
    due, and the database's time. ``wanted``, ``others``: what was picked from a page.
    """

    changed: Sequence[Any] = ()
    picked: int = 0
    last: datetime | None = None
    now: datetime | None = None
    bad: Mapping[Any, str] = field(default_factory=dict)
    wanted: Collection[UUID] = ()
    others: Any = None
    after: UUID | None = None
    finished: bool = True

    @property
    def lag(self) -> float:
        """For how many seconds the records that are left have been due."""
        return (
            0.0
            if self.finished or not (self.last and self.now)
            else (self.now - self.last).total_seconds()
        )


Change = Callable[[Records], Batch]
"""Changes the records of a queryset, which locks them as it is read. Called in a
transaction.
"""


@dataclass(frozen=True, slots=True)
class Oldest:
    """Records that are due, the oldest first by the indexed column ``due``; a change
    takes them out of ``rows()``.
    """

    rows: Callable[[], Records]
    due: str

    def batches(self, change: Change | None, size: int) -> Iterator[Batch]:
        using = self.rows().db
        if change is None:
            with at_most(LONGEST, using):
                count = self.rows()[:MOST].count()
            yield Batch(changed=range(count), picked=count, finished=count < MOST)
            return
        passed: set[Any] = set()  # records that were tried, and stay
        last: datetime | None = None
        sharded = is_sharded(using)
        while True:
            left = self.rows().order_by(self.due)
            if passed:
                left = left.exclude(pk__in=passed)
            if last is not None:
                # Not from the beginning: until it is vacuumed, that part of the index
                # is full of dead entries.
                left = left.filter(**{f"{self.due}__gte": last})
            batch = (
                _by_shard(left, change, size, passed)
                if sharded
                else _changed(left, change, size)
            )
            passed.update(batch.bad)
            last = batch.last or last
            batch = replace(batch, finished=batch.picked < size)
            yield batch
            if batch.finished:
                return


def _by_shard(rows: Records, change: Change, size: int, passed: set[Any]) -> Batch:
    """Change a batch of a table in which no statement can lock rows of several
    shards.
    """
    ids = in_transaction(
        rows.db, lambda: list(rows.values_list("pk", flat=True)[:size])
    )
    batches = []
    for part in lockable(ids, rows.db):
        batches.append(_changed(rows.filter(pk__in=part), change))
        if batches[-1].picked < len(part):
            passed.update(part)
    return replace(_sum_of(batches), picked=len(ids))


@dataclass(frozen=True, slots=True)
class Pages:
    """The whole table, in the order of the ids.

    ``pick`` reads of each page the ids of the wanted records, and what else the pass
    has to know of it. ``rows``: all records, narrowed by the primary key as far as that
    is known. ``after``: the id at which an earlier run ended.
    """

    rows: Records
    pick: Callable[[Records], tuple[Collection[UUID], Any]]
    after: UUID | None = None

    def batches(self, change: Change | None, size: int) -> Iterator[Batch]:
        after = self.after
        while True:
            rows = self.rows.order_by("pk")
            rows = rows if after is None else rows.filter(pk__gt=after)
            with at_most(LONGEST, rows.db):
                last = next(
                    iter(rows.values_list("pk", flat=True)[size - 1 : size]), None
                )
            page = rows if last is None else rows.filter(pk__lte=last)
            with at_most(LONGEST, rows.db):
                wanted, others = self.pick(page)
            batches = []
            if change and wanted:
                batches = [
                    _changed(self.rows.filter(pk__in=part), change)
                    for part in lockable(wanted, rows.db)
                ]
            after = last or after
            yield replace(
                _sum_of(batches),
                wanted=wanted,
                others=others,
                after=after,
                finished=last is None,
            )
            if last is None:
                return


class Source(Protocol):
    def batches(self, change: Change | None, size: int) -> Iterator[Batch]:
        """Apply ``change`` to one batch after another; without it, only count."""


def sweep(
    source: Source,
    change: Change,
    bounds: Bounds,
    result: Callable[[Batch], Swept],
    *,
    batch: int,
    ends: Callable[[], bool] | None = None,
) -> Swept:
    """Apply ``change`` to all records of the ``source``, batch by batch, and return the
    sum of what was done.

    No record is changed that another transaction has locked. A record that can't be
    written is isolated, and the rest of its batch is changed without it.

    ``result``: returns what was done in a batch; the rest of ``Swept`` is the same for
    all passes. ``batch``: the default of the pass. ``ends``: the deadline, if it has
    begun before.
    """
    if unknown := bounds.keys() - Bounds.__annotations__.keys():
        raise TypeError(f"unexpected arguments: {', '.join(sorted(unknown))}")
    size = batch_size(bounds.get("batch", batch), record_database(bounds.get("using")))
    pause = bounds.get("pause", conf().sweep_pause)
    ends = ends or deadline(bounds.get("max_seconds"))
    go_on: Callable[[Swept], bool] = bounds.get("go_on", lambda _swept: True)
    swept, began = Swept(), time.monotonic()
    for one in source.batches(None if bounds.get("dry_run") else change, size):
        of_one = result(one)
        swept = Swept(
            done=_sum(swept.done, of_one.done),
            left=_sum(swept.left, of_one.left),
            bad={**swept.bad, **{str(id): error for id, error in one.bad.items()}},
            seconds=time.monotonic() - began,
            lag=one.lag,
            after=one.after,
            cached_for=max(swept.cached_for, of_one.cached_for),
            finished=one.finished,
        )
        if one.finished or ends() or not go_on(swept):
            break
        time.sleep(pause)
    return swept


def _sum_of(batches: list[Batch]) -> Batch:
    return Batch(
        changed=[item for batch in batches for item in batch.changed],
        picked=sum(batch.picked for batch in batches),
        last=max((batch.last for batch in batches if batch.last), default=None),
        now=max((batch.now for batch in batches if batch.now), default=None),
        bad={id: error for batch in batches for id, error in batch.bad.items()},
    )


def _changed(rows: Records, change: Change, size: int | None = None) -> Batch:
    """Change the first ``size`` of ``rows`` in one transaction; if that fails, each of
    them in one of its own.
    """
    try:
        return in_transaction(rows.db, lambda: change(locked(rows[:size])))
    except DatabaseError as error:
        _raise_unless_of_a_row(error, rows.db)
    ids = in_transaction(
        rows.db, lambda: list(locked(rows[:size]).values_list("pk", flat=True))
    )
    batches, bad = [], {}
    for id in ids:
        try:
            batches.append(
                in_transaction(
                    rows.db,
                    lambda id=id: change(locked(rows.filter(pk=id))),  # type: ignore[misc]
                )
            )
        except DatabaseError as error:
            _raise_unless_of_a_row(error, rows.db)
            bad[id] = brief(error)
    return replace(_sum_of(batches), picked=len(ids), bad=bad)


def _raise_unless_of_a_row(error: DatabaseError, using: str) -> None:
    """Raise ``error`` if it would happen to any row: a right is missing, or the
    connection is gone.
    """
    connection = connections[using]
    if is_conflict(error) or (sqlstate(error) or "").startswith(OF_ANY_ROW):
        raise error
    if connection.connection is None or not connection.is_usable():
        raise error


def in_transaction(using: str, batch: Callable[[], T]) -> T:
    """Run ``batch`` in a transaction of its own, and run it again after a conflict with
    another transaction.
    """
    attempt = 1
    while True:
        try:
            with transaction.atomic(using=using, durable=True):
                if connections[using].vendor == "postgresql":
                    with connections[using].cursor() as cursor:
                        cursor.execute(f"SET LOCAL statement_timeout = '{LONGEST}s'")
                return batch()
        except DatabaseError as error:
            if attempt == ATTEMPTS or not is_conflict(error):
                raise
            attempt += 1


def deadline(max_seconds: float | None) -> Callable[[], bool]:
    """Return a function that tells whether ``max_seconds`` have passed. With ``None``,
    they never have.
    """
    began = time.monotonic()
    return lambda: max_seconds is not None and time.monotonic() - began >= max_seconds


def batch_size(batch: int, using: str) -> int:
    """Return ``batch``, but at most as many ids as a statement of the database takes
    beside its other parameters.
    """
    if batch < 1:
        raise ValueError(f"batch is {batch}; it must be at least 1.")
    most = connections[using].features.max_query_params
    return batch if most is None else min(batch, most - OTHER_PARAMETERS)
