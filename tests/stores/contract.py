"""What the tests of stores in a database share: policies, operations, claims."""

from __future__ import annotations

import hashlib
from contextlib import contextmanager
from datetime import timedelta
from uuid import uuid4

import pytest
from django.db import connection, transaction
from django.db.models import F

from django_idempotency.models import IdempotencyRecord
from django_idempotency.stores import store_for
from django_idempotency.values.outcomes import Claimed, Operation, StoredResponse
from django_idempotency.values.policy import Atomic, Lease, Policy
from tests.support.threads import OtherThread

ATOMIC = Policy(mode=Atomic(takeover_grace=0))
LEASE = Policy(mode="lease")
HOLD = Policy(mode=Lease(on_crash="hold"))
MODES = pytest.mark.parametrize("policy", [ATOMIC, LEASE], ids=["atomic", "lease"])
LOCKS = pytest.mark.parametrize("lock", ["nowait", "skip_locked"], indirect=True)
RESPONSE = StoredResponse(
    201, (("Content-Type", "a/b"), ("X-Twice", "1"), ("X-Twice", "2")), b"\0\xff{}"
)


SCOPE = ""


def operation(key: str = "k", *, body: bytes = b"", scope: str = "") -> Operation:
    return Operation(
        scope or SCOPE, key, hashlib.sha256(body).digest(), "POST", "/charges/"
    )


def claimed(policy: Policy = ATOMIC, **asked) -> Claimed:
    claim = store_for(policy).claim(operation(**asked), uuid4())
    assert isinstance(claim, Claimed)
    return claim


def taken_over(
    claim: Claimed, policy: Policy = ATOMIC, by: Operation | None = None
) -> Claimed:
    with store_for(policy).try_lock(claim.id) as record:
        return store_for(policy).reassign(record, by or operation(), uuid4())


def lock_in(
    thread: OtherThread, claim: Claimed, policy: Policy = ATOMIC
) -> transaction.Atomic:
    """The other thread's business transaction, left open."""
    block = transaction.atomic()
    thread(block.__enter__)
    assert thread(store_for(policy).lock, claim)
    return block


def commit(thread: OtherThread, block: transaction.Atomic) -> None:
    thread(block.__exit__, None, None, None)


def shift(claim: Claimed, **by: timedelta) -> None:
    """Move the record's times."""
    record = IdempotencyRecord.objects.filter(pk=claim.id)
    now = record.get()
    record.update(**{name: getattr(now, name) + delta for name, delta in by.items()})


def lapse(claim: Claimed) -> None:
    """And expire: a lease that was watched, and not renewed, ends where it began."""
    shift(claim, locked_at=-timedelta(days=9))
    IdempotencyRecord.objects.filter(pk=claim.id).update(locked_until=F("locked_at"))


def expire(claim: Claimed) -> None:
    shift(claim, expires_at=-timedelta(days=9))


def hold(claim):
    with store_for(HOLD).try_lock(claim.id) as record:
        store_for(HOLD).hold(record, "who knows")


WRITES = {
    "take": taken_over,
    "hold": hold,
    "complete": lambda claim: store_for(ATOMIC).complete(claim, RESPONSE),
    "fail": lambda claim: store_for(ATOMIC).fail(claim, "broke"),
    "release": lambda claim: store_for(ATOMIC).release(claim),
    "renew": lambda claim: store_for(LEASE).renew([claim]),
    "count_replays": lambda claim: store_for(ATOMIC).count_replays({claim.id: 1}),
}


@contextmanager
def _kept_connection():
    connection.ensure_connection()
    before = connection.connection
    yield
    assert connection.connection is before


@contextmanager
def _connecting_with(setting):
    connection.close()
    with pytest.MonkeyPatch.context() as patch:
        options = connection.settings_dict["OPTIONS"] | {"options": f"-c {setting}"}
        patch.setitem(connection.settings_dict, "OPTIONS", options)
        connection.ensure_connection()
        yield patch.undo
    connection.close()
