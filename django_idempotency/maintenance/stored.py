"""What an operator can see and do in a store outside the database, through the store's contract alone.

Records in a database have ``interventions`` and commands of their own, which know more.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from uuid import UUID

from django.db.models import TextChoices
from django.utils.translation import gettext_lazy as _

from django_idempotency.engine import leases
from django_idempotency.maintenance.interventions import Refusal
from django_idempotency.models import LIVE
from django_idempotency.outcomes import Snapshot
from django_idempotency.policy import Mode
from django_idempotency.stores.base import Store

LOOK_EVERY = 0.1  # seconds


class Standing(TextChoices):
    """How a record stands, for an operator. The value is for programs, the label for people."""

    RUNNING = "running", _("running")
    LAPSED = "lapsed", _("lapsed")
    ON_HOLD = "on hold", _("on hold")
    RETRYABLE = "free to retry", _("free to retry")
    FAILED = "failed", _("failed")
    COMPLETED = "completed", _("completed")


def standing(record: Snapshot) -> Standing:
    """Return how ``record`` stands. Pure."""
    if record.status in LIVE:
        assert record.locked_until is not None  # by contract
        return Standing.LAPSED if record.locked_until < record.now else Standing.RUNNING
    if record.on_hold:
        return Standing.ON_HOLD
    if record.response_status is None:
        return Standing.RETRYABLE
    return Standing(record.status)


def count(store: Store) -> Counter[Standing]:
    """Return how many records of ``store`` have each standing. This reads all records."""
    return Counter(map(standing, store.records()))


def release(store: Store, id: UUID) -> Refusal | None:
    """Delete a record that has no response and whose owner is gone, so that its key is free.

    Return why nothing was done, or ``None`` if the record was deleted. A lease that has only lapsed is first watched
    for a third of its length and some seconds, because the store may have been away.
    """
    record = store.read(id)
    if record is not None and record.status in LIVE:
        record = watched(store, record)
    if record is None:
        return Refusal.ABSENT
    if record.status in LIVE and not record.lease_expired:
        return Refusal.LIVE
    if record.response is not None:
        return Refusal.HAS_RESPONSE
    return None if store.delete(record) else Refusal.CHANGED


def watched(store: Store, record: Snapshot) -> Snapshot | None:
    """Return the record once its owner has renewed its lapsed lease, or has had the time to; at once if none lapsed."""
    if record.mode != Mode.LEASE or standing(record) is Standing.RUNNING:
        return record
    leases.suspect(record, store)
    assert record.locked_at is not None  # by contract, both
    assert record.locked_until is not None
    lease = (record.locked_until - record.locked_at).total_seconds()
    ends = time.monotonic() + lease / leases.BEATS_PER_LEASE + 2 * leases.LONGEST_GAP
    seen: Snapshot | None = record
    while seen is not None and _is_undecided(seen, record) and time.monotonic() < ends:
        time.sleep(LOOK_EVERY)
        seen = store.read(record.id)
    return seen


def _is_undecided(seen: Snapshot, record: Snapshot) -> bool:
    """Whether the lease is still lapsed, and its owner has not been found to be gone yet."""
    return seen.token == record.token and standing(seen) is Standing.LAPSED and not seen.lease_expired


def erase(store: Store, scope: str) -> Iterator[bool]:
    """Delete the records of ``scope`` that have ended. For each record of the scope, yield whether it was deleted.

    A retry with an erased key runs again, as new. This reads all records.
    """
    for record in store.records():
        if record.scope == scope:
            yield record.status not in LIVE and not record.on_hold and store.delete(record)
