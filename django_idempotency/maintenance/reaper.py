"""Free the keys whose owner is gone."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Unpack
from uuid import UUID

from django.db.models import DurationField, ExpressionWrapper, F, Max, Q

from django_idempotency import signals
from django_idempotency.conf import conf
from django_idempotency.engine import leases
from django_idempotency.engine.decisions import LEASE_LAPSED
from django_idempotency.engine.leases import BEATS_PER_LEASE
from django_idempotency.maintenance.advice import Standing, standing
from django_idempotency.maintenance.records import Records, kept_again, operation_of, records
from django_idempotency.maintenance.sweep import (
    Batch,
    Bounds,
    Oldest,
    Swept,
    batch_size,
    chosen,
    deadline,
    stepwise,
    sweep,
)
from django_idempotency.models import DatabaseNow, IdempotencyRecord, Status, check_move
from django_idempotency.policy import Mode
from django_idempotency.reporting.events import send
from django_idempotency.stores import Store, store_for
from django_idempotency.stores.database import ahead, try_to_write
from django_idempotency.values.outcomes import Snapshot

LONGEST_WATCH = 60.0
LOOK_EVERY = 1.0
_LAPSED = Q(mode="lease", locked_until__gt=F("locked_at"))
MOVED = ("scope", "key", "method", "path", "fingerprint", "status", "hold_on_crash")
ASK_EVERY = 0.1  # seconds between two looks at one record


@stepwise
def reap(*, older_than: float = 0, **bounds: Unpack[Bounds]) -> Iterator[Swept]:
    """Free the keys whose owner is gone: the lease ran out more than ``older_than`` seconds ago.

    A record becomes ``failed``, so that a retry runs again, or is put on hold, as the policy of its claim says. If the
    owner has the row locked, the record is passed over, however old it is: in atomic mode that lock is the proof of
    life. In lease mode the store may have been away, so lapsed leases are first watched for a third of their length, at
    most a minute.

    The other arguments are those of ``Bounds``; the defaults are ``SWEEP_BATCH`` and no pause. A dry run counts
    live owners, too.
    """
    rows = records(bounds.get("using")).stuck(older_than)
    batch_size(chosen(bounds.get("batch"), 1), rows.db)  # refuse it before the watch
    if bounds.get("dry_run"):
        for one, swept in sweep(Oldest(lambda: rows, "locked_until"), _move, bounds, batch=1):
            yield replace(swept, done={"failed": one.picked})
        return
    ends = deadline(bounds.get("max_seconds"))
    began = _watch(rows, ends)
    ownerless = Oldest(lambda: rows.filter(_is_ownerless(time.monotonic() - began)), "locked_until")
    for one, swept in sweep(ownerless, _move, bounds, batch=conf().sweep_batch, pause=0, ends=ends):
        for record in one.changed:
            send(signals.key_reaped, operation_of(record), on_hold=record.hold_on_crash, reason=LEASE_LAPSED)
        on_hold = sum(record.hold_on_crash for record in one.changed)
        yield replace(swept, done={"failed": len(one.changed) - on_hold, "on_hold": on_hold})


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


def _move(rows: Records) -> Batch:
    """Take records away from owners that are gone."""
    moved = list(rows.only(*MOVED))
    for record in moved:
        check_move(record.status, Status.FAILED)
    records(rows.db).filter(pk__in=[record.pk for record in moved]).update(
        # Keep it as long again as its policy said at the claim: a live record does not expire. These two come first,
        # because on MariaDB each assignment sees the new values of those before it.
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
    return Batch(changed=moved, picked=len(moved))


# --- Before an operator decides --------------------------------------------------------------------------------------


def have_it_watched(record: IdempotencyRecord, store: Store | None = None) -> None:
    """Watch whether the owner renews its lapsed lease. If it does not, a later attempt will not be refused."""
    store = store or store_of(record)
    if snapshot := store.read(record.pk):
        leases.suspect(snapshot, store)


def store_of(record: IdempotencyRecord) -> Store:
    """Return the store of a record that was read from a database."""
    return store_for(conf().policy.derive(using=record._state.db))


def watch(store: Store, id: UUID) -> None:
    """Wait until the owner has renewed its lapsed lease, or has had the time to; not at all if none lapsed."""
    record = seen = store.read(id)
    if record is None or record.mode != Mode.LEASE or standing(record) is not Standing.LAPSED:
        return
    leases.suspect(record, store)
    assert record.locked_at is not None  # by contract, both
    assert record.locked_until is not None
    lease = (record.locked_until - record.locked_at).total_seconds()
    ends = time.monotonic() + lease / leases.BEATS_PER_LEASE + 2 * leases.LONGEST_GAP
    while seen is not None and _is_undecided(seen, record) and time.monotonic() < ends:
        time.sleep(ASK_EVERY)
        seen = store.read(id)


def _is_undecided(seen: Snapshot, record: Snapshot) -> bool:
    """Whether the lease is still lapsed, and its owner has not been found to be gone yet."""
    return seen.token == record.token and standing(seen) is Standing.LAPSED and not seen.lease_expired
