"""What keeps keys from staying stuck and the table small: reaping and cleaning up; and forgetting a caller.

Everything runs in batches, each a short transaction of its own. Killed at whatever point, a pass loses nothing; run
twice at once, it does nothing twice. Times are the database's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial, reduce
from operator import add
from typing import ParamSpec, TypeVar
from uuid import UUID

from django.db import DatabaseError, connections, transaction
from django.db.models import DateTimeField, DurationField, ExpressionWrapper, F, Q, QuerySet, TextField
from django.db.models.expressions import Combinable, RawSQL
from django.db.models.functions import Coalesce

from django_idempotency import signals, tallies
from django_idempotency.conf import conf
from django_idempotency.engine import CRASHED
from django_idempotency.models import LIVE, TERMINAL, DatabaseNow, IdempotencyRecord, Status, check_move
from django_idempotency.outcomes import Door, Operation
from django_idempotency.stores.database import ahead, alias, is_conflict, told

Records = QuerySet[IdempotencyRecord]
P = ParamSpec("P")
T = TypeVar("T")

TABLE = IdempotencyRecord._meta.db_table
ATTEMPTS = 5
PAGE = 10_000
OTHER_PARAMETERS = 50
LONG_AGO = datetime.min.replace(tzinfo=UTC)
MOVED = ("scope", "key", "method", "path", "fingerprint", "status", "hold_on_crash")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reaped:
    """What came of reaping.

    ``bad``: records that could not be written, by id, with the error. ``finished``: nothing was left to reap.
    """

    failed: int = 0
    held: int = 0
    bad: Mapping[str, str] = field(default_factory=dict)
    finished: bool = True

    def __add__(self, later: Reaped) -> Reaped:
        return Reaped(
            failed=self.failed + later.failed,
            held=self.held + later.held,
            bad={**self.bad, **later.bad},
            finished=later.finished,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Cleaned:
    """What came of cleaning up, with the ``seconds`` it took, pauses included.

    ``lag``: seconds for which what is left has been due. ``finished``: nothing was left.
    """

    rows: int = 0
    seconds: float = 0.0
    lag: float = 0.0
    finished: bool = True

    @property
    def rate(self) -> float:
        """Rows a second."""
        return self.rows / self.seconds if self.seconds else 0.0

    def __add__(self, later: Cleaned) -> Cleaned:
        return Cleaned(
            rows=self.rows + later.rows,
            seconds=self.seconds + later.seconds,
            lag=later.lag,
            finished=later.finished,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Forgotten:
    """What came of forgetting a scope.

    ``erased``: records that were deleted, or emptied. Left alone were ``live`` ones, which are started or processing,
    ``held`` ones, and ``busy`` ones, which somebody had locked just then. ``after``: the id of the last record looked
    at. ``finished``: the whole table was looked through.
    """

    erased: int = 0
    live: int = 0
    held: int = 0
    busy: int = 0
    after: UUID | None = None
    finished: bool = True

    @property
    def complete(self) -> bool:
        """Whether nothing is left of what was to be erased."""
        return self.finished and not (self.live or self.held or self.busy)

    def __add__(self, later: Forgotten) -> Forgotten:
        return Forgotten(
            erased=self.erased + later.erased,
            live=self.live + later.live,
            held=self.held + later.held,
            busy=self.busy + later.busy,
            after=later.after or self.after,
            finished=later.finished,
        )


def database(using: str | None = None) -> str:
    """The alias of the database to work on: ``using``, or where the project's policy keeps its records."""
    return using or alias(conf().policy)


def _whole(name: str, batches: Callable[P, Iterator[T]]) -> Callable[P, T]:
    """The function ``name``: all of ``batches``, and their sum."""

    def run(*args: P.args, **named: P.kwargs) -> T:
        return reduce(add, batches(*args, **named))

    run.__name__ = run.__qualname__ = name
    run.__doc__ = batches.__doc__
    return run


# --- Reaping ---------------------------------------------------------------------------------------------------------


def reaping(
    *,
    older_than: float = 0,
    batch: int | None = None,
    max_seconds: float | None = None,
    using: str | None = None,
) -> Iterator[Reaped]:
    """Free the keys whose holder is gone: the lease ran out more than ``older_than`` seconds ago.

    A record becomes ``failed``, which a retry runs again, or held, as the policy of its claim says. One whose holder
    has the row locked is passed over, however old: in atomic mode that lock is the proof of life.

    This does it batch by batch, as the iterator is asked for them; ``reap`` does all, and returns the sum.
    """
    rows = stuck(older_than=older_than, using=using)
    batch = _size(conf().reap_batch if batch is None else batch, rows.db)
    ends = _deadline(max_seconds)
    bad: set[str] = set()
    while True:
        reaped = _reap(rows.exclude(pk__in=bad), batch)
        bad.update(reaped.bad)
        yield reaped
        if reaped.finished or ends():
            return


