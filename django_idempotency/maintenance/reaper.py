"""Free the keys whose owner is gone."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from uuid import UUID

from django.db import DatabaseError, connections
from django.db.models import DurationField, ExpressionWrapper, F, Max, Q

from django_idempotency import signals
from django_idempotency.conf import conf
from django_idempotency.engine.decisions import LEASE_LAPSED
from django_idempotency.engine.leases import BEATS_PER_LEASE
from django_idempotency.maintenance.batches import batch_size, deadline, in_transaction, sum_of
from django_idempotency.maintenance.records import Records, kept_again, lockable, locked, operation_of, records
from django_idempotency.models import DatabaseNow, IdempotencyRecord, Status, check_move
from django_idempotency.policy import Mode
from django_idempotency.stores.database import ahead, try_to_write
from django_idempotency.stores.distribution import in_shards, is_distributed
from django_idempotency.stores.errors import is_conflict, told

LONGEST_WATCH = 60.0
LOOK_EVERY = 1.0
LOOKED_AT = 1000  # records of a distributed table that are looked at to tell whether any is overdue
_LAPSED = Q(mode=Mode.LEASE, locked_until__gt=F("locked_at"))
MOVED = ("scope", "key", "method", "path", "fingerprint", "status", "hold_on_crash")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reaped:
    """The result of reaping.

    ``bad``: the records that could not be written, by id, with the error. ``finished``: nothing was left to reap.
    """

    failed: int = 0
    on_hold: int = 0
    bad: Mapping[str, str] = field(default_factory=dict)
    finished: bool = True

    def __add__(self, later: Reaped) -> Reaped:
        return Reaped(
            failed=self.failed + later.failed,
            on_hold=self.on_hold + later.on_hold,
            bad={**self.bad, **later.bad},
            finished=later.finished,
        )


def reap(
    *,
    older_than: float = 0,
    batch: int | None = None,
    max_seconds: float | None = None,
    using: str | None = None,
) -> Reaped:
    """Free the keys whose owner is gone: the lease ran out more than ``older_than`` seconds ago.

    A record becomes ``failed``, so that a retry runs again, or is put on hold, as the policy of its claim says. If the
    owner has the row locked, the record is passed over, however old it is: in atomic mode that lock is the proof of
    life. In lease mode the store may have been away, so lapsed leases are first watched for a third of their length, at
    most a minute.

    ``batch``: records per transaction; default: ``REAP_BATCH``. ``max_seconds``: begin no further batch after that.
    ``using``: the database's alias. Raises ``ValueError`` if ``batch`` is less than 1.
    """
    return sum_of(reap_in_batches(older_than=older_than, batch=batch, max_seconds=max_seconds, using=using))


def reap_in_batches(
    *,
    older_than: float = 0,
    batch: int | None = None,
    max_seconds: float | None = None,
    using: str | None = None,
) -> Iterator[Reaped]:
    """Do the same as ``reap``, batch by batch, as the iterator is asked for them."""
    rows = records(using).stuck(older_than)
    batch = batch_size(conf().reap_batch if batch is None else batch, rows.db)
    ends = deadline(max_seconds)
    bad: set[str] = set()
    began = _watch(rows, ends)
    reap_some = partial(_reap_by_shard, passed=set()) if is_distributed(rows.db) else _reap
    while True:
        reaped = reap_some(rows.exclude(pk__in=bad).filter(_is_ownerless(time.monotonic() - began)), batch)
        bad.update(reaped.bad)
        yield reaped
        if reaped.finished or ends():
            return


def _watch(rows: Records, ends: Callable[[], bool]) -> float:
    """Watch lapsed leases until a live owner would have renewed them. Return since when, by the monotonic clock.

    If there is an outage meanwhile, the watch begins again at its end.
    """
    began = seen = time.monotonic()
    seconds = min(LONGEST_WATCH, _longest_lease(rows) / BEATS_PER_LEASE)
    while time.monotonic() - began < seconds and not ends():
        time.sleep(min(LOOK_EVERY, seconds))
        rows.exists()
        try_to_write(rows)  # if the database refuses writes, owners can't renew, and may be alive
        began = began if time.monotonic() - seen < 2 * LOOK_EVERY else time.monotonic()
        seen = time.monotonic()
    return began


def _longest_lease(rows: Records) -> float:
    lease = ExpressionWrapper(F("locked_until") - F("locked_at"), output_field=DurationField())
    longest: timedelta | None = rows.filter(_LAPSED).aggregate(longest=Max(lease))["longest"]
    return longest.total_seconds() if longest else 0.0


def _is_ownerless(seconds: float) -> Q:
    """Match records whose owner is gone.

    In atomic mode the row lock tells. In lease mode, the lease has expired, or it lapsed before it was watched for
    ``seconds``.
    """
    return ~_LAPSED | Q(locked_until__lt=ahead(-seconds))


def is_overdue(*, older_than: float, using: str | None = None) -> bool:
    """Whether there are records that ``reap`` would take. Records of live owners do not count."""
    rows = records(using).stuck(older_than)
    parts = lockable(rows, rows.values_list("pk", flat=True)[:LOOKED_AT])
    return any(in_transaction(rows.db, partial(_has_free, part)) for part in parts)


def _has_free(rows: Records) -> bool:
    return bool(locked(rows).values_list("pk")[:1])


def _reap_by_shard(rows: Records, batch: int, passed: set[UUID]) -> Reaped:
    """Reap in a table in which no statement can lock rows of several shards.

    ``passed``: collects the ids of records that were locked.
    """
    left = rows.exclude(pk__in=passed).values_list("pk", flat=True)
    ids = in_transaction(rows.db, lambda: list(left[:batch]))
    reaped = Reaped()
    for part in in_shards(ids, rows.db):
        one = _reap(rows.filter(pk__in=part), batch)
        passed.update(part if one.failed + one.on_hold < len(part) else ())
        reaped += one
    return replace(reaped, finished=len(ids) < batch)


def _reap(rows: Records, batch: int) -> Reaped:
    try:
        moved = _move(rows, batch)
    except DatabaseError:
        return _reap_singly(rows, batch)
    return _announced(moved, finished=len(moved) < batch)


def _reap_singly(rows: Records, batch: int) -> Reaped:
    """Find out which record of the batch is bad, and reap the others."""
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
    """Take records away from owners that are gone."""

    def move() -> list[IdempotencyRecord]:
        moved = list(locked(rows.only(*MOVED))[:batch])
        for record in moved:
            check_move(record.status, Status.FAILED)
        records(rows.db).filter(pk__in=[record.pk for record in moved]).update(
            # Keep it as long again as its policy said at the claim: a live record does not expire. These two come
            # first, because on MariaDB each assignment sees the new values of those before it.
            expires_at=kept_again("expires_at"),
            purge_at=kept_again("purge_at"),
            status=Status.FAILED,
            on_hold=F("hold_on_crash"),
            reason=LEASE_LAPSED,
            token=None,
            locked_at=None,
            locked_until=None,
            updated_at=DatabaseNow(),
        )
        return moved

    return in_transaction(rows.db, move)


def _announced(moved: list[IdempotencyRecord], *, finished: bool, bad: Mapping[str, str] | None = None) -> Reaped:
    for record in moved:
        signals.send(signals.key_reaped, operation_of(record), on_hold=record.hold_on_crash, reason=LEASE_LAPSED)
    on_hold = sum(record.hold_on_crash for record in moved)
    return Reaped(failed=len(moved) - on_hold, on_hold=on_hold, bad=bad or {}, finished=finished)


def _raise_unless_of_a_row(error: DatabaseError, rows: Records) -> None:
    """Raise ``error`` if it would happen to any row: the connection is gone, or the whole database is locked."""
    connection = connections[rows.db]
    if is_conflict(error) or connection.connection is None or not connection.is_usable():
        raise error
