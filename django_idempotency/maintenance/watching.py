"""Watch whether the owner of a lapsed lease renews it: the store may have been away."""

from __future__ import annotations

import time
from uuid import UUID

from django_idempotency.conf import conf
from django_idempotency.engine import leases
from django_idempotency.maintenance.advice import Standing, standing
from django_idempotency.models import IdempotencyRecord
from django_idempotency.policy import Mode
from django_idempotency.stores import Store, store_for
from django_idempotency.values.outcomes import Snapshot

LOOK_EVERY = 0.1  # seconds


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
        time.sleep(LOOK_EVERY)
        seen = store.read(id)


def _is_undecided(seen: Snapshot, record: Snapshot) -> bool:
    """Whether the lease is still lapsed, and its owner has not been found to be gone yet."""
    return seen.token == record.token and standing(seen) is Standing.LAPSED and not seen.lease_expired
