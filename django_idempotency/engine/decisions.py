"""Decide what a record means for a request. Pure: no store, no clock."""

from __future__ import annotations

from django.utils.translation import gettext_noop

from django_idempotency.models import LIVE, TERMINAL, Status
from django_idempotency.values.outcomes import (
    Available,
    InFlight,
    Mismatch,
    OnHold,
    Replay,
    Snapshot,
)
from django_idempotency.values.policy import Atomic

LEASE_LAPSED = gettext_noop("its lease ran out while it was running")
# It is unknown how long an owner in atomic mode will take, and a dead one has no lease
# to wait for.
ASK_AGAIN = InFlight(retry_after=1)
LONGEST_RETRY_AFTER = 30


def decide(
    record: Snapshot, fingerprint: bytes | None, *, grace: float = 0, lease: float = 0
) -> Replay | InFlight | Mismatch | OnHold | Available:
    """Return what a record means for a request with ``fingerprint``, at its ``now``.
    Pure.

    Without a fingerprint, or if the record's is emptied, nothing can be compared. Then
    only the status of a response is replayed.

    In atomic mode, a record that is processing is ``Available`` to the caller that gets
    its row lock, once ``takeover_grace`` seconds have passed since it was claimed: the
    lock is the proof of life. In lease mode, it is in flight until its lease has
    expired, which means that the lease has lapsed and that a process has watched the
    owner not renew it. ``lease``: its length in seconds, which limits ``retry_after``.
    """
    if has_expired(record):
        return Available()
    comparable = bool(record.fingerprint) and fingerprint is not None
    if comparable and record.fingerprint != fingerprint:
        return Mismatch(running=record.status in LIVE)
    if (response := record.response) is not None:
        return Replay(response if comparable else response.without_content())
    if record.on_hold:
        return OnHold(record.reason)
    if record.status == Status.FAILED:
        return Available()
    assert record.locked_at is not None  # by constraint
    elapsed = (record.now - record.locked_at).total_seconds()
    if record.mode == Atomic.word:
        return Available(after=max(0.0, grace - elapsed))
    if not record.lease_expired:
        return InFlight(_retry_after(elapsed, lease))
    return OnHold(LEASE_LAPSED) if record.hold_on_crash else Available()


def has_expired(record: Snapshot) -> bool:
    return (
        record.status in TERMINAL
        and record.expires_at <= record.now
        and not record.on_hold
    )


def _retry_after(elapsed: float, lease: float) -> int:
    """Return half of the seconds that the operation has taken: a client that obeys is
    late by a third at most.

    It is unknown how long it will take. The rest of the lease does not tell, because a
    live owner renews it.
    """
    return max(1, int(min(elapsed / 2, lease / 6, LONGEST_RETRY_AFTER)))


def lapsed_just_now(record: Snapshot, decision: object) -> bool:
    """Return whether the record has to be put on hold, but has not been yet."""
    return isinstance(decision, OnHold) and record.status in LIVE
