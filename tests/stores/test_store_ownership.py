"""Locks, takeovers and leases, as every store has them."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from uuid import uuid4

import pytest
from django.db import (
    connection,
    transaction,
)

from django_idempotency.exceptions import (
    IllegalMove,
    StoreConflict,
)
from django_idempotency.models import IdempotencyRecord
from django_idempotency.outcomes import (
    Claimed,
)
from django_idempotency.policy import Policy
from django_idempotency.stores.base import Store, Unlocked
from django_idempotency.stores.database import DatabaseStore
from tests.stores.contract import (
    ATOMIC,
    HOLD,
    LEASE,
    LOCKS,
    RESPONSE,
    claimed,
    commit,
    expire,
    hold,
    lock_in,
    operation,
)
from tests.support.threads import wait_little_for_locks

pytestmark = pytest.mark.usefixtures("transactional_db")


BUSY = (Unlocked.BUSY, None)


def portable(policy: Policy) -> Store:
    return DatabaseStore(policy, "default")


def contended(store: Store, claim: Claimed, policy: Policy):
    """What contending finds; ``None`` for a conflict."""
    with suppress(StoreConflict), store(policy).try_lock(claim.id) as found:
        return found


@pytest.mark.parametrize(
    "write",
    [
        lambda store, lost: store(ATOMIC).complete(lost, RESPONSE),
        lambda store, lost: store(ATOMIC).fail(lost, "late"),
        lambda store, lost: store(ATOMIC).release(lost),
        lambda store, lost: store(LEASE).renew([lost]),
    ],
    ids=["complete", "fail", "release", "renew"],
)
@pytest.mark.parametrize("became", ["taken", "completed", "absent"])
def test_a_lost_claim_can_write_nothing(store, write, became):
    lost = claimed(store)
    with store(ATOMIC).try_lock(lost.id) as record:
        owner = store(ATOMIC).reassign(record, operation(), uuid4())
    if became == "completed":
        store(ATOMIC).complete(owner, RESPONSE)
    elif became == "absent":
        store(ATOMIC).release(owner)
    before = list(IdempotencyRecord.objects.values())
    assert not write(store, lost)
    assert list(IdempotencyRecord.objects.values()) == before


def test_only_the_owner_gets_the_row_lock(store):
    lost = claimed(store)
    with store(ATOMIC).try_lock(lost.id) as record:
        owner = store(ATOMIC).reassign(record, operation(), uuid4())
    with transaction.atomic():
        assert not store(ATOMIC).lock(lost)
        assert store(ATOMIC).lock(owner)


def test_an_owner_finds_its_record_though_it_was_written_to_meanwhile(store):
    """PostgreSQL has put it elsewhere then."""
    owner = claimed(store)
    IdempotencyRecord.objects.update(replays=1)
    with transaction.atomic():
        assert store(ATOMIC).lock(owner)
        IdempotencyRecord.objects.update(replays=2)
        assert store(ATOMIC).complete(owner, RESPONSE)
    assert store(ATOMIC).read(owner.id).response == RESPONSE


@pytest.mark.usefixtures("impatient")
@LOCKS
def test_contending_for_a_locked_record_finds_it_busy(store, other_thread, lock):
    claim = claimed(store)
    block = lock_in(other_thread, store, claim)
    assert contended(store, claim, Policy(lock=lock)) in BUSY
    commit(other_thread, block)


@LOCKS
def test_contending_for_no_record_finds_none(store, lock):
    with store(Policy(lock=lock)).try_lock(operation().id) as found:
        assert found is Unlocked.ABSENT


@pytest.mark.row_locks
def test_skip_locked_tells_a_locked_record_from_none(store, other_thread):
    claim, policy = claimed(store), Policy(lock="skip_locked")
    block = lock_in(other_thread, store, claim)
    with store(policy).try_lock(claim.id) as found:
        assert found is Unlocked.BUSY
    other_thread(store(policy).release, claim)
    commit(other_thread, block)
    with store(policy).try_lock(claim.id) as found:
        assert found is Unlocked.ABSENT


@LOCKS
def test_contending_for_a_free_record_locks_it(store, other_thread, lock):
    claim, policy = claimed(store), Policy(lock=lock)
    with store(policy).try_lock(claim.id) as record:
        assert record.token == claim.token
        other_thread(wait_little_for_locks)
        assert other_thread(contended, store, claim, policy) in BUSY
    assert other_thread(contended, store, claim, policy).token == claim.token


def test_taking_a_record_gives_it_a_new_token_and_one_more_attempt(store):
    dead = claimed(store)
    with store(ATOMIC).try_lock(dead.id) as record:
        taken = store(ATOMIC).reassign(record, operation(), uuid4())
    assert taken.taken_over
    record = store(ATOMIC).read(dead.id)
    assert (record.token, record.attempts, taken.attempt) == (taken.token, 2, 2)
    assert record.locked_at < record.now < record.locked_until


def test_taking_a_dead_owners_record_counts_on_however_old_it_is(store):
    dead = claimed(store)
    expire(dead)
    with store(ATOMIC).try_lock(dead.id) as record:
        taken = store(ATOMIC).reassign(record, operation(), uuid4())
    assert (taken.attempt, taken.taken_over) == (2, True)


def test_a_taken_record_is_not_on_hold_and_has_no_reason(store):
    failed = claimed(store)
    store(HOLD).fail(failed, "broke", on_hold=True)
    take(store, failed)
    record = store(ATOMIC).read(failed.id)
    assert (record.status, record.on_hold, record.reason) == ("processing", False, "")


def test_a_record_that_expires_now_can_be_taken_afresh(store):
    done = claimed(store)
    store(ATOMIC).complete(done, RESPONSE)
    with store(ATOMIC).try_lock(done.id) as record:
        taken = store(ATOMIC).reassign(replace(record, expires_at=record.now), operation(), uuid4())
    assert taken.attempt == 1


@pytest.mark.postgresql
@LOCKS
def test_who_only_refers_to_a_record_is_not_taken_for_its_owner(store, other_thread, lock):
    """As the check of a foreign key does."""
    claim, policy = claimed(store), Policy(lock=lock)
    block = transaction.atomic()
    other_thread(block.__enter__)
    other_thread(lambda: connection.cursor().execute("SELECT 1 FROM django_idempotency_record FOR KEY SHARE"))
    with store(policy).try_lock(claim.id) as found:
        assert found.token == claim.token
    commit(other_thread, block)


def take(store, claim):
    with store(ATOMIC).try_lock(claim.id) as record:
        store(ATOMIC).reassign(record, operation(), uuid4())


@pytest.mark.parametrize(
    "write",
    [
        take,
        hold,
        lambda store, claim: store(ATOMIC).complete(claim, RESPONSE),
        lambda store, claim: store(ATOMIC).fail(claim, "broke"),
        lambda store, claim: store(ATOMIC).release(claim),
        lambda store, claim: store(LEASE).renew([claim]),
        lambda store, claim: store(ATOMIC).count_replays({claim.id: 1}),
    ],
    ids=["take", "hold", "complete", "fail", "release", "renew", "count_replays"],
)
def test_a_write_changes_no_other_record(store, write):
    claim, others = claimed(store), [claimed(store, key="other"), claimed(store, scope="other")]
    before = list(
        IdempotencyRecord.objects.filter(pk__in=[other_thread.id for other_thread in others]).order_by("pk").values()
    )
    mine = IdempotencyRecord.objects.filter(pk=claim.id).values().get()
    write(store, claim)
    assert list(IdempotencyRecord.objects.exclude(pk=claim.id).order_by("pk").values()) == before
    assert IdempotencyRecord.objects.filter(pk=claim.id).values().first() != mine


def test_taking_an_expired_record_starts_it_afresh(store):
    done = claimed(store)
    store(ATOMIC).complete(done, RESPONSE)
    store(ATOMIC).count_replays({done.id: 5})
    expire(done)
    with store(LEASE).try_lock(done.id) as record:
        other_thread = replace(operation(body=b"other"), method="PUT", path="/other/")
        taken = store(LEASE).reassign(record, other_thread, uuid4())
    assert (taken.attempt, taken.taken_over) == (1, False)
    record = IdempotencyRecord.objects.get()
    assert (record.method, record.path) == ("PUT", "/other/")
    assert (record.mode, record.response_status, record.response_body, record.replays) == ("lease", None, None, 0)
    assert bytes(record.fingerprint) == taken.operation.fingerprint
    assert record.created_at == record.updated_at


def test_a_completed_record_can_not_be_taken(store):
    done = claimed(store)
    store(ATOMIC).complete(done, RESPONSE)
    with pytest.raises(IllegalMove), store(ATOMIC).try_lock(done.id) as record:
        store(ATOMIC).reassign(record, operation(), uuid4())
    assert store(ATOMIC).read(done.id).response == RESPONSE


def test_a_completed_record_can_not_be_put_on_hold(store):
    done = claimed(store)
    store(ATOMIC).complete(done, RESPONSE)
    with pytest.raises(IllegalMove), store(HOLD).try_lock(done.id) as record:
        store(HOLD).hold(record, "too late")
    assert store(ATOMIC).read(done.id).response == RESPONSE


def test_in_atomic_mode_no_crash_waits_for_an_operator(store):
    policy = Policy(on_crash="hold")
    assert not store(policy).read(claimed(store, policy).id).hold_on_crash


def test_holding_sets_a_record_aside_with_its_reason(store):
    dead = claimed(store, HOLD)
    with store(HOLD).try_lock(dead.id) as record:
        store(HOLD).hold(record, "who knows")
    record = store(HOLD).read(dead.id)
    assert (record.status, record.on_hold, record.reason, record.token) == ("failed", True, "who knows", None)
    assert not store(HOLD).complete(dead, RESPONSE)


def test_renewing_extends_the_leases_that_are_still_held(store):
    mine, lost = claimed(store, LEASE), claimed(store, LEASE, key="other")
    store(LEASE).release(lost)
    before = store(LEASE).read(mine.id).locked_until
    assert store(Policy(mode="lease", lease=600)).renew([mine, lost]) == {mine.token}
    assert store(LEASE).read(mine.id).locked_until - before >= timedelta(seconds=600 - LEASE.lease)


@pytest.mark.postgresql
def test_whoever_does_not_get_the_row_lock_has_lost_its_claim(store, other_thread):
    claim = claimed(store)
    block = lock_in(other_thread, store, claim)
    with transaction.atomic():
        connection.cursor().execute("SET LOCAL lock_timeout = '20ms'")
        assert store(ATOMIC).lock(claim) is None
        transaction.set_rollback(True)
    commit(other_thread, block)


@pytest.mark.postgresql
@LOCKS
@pytest.mark.parametrize(
    "lacking",
    ["has_select_for_update_nowait", "has_select_for_update_skip_locked", "has_select_for_no_key_update"],
)
def test_a_free_record_is_locked_without_some_lock_kinds(lock, lacking, monkeypatch):
    claim, policy = claimed(portable), Policy(lock=lock)
    monkeypatch.setattr(connection.features, lacking, False)
    with portable(policy).try_lock(claim.id) as record:
        assert record.token == claim.token