reap = _whole("reap", reaping)


def stuck(*, older_than: float = 0, using: str | None = None) -> Records:
    """The records that ``reap`` looks at, those of live holders in atomic mode included."""
    return _records(using).filter(status__in=LIVE, locked_until__lt=ahead(-older_than)).order_by("locked_until")


def is_overdue(*, older_than: float, using: str | None = None) -> bool:
    """Whether there is something that ``reap`` would take; the records of live holders aside."""
    rows = stuck(older_than=older_than, using=using)
    return bool(in_transaction(rows.db, lambda: list(locked(rows).values_list("pk")[:1])))


def _reap(rows: Records, batch: int) -> Reaped:
    try:
        moved = _move(rows, batch)
    except DatabaseError:
        return _reap_singly(rows, batch)
    return _announced(moved, finished=len(moved) < batch)


def _reap_singly(rows: Records, batch: int) -> Reaped:
    """One of the batch is bad. Find out which, and reap the others."""
    ids = in_transaction(rows.db, lambda: list(locked(rows).values_list("pk", flat=True)[:batch]))
    moved: list[IdempotencyRecord] = []
    bad: dict[str, str] = {}
    for id in ids:
        try:
            moved += _move(rows.filter(pk=id), 1)
        except DatabaseError as error:
            _raise_unless_of_a_row(error, rows)
            bad[str(id)] = told(error)
    return _announced(moved, bad=bad, finished=len(ids) < batch)


def _move(rows: Records, batch: int) -> list[IdempotencyRecord]:
    """Take records from holders that are gone."""

    def move() -> list[IdempotencyRecord]:
        moved = list(locked(rows.only(*MOVED))[:batch])
        for record in moved:
            check_move(record.status, Status.FAILED)
        _records(rows.db).filter(pk__in=[record.pk for record in moved]).update(
            # As long again as its policy said when it was claimed: what was live does not expire. These two come
            # first, because on MariaDB each sees what those before it have set.
            expires_at=kept_again("expires_at"),
            purge_at=kept_again("purge_at"),
            status=Status.FAILED,
            held=F("hold_on_crash"),
            reason=CRASHED,
            token=None,
            locked_at=None,
            locked_until=None,
            updated_at=DatabaseNow(),
        )
        return moved

    return in_transaction(rows.db, move)


def kept_again(name: str) -> Combinable:
    """A time as far from now as it was from when it was set: at the claim, or at the end of a failed run."""
    kept_for = ExpressionWrapper(F(name) - Coalesce("locked_at", "updated_at"), output_field=DurationField())
    return ExpressionWrapper(DatabaseNow() + kept_for, output_field=DateTimeField())


def _announced(moved: list[IdempotencyRecord], *, finished: bool, bad: Mapping[str, str] | None = None) -> Reaped:
    for record in moved:
        signals.send(signals.reaped, operation_of(record), held=record.hold_on_crash, reason=CRASHED)
    held = sum(record.hold_on_crash for record in moved)
    return Reaped(failed=len(moved) - held, held=held, bad=bad or {}, finished=finished)


def operation_of(record: IdempotencyRecord) -> Operation:
    return Operation(
        scope=record.scope,
        key=record.key,
        fingerprint=bytes(record.fingerprint),
        method=record.method,
        path=record.path,
        door=Door.MAINTENANCE,
    )


def _raise_unless_of_a_row(error: DatabaseError, rows: Records) -> None:
    """Raise what would happen to any row: the connection is gone, or the whole database is locked."""
    connection = connections[rows.db]
    if is_conflict(error) or connection.connection is None or not connection.is_usable():
        raise error


# --- Cleaning up -----------------------------------------------------------------------------------------------------


def cleaning(
    *,
    batch: int | None = None,
    pause: float | None = None,
    max_seconds: float | None = None,
    using: str | None = None,
) -> Iterator[Cleaned]:
    """Delete the records past ``purge_at``, ``batch`` at a time with ``pause`` seconds between, oldest first.

    Nothing that is started, processing or held is touched; a record that somebody has locked is passed over. Tallies
    that are past their time go too. ``cleanup`` does all of it, and returns the sum.
    """
    tallies.forget(using=database(using))
    return _sweeping(purgeable(using=using), DELETE, batch, pause, max_seconds)


