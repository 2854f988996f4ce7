"""Free the keys whose owner is gone."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Literal, Unpack
from uuid import UUID, uuid4

from django.db.models import DurationField, ExpressionWrapper, F, Max, Q

from django_idempotency import signals
from django_idempotency.conf import conf
from django_idempotency.engine import leases
from django_idempotency.engine.decisions import LEASE_LAPSED
from django_idempotency.engine.leases import BEATS_PER_LEASE
from django_idempotency.maintenance.records import (
    Records,
    ended,
    operation_of,
    record_of,
    records,
)
from django_idempotency.maintenance.sweep import (
    Batch,
    Bounds,
    Change,
    Oldest,
    Source,
    Swept,
    batch_size,
    deadline,
    sweep,
)
from django_idempotency.models import IdempotencyRecord, Status, check_move
from django_idempotency.reporting.events import send
from django_idempotency.stores import Store, store_for
from django_idempotency.stores.base import Unlocked
from django_idempotency.stores.database import ahead, try_to_write
from django_idempotency.values.exceptions import StoreConflict
from django_idempotency.values.outcomes import Operation, Snapshot
from django_idempotency.values.policy import Lease

LONGEST_WATCH = 60.0
LOOK_EVERY = 1.0
_LAPSED = Q(mode="lease", locked_until__gt=F("locked_at"))
MOVED = ("scope", "key", "method", "path", "fingerprint", "status", "hold_on_crash")
ASK_EVERY = 0.1  # seconds between two reads of one record


def reap(
    *, older_than: float = 0, store: Store | None = None, **bounds: Unpack[Bounds]
) -> Swept:
    """Free the keys whose owner is gone: the lease ran out more than ``older_than``
    seconds ago.

    A record becomes ``failed``, so that a retry runs again, or is put on hold, as the
    policy of its claim says. If the owner has the row locked, the record is passed
    over, however old it is: in atomic mode that lock is the proof of life. In lease
    mode the store may have been unavailable, so lapsed leases are first watched for
    a third of their length, at most a minute.

    The other arguments are those of ``Bounds``; the defaults are ``SWEEP_BATCH`` and no
    pause. A dry run counts live owners, too. ``store``: a store outside the databases,
    whose keys are freed instead.
    """
    bounds.setdefault("pause", 0)
    size, ends = conf().sweep_batch, deadline(bounds.get("max_seconds"))
    rows = records(bounds.get("using")).stuck(older_than)
    stuck: Source = (
        Oldest(lambda: rows, "locked_until")
        if store is None
        else LapsedIn(store, older_than, ends)
    )
    if bounds.get("dry_run"):
        return sweep(stuck, _move, bounds, _counted, batch=size)
    if store is None:
        batch_size(bounds.get("batch", 1), rows.db)  # refuse it before the watch
        began = _watch(rows, ends)
        stuck = Oldest(
            lambda: rows.filter(_is_ownerless(time.monotonic() - began)), "locked_until"
        )
    return sweep(stuck, _move, bounds, _reaped, batch=size, ends=ends)


def _counted(batch: Batch) -> Swept:
    return Swept(done={"failed": batch.picked})


def _reaped(batch: Batch) -> Swept:
    for record in batch.changed:
        send(
            signals.key_reaped,
            operation_of(record),
            on_hold=record.hold_on_crash,
            reason=LEASE_LAPSED,
        )
    on_hold = sum(record.hold_on_crash for record in batch.changed)
    return Swept(done={"failed": len(batch.changed) - on_hold, "on_hold": on_hold})


def _watch(rows: Records, ends: Callable[[], bool]) -> float:
    """Watch lapsed leases until a live owner would have renewed them. Return since
    when, by the monotonic clock.

    If there is an outage meanwhile, the watch begins again at its end.
    """
    seconds = left = min(LONGEST_WATCH, _longest_lease(rows) / BEATS_PER_LEASE)
    # after the query: it may take longer than the watch, and proves nothing
    began = seen = time.monotonic()
    while left > 0 and not ends():
        time.sleep(min(LOOK_EVERY, seconds))
        rows.exists()
        # if the database refuses writes, owners can't renew, and may be alive
        try_to_write(rows)
        now = time.monotonic()
        began = began if now - seen < 2 * LOOK_EVERY else now
        seen, left = now, began + seconds - now
    return began


def _longest_lease(rows: Records) -> float:
    lease = ExpressionWrapper(
        F("locked_until") - F("locked_at"), output_field=DurationField()
    )
    longest: timedelta | None = rows.filter(_LAPSED).aggregate(longest=Max(lease))[
        "longest"
    ]
    return longest.total_seconds() if longest else 0.0


def _is_ownerless(seconds: float) -> Q:
    """Match records whose owner is gone.

    In atomic mode the row lock tells. In lease mode, the lease has expired, or it
    lapsed before leases were watched for ``seconds``, and its owner would have renewed
    it by now.
    """
    watched = Q(locked_until__lt=ahead(-seconds))
    if seconds < LONGEST_WATCH:
        watched &= Q(
            locked_until__lte=F("locked_at")
            + timedelta(seconds=seconds * BEATS_PER_LEASE)
        )
    return ~_LAPSED | watched


def _move(rows: Records) -> Batch:
    """Take records away from owners that are gone."""
    moved = list(rows.only(*MOVED))
    for record in moved:
        check_move(record.status, Status.FAILED)
    free = ended(Status.FAILED) | {
        "on_hold": F("hold_on_crash"),
        "reason": LEASE_LAPSED,
    }
    records(rows.db).filter(pk__in=[record.pk for record in moved]).update(**free)
    return Batch(changed=moved, picked=len(moved))


# --- In a store outside the databases -------------------------------------------------


@dataclass(frozen=True, slots=True)
class LapsedIn:
    """The records of a store whose lease lapsed more than ``older_than`` seconds ago. A
    batch is watched together until ``ends``, and freed one by one.
    """

    store: Store
    older_than: float
    ends: Callable[[], bool]

    def batches(self, change: Change | None, size: int) -> Iterator[Batch]:
        over = timedelta(seconds=self.older_than)
        found = [
            record
            for record in self.store.unfinished()
            if record.locked_until is not None
            and record.locked_until < record.now - over
        ]
        if change is None:
            yield Batch(picked=len(found))
            return
        size = min(size, leases.MOST_SUSPECTS)
        for first in range(0, max(1, len(found)), size):
            some = found[first : first + size]
            self._watch(some)
            freed = [each for each in map(self._free, some) if each is not None]
            left = first + size < len(found)
            yield Batch(changed=freed, picked=len(some), finished=not left)

    def _watch(self, lapsed: list[Snapshot]) -> None:
        waits = [have_it_watched(record_of(each), self.store) for each in lapsed]
        ends = time.monotonic() + max(waits, default=0)
        while lapsed and time.monotonic() < ends and not self.ends():
            time.sleep(min(LOOK_EVERY, max(waits) / BEATS_PER_LEASE))
            lapsed = [each for each in lapsed if _lapsed(each.id, self.store)]

    def _free(self, lapsed: Snapshot) -> Any:
        """Return the record as it was; ``None`` if its owner is alive, or if somebody
        else was faster.

        It belongs to this process for a moment, as for an operator's decision.
        """
        crash: Literal["hold", "retry"] = "hold" if lapsed.hold_on_crash else "retry"
        mode = Lease(seconds=self.store.policy.mode.seconds, on_crash=crash)
        store = replace(self.store, policy=self.store.policy.derive(mode=mode))
        with suppress(StoreConflict), store.try_lock(lapsed.id) as seen:
            if isinstance(seen, Unlocked) or not (seen.token and seen.lease_expired):
                return None
            if seen.hold_on_crash:
                store.hold(seen, LEASE_LAPSED)
            else:
                operation = Operation(seen.scope, seen.key, seen.fingerprint)
                store.fail(store.reassign(seen, operation, uuid4()), LEASE_LAPSED)
            return record_of(seen)
        return None


# --- Before an operator decides -------------------------------------------------------


def have_it_watched(record: IdempotencyRecord, store: Store | None = None) -> float:
    """Watch whether the owner renews its lapsed lease. If it does not, a later attempt
    will not be refused.

    Return for how many seconds it may still do so. ``store``: if the record is outside
    the databases.
    """
    store = store or _store_of(record)
    lapsed = _lapsed(record.pk, store)
    if lapsed is None:
        return 0.0
    leases.suspect(lapsed, store)
    assert lapsed.locked_at is not None  # by contract, both
    assert lapsed.locked_until is not None
    lease = (lapsed.locked_until - lapsed.locked_at).total_seconds()
    return lease / BEATS_PER_LEASE + 2 * leases.LONGEST_GAP


def watch(record: IdempotencyRecord, store: Store | None = None) -> None:
    """Wait until the owner has renewed its lapsed lease, or has had the time to; not at
    all if none lapsed.
    """
    store = store or _store_of(record)
    ends = time.monotonic() + have_it_watched(record, store)
    while time.monotonic() < ends and _lapsed(record.pk, store):
        time.sleep(ASK_EVERY)


def _store_of(record: IdempotencyRecord) -> Store:
    return store_for(conf().policy.derive(using=record._state.db))


def _lapsed(id: UUID, store: Store) -> Snapshot | None:
    """Return the record if its lease has lapsed, and its owner has not been found to be
    gone.
    """
    record = store.read(id)
    if (
        record is None
        or record.locked_until is None
        or record.mode != Lease.word
        or record.lease_expired
    ):
        return None
    return record if record.locked_until < record.now else None