cleanup = _whole("cleanup", cleaning)


def dropping_bodies(
    *,
    batch: int | None = None,
    pause: float | None = None,
    max_seconds: float | None = None,
    using: str | None = None,
) -> Iterator[Cleaned]:
    """Drop the response bodies of records past ``expires_at`` that stay for audit; ``drop_bodies`` does all of it."""
    return _sweeping(with_needless_body(using=using), DROP_BODY, batch, pause, max_seconds)


drop_bodies = _whole("drop_bodies", dropping_bodies)


def purgeable(*, using: str | None = None) -> Records:
    """The records that ``cleanup`` deletes. Held ones wait for a person, however long that takes."""
    return _records(using).filter(status__in=TERMINAL, purge_at__lt=DatabaseNow(), held=False)


def with_needless_body(*, using: str | None = None) -> Records:
    """The records whose body ``drop_bodies`` drops."""
    kept_for_audit = Q(response_body__isnull=False, purge_at__gt=F("expires_at"))
    return _records(using).filter(kept_for_audit, expires_at__lt=DatabaseNow())


Change = Callable[[Records], object]


def _delete(rows: Records) -> object:
    return rows._raw_delete(rows.db)


def _drop_body(rows: Records) -> object:
    return rows.update(response_body=None, updated_at=DatabaseNow())


@dataclass(frozen=True, slots=True)
class Sweep:
    """What is done to records once the time ``due`` is past; and in PostgreSQL the same, to those ``picked``."""

    due: str
    change: Change
    statement: str


DELETE = Sweep("purge_at", _delete, f"DELETE FROM {TABLE} USING picked")
DROP_BODY = Sweep(
    "expires_at",
    _drop_body,
    f"UPDATE {TABLE} SET response_body = NULL, updated_at = statement_timestamp() FROM picked",
)

# In PostgreSQL a batch is one statement. It goes to each row by the place where it was locked, without a descent of the
# primary key; by the time of creation, which leads to the partition; and by the id, which alone says whose it is. A row
# that was changed after the statement began has left its place, and waits for another pass.
SWEEP = f"""
WITH picked (id, created_at, place, due) AS MATERIALIZED (
    {{picked}}
), swept AS (
    {{statement}}
    WHERE {TABLE}.id = picked.id AND {TABLE}.created_at = picked.created_at AND {TABLE}.ctid = picked.place
    RETURNING 1
)
SELECT count(*), max(due), statement_timestamp(), (SELECT count(*) FROM swept) FROM picked
"""
PLACE = RawSQL(f"{TABLE}.ctid", (), output_field=TextField())


@dataclass(frozen=True, slots=True)
class Swept:
    """How many records were ``picked``, the ``last`` of them due when, and how many of them were swept."""

    picked: int
    last: datetime
    now: datetime
    rows: int


def _sweeping(
    rows: Records, sweep: Sweep, batch: int | None, pause: float | None, max_seconds: float | None
) -> Iterator[Cleaned]:
    batch = _size(conf().cleanup_batch if batch is None else batch, rows.db)
    pause = conf().cleanup_pause if pause is None else pause
    ends = _deadline(max_seconds)
    sweep_once = _sweep_at_once if connections[rows.db].vendor == "postgresql" else _sweep
    left, began = rows, time.monotonic()
    while True:
        due = left.order_by(sweep.due)
        swept = in_transaction(rows.db, partial(sweep_once, due, sweep, batch))
        finished = swept.picked < batch
        began, before = time.monotonic(), began
        lag = 0.0 if finished else (swept.now - swept.last).total_seconds()
        yield Cleaned(rows=swept.rows, seconds=began - before, lag=lag, finished=finished)
        if finished or ends():
            return
        # Not from the beginning: until it is vacuumed, that part of the index is full of what is dead already.
        left = rows.filter(**{f"{sweep.due}__gte": swept.last})
        time.sleep(pause)


def _sweep(rows: Records, sweep: Sweep, batch: int) -> Swept:
    picked = list(locked(rows).values_list("pk", sweep.due, DatabaseNow())[:batch])
    sweep.change(_records(rows.db).filter(pk__in=[id for id, _due, _now in picked]))
    _id, last, now = picked[-1] if picked else (None, LONG_AGO, LONG_AGO)
    return Swept(len(picked), last, now, len(picked))


def _sweep_at_once(rows: Records, sweep: Sweep, batch: int) -> Swept:
    picked = locked(rows).values_list("pk", "created_at", PLACE, sweep.due)[:batch]
    sql, values = picked.query.get_compiler(rows.db).as_sql()
    with connections[rows.db].cursor() as cursor:
        cursor.execute(SWEEP.format(picked=sql, statement=sweep.statement), values)
        return Swept(*cursor.fetchone())


# --- Forgetting ------------------------------------------------------------------------------------------------------


def forgetting(
    scope: str,
    *,
    bodies: bool = False,
    held: bool = False,
    dry_run: bool = False,
    batch: int | None = None,
    pause: float | None = None,
    max_seconds: float | None = None,
    after: UUID | None = None,
    using: str | None = None,
) -> Iterator[Forgotten]:
    """Erase the records of a scope. A retry of a key that is forgotten runs again, as new.

    ``bodies``: erase the answers' headers and bodies and the paths instead, and keep the keys: a retry is told that its
    operation is done. ``held``: held records too. ``dry_run``: only count.

    No index knows the scope: the table is walked in the order of the ids, ``batch`` records of whatever scope at a
    time, from ``after`` on. What is started or processing is left alone, and counted. Keys that the scope makes
    meanwhile may be missed. ``forget`` does all of it, and returns the sum.
    """
    batch = _size(PAGE if batch is None else batch, database(using))
    pause = conf().cleanup_pause if pause is None else pause
    erase: Change = (lambda rows: None) if dry_run else _empty if bodies else _delete
    ends = _deadline(max_seconds)
    while True:
        page = _records(using).order_by("pk")
        page = page if after is None else page.filter(pk__gt=after)
        last = next(iter(page.values_list("pk", flat=True)[batch - 1 : batch]), None)
        mine = (page if last is None else page.filter(pk__lte=last)).filter(scope=scope)
        yield replace(_forget(mine, erase, held=held), after=last or after, finished=last is None)
        if last is None or ends():
            return
        after = last
        time.sleep(pause)


forget = _whole("forget", forgetting)


def _forget(mine: Records, erase: Change, *, held: bool) -> Forgotten:
    found = list(mine.values_list("pk", "status", "held"))
    if not found:
        return Forgotten()
    ended = mine.filter(status__in=TERMINAL) if held else mine.filter(status__in=TERMINAL, held=False)

    def run() -> set[UUID]:
        ids = list(locked(ended).values_list("pk", flat=True))
        erase(_records(mine.db).filter(pk__in=ids))
        return set(ids)

    erased = in_transaction(mine.db, run)
    left = [(status in LIVE, is_held) for id, status, is_held in found if id not in erased]
    live = sum(is_live for is_live, _held in left)
    waiting = 0 if held else sum(is_held for _live, is_held in left)
    return Forgotten(erased=len(erased), live=live, held=waiting, busy=len(left) - live - waiting)


def _empty(rows: Records) -> object:
    answered = rows.filter(response_status__isnull=False)
    answered.update(response_headers=[], response_body=None, updated_at=DatabaseNow())
    return rows.update(path="")  # where there is no answer, updated_at tells how long one will be kept


# --- What both need --------------------------------------------------------------------------------------------------


def _records(using: str | None) -> Records:
    return IdempotencyRecord.objects.using(database(using))


def in_transaction(using: str, batch: Callable[[], T]) -> T:
    """``batch`` in a transaction of its own, begun again where another one was in its way."""
    for _attempt in range(ATTEMPTS - 1):
        try:
            with transaction.atomic(using=using, durable=True):
                return batch()
        except DatabaseError as error:
            if not is_conflict(error):
                raise
    with transaction.atomic(using=using, durable=True):
        return batch()


def locked(rows: Records) -> Records:
    """``rows`` but for those that somebody has locked."""
    features = connections[rows.db].features
    if not features.has_select_for_update:
        # Takes the write lock of the whole database, before anything is read.
        _records(rows.db).filter(pk=UUID(int=0)).update(updated_at=F("updated_at"))
    return rows.select_for_update(
        skip_locked=features.has_select_for_update_skip_locked, no_key=features.has_select_for_no_key_update
    )


def _deadline(max_seconds: float | None) -> Callable[[], bool]:
    began = time.monotonic()
    return lambda: max_seconds is not None and time.monotonic() - began >= max_seconds


def _size(batch: int, using: str) -> int:
    """``batch``, or as many ids as the database takes in a statement beside its other parameters."""
    if batch < 1:
        raise ValueError(f"batch is {batch}; it must be at least 1.")
    most = connections[using].features.max_query_params
    return batch if most is None else min(batch, most - OTHER_PARAMETERS)
