"""What a store in a database, and the engine on it, do beyond the contract of all
stores: columns, locks, waits.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from uuid import uuid4

import pytest
from django.db import transaction

from django_idempotency import engine
from django_idempotency.models import IdempotencyRecord
from django_idempotency.stores import store_for
from django_idempotency.stores.base import Unlocked
from django_idempotency.stores.claim_function import KEY_LOCKS
from django_idempotency.stores.database import DatabaseStore
from django_idempotency.values.exceptions import (
    DigestCollision,
    IllegalMove,
    StoreConflict,
    StoreUnavailable,
)
from django_idempotency.values.outcomes import Claimed, InFlight, Replay
from django_idempotency.values.policy import Atomic, Policy
from tests.stores.contract import (
    ATOMIC,
    HOLD,
    LEASE,
    LOCKS,
    MODES,
    RESPONSE,
    WRITES,
    _connecting_with,
    _kept_connection,
    claimed,
    commit,
    expire,
    lapse,
    lock_in,
    operation,
    shift,
    taken_over,
)
from tests.support.sql import run_sql
from tests.support.threads import in_threads, wait_little_for_locks
from tests.support.waiting import eventually, someone_waits_for_a_lock

pytestmark = pytest.mark.usefixtures("transactional_db")

BUSY = (Unlocked.BUSY, None)
MAKING = f"SELECT pg_advisory_xact_lock({KEY_LOCKS}, uuid_hash(%s))"


@MODES
def test_a_claim_writes_the_request_and_the_policys_times(policy):
    policy = policy.derive(retention=100, audit_retention=500)
    claim = claimed(policy)
    made = IdempotencyRecord.objects.get()
    assert (made.id, made.scope, made.key) == (claim.id, operation().scope, "k")
    assert (made.method, made.path, made.mode) == (
        "POST",
        "/charges/",
        policy.mode.word,
    )
    assert made.locked_until - made.locked_at == timedelta(seconds=policy.mode.seconds)
    assert made.expires_at - made.created_at == timedelta(seconds=100)
    assert made.purge_at - made.created_at == timedelta(seconds=500)


def test_retention_and_audit_count_from_the_response():
    policy = Policy(retention=100, audit_retention=500)
    claim = claimed(policy)
    shift(claim, expires_at=-timedelta(days=9), purge_at=-timedelta(days=9))
    store_for(policy).complete(claim, RESPONSE)
    record = IdempotencyRecord.objects.get()
    assert record.expires_at - record.updated_at == timedelta(seconds=100)
    assert record.purge_at - record.updated_at == timedelta(seconds=500)
    assert type(store_for(policy).read(claim.id).response_body) is bytes


def test_taking_an_expired_record_starts_it_afresh():
    done = claimed()
    store_for(ATOMIC).complete(done, RESPONSE)
    store_for(ATOMIC).count_replays({done.id: 5})
    expire(done)
    taken = taken_over(
        done, LEASE, replace(operation(body=b"other"), method="PUT", path="/other/")
    )
    assert (taken.attempt, taken.taken_over) == (1, False)
    record = IdempotencyRecord.objects.get()
    assert (record.method, record.path) == ("PUT", "/other/")
    assert (
        record.mode,
        record.response_status,
        record.response_body,
        record.replays,
    ) == ("lease", None, None, 0)
    assert bytes(record.fingerprint) == taken.operation.fingerprint
    assert record.created_at == record.updated_at


def test_a_record_that_expires_now_starts_afresh_and_a_dead_owners_never_does():
    done, dead = claimed(), claimed(key="dead")
    store_for(ATOMIC).complete(done, RESPONSE)
    store, record = store_for(ATOMIC), store_for(ATOMIC).read(done.id)
    assert (
        store.successor(
            replace(record, expires_at=record.now), operation(), uuid4()
        ).attempt
        == 1
    )
    expire(dead)
    taken = taken_over(dead)
    assert (taken.attempt, taken.taken_over) == (2, True)


def test_a_completed_record_can_be_neither_taken_nor_put_on_hold():
    done = claimed()
    store_for(HOLD).complete(done, RESPONSE)
    with pytest.raises(IllegalMove):
        taken_over(done)
    with pytest.raises(IllegalMove), store_for(HOLD).try_lock(done.id) as record:
        store_for(HOLD).hold(record, "too late")
    assert store_for(ATOMIC).read(done.id).response == RESPONSE


def test_replays_are_added_to_what_was_counted():
    once, twice = claimed(), claimed(key="other")
    store_for(ATOMIC).count_replays({once.id: 1, twice.id: 2})
    store_for(ATOMIC).count_replays({twice.id: 3, uuid4(): 9})
    counted = dict(
        IdempotencyRecord.objects.filter(last_replayed_at__isnull=False).values_list(
            "id", "replays"
        )
    )
    assert counted == {once.id: 1, twice.id: 5}


@pytest.mark.postgresql
@pytest.mark.not_on_citus
def test_the_records_of_replays_are_locked_in_the_order_of_their_ids(other_thread):
    """Whatever the plan is: two processes that count the same ones could wait for each
    other otherwise.
    """
    ids = sorted(claimed(key=str(number)).id for number in range(20))
    rows = IdempotencyRecord.objects.select_for_update(skip_locked=True)
    with ThreadPoolExecutor(1) as pool:
        with transaction.atomic():
            IdempotencyRecord.objects.select_for_update().get(pk=ids[10])
            replays = dict.fromkeys(reversed(ids), 1)
            counting = pool.submit(
                in_threads, 1, lambda _: store_for(ATOMIC).count_replays(replays)
            )
            eventually(lambda: other_thread(someone_waits_for_a_lock))
            free = other_thread(transaction.atomic(lambda: {row.pk for row in rows}))
        counting.result(60)
    assert free == {*ids[11:]}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_write_leaves_other_records_alone(write):
    claim, _others = claimed(), [claimed(key="other"), claimed(scope="other")]

    def rows():
        return {row["id"]: row for row in IdempotencyRecord.objects.values()}

    before = rows()
    write(claim)
    changed = {id for id, row in before.items() if rows().get(id) != row}
    assert changed == {claim.id}


def test_an_owner_finds_its_record_though_it_was_written_to_meanwhile():
    """PostgreSQL has put it elsewhere then."""
    owner = claimed()
    IdempotencyRecord.objects.update(replays=1)
    with transaction.atomic():
        assert store_for(ATOMIC).lock(owner)
        IdempotencyRecord.objects.update(replays=2)
        assert store_for(ATOMIC).complete(owner, RESPONSE)
    assert store_for(ATOMIC).read(owner.id).response == RESPONSE


@pytest.mark.not_on_citus
@pytest.mark.postgresql
def test_an_owner_that_does_not_get_the_row_lock_has_lost_its_claim(other_thread):
    claim = claimed()
    block = lock_in(other_thread, claim)
    with transaction.atomic():
        run_sql("SET LOCAL lock_timeout = '20ms'")
        assert store_for(ATOMIC).lock(claim) is None
        transaction.set_rollback(True)
    commit(other_thread, block)


def contended(claim):
    """What contending finds; ``None`` for a conflict."""
    with suppress(StoreConflict), store_for(Policy()).try_lock(claim.id) as found:
        return found


@LOCKS
def test_contending_for_a_free_record_locks_it(other_thread, lock):
    claim = claimed()
    with store_for(Policy()).try_lock(claim.id) as record:
        assert record.token == claim.token
        other_thread(wait_little_for_locks)
        assert other_thread(contended, claim) in BUSY
    assert other_thread(contended, claim).token == claim.token


@pytest.mark.row_locks
@pytest.mark.parametrize("lock", ["skip_locked"], indirect=True)
def test_skip_locked_tells_a_locked_record_from_none(other_thread, lock):
    claim = claimed()
    block = lock_in(other_thread, claim)
    assert contended(claim) is Unlocked.BUSY
    other_thread(store_for(Policy()).release, claim)
    commit(other_thread, block)
    assert contended(claim) is Unlocked.ABSENT


@pytest.mark.not_on_citus
@pytest.mark.postgresql
@LOCKS
def test_a_reference_to_a_record_is_not_taken_for_its_owner(other_thread, lock):
    """As the check of a foreign key does."""
    claim, block = claimed(), transaction.atomic()
    other_thread(block.__enter__)
    other_thread(run_sql, "SELECT 1 FROM django_idempotency_record FOR KEY SHARE")
    assert contended(claim).token == claim.token
    commit(other_thread, block)


@pytest.mark.postgresql
@pytest.mark.parametrize(
    ("policy", "body", "answered", "tried"),
    [
        (ATOMIC, b"", False, True),
        (ATOMIC, b"", True, False),
        (ATOMIC, b"other", False, False),
        (LEASE, b"", False, False),
    ],
    ids=[
        "a duplicate in atomic mode",
        "of what is answered",
        "of another request",
        "in lease mode",
    ],
)
def test_a_second_claim_tries_the_row_lock_only_in_atomic_mode(
    policy, body, answered, tried
):
    claim = claimed(policy)
    if answered:
        store_for(policy).complete(claim, RESPONSE)
    store_for(policy).claim(operation(body=body), uuid4())
    assert run_sql("SELECT xmax <> '0' FROM django_idempotency_record") == [(tried,)], (
        "who has had the row locked"
    )


@pytest.mark.row_locks
def test_a_claim_with_an_old_snapshot_does_not_wait_for_the_owner(
    other_thread, monkeypatch
):
    claim = claimed()
    block = lock_in(other_thread, claim)
    # it was not there when looked for
    monkeypatch.setattr(DatabaseStore, "read", lambda *_: None)
    with suppress(StoreConflict):
        assert not isinstance(store_for(ATOMIC).claim(operation(), uuid4()), Claimed)
    commit(other_thread, block)  # only now could a claim that waits have gone on


@pytest.mark.postgresql
@pytest.mark.usefixtures("impatient")
def test_a_duplicate_does_not_wait_for_the_owners_commit(other_thread):
    """An INSERT … ON CONFLICT would: the completing UPDATE makes an index entry that is
    not committed yet.
    """
    claim = claimed()
    block = lock_in(other_thread, claim)
    assert other_thread(store_for(ATOMIC).complete, claim, RESPONSE)
    seen = store_for(ATOMIC).claim(operation(), uuid4())
    assert (seen.record.token, seen.busy) == (claim.token, True)
    commit(other_thread, block)
    assert store_for(ATOMIC).claim(operation(), uuid4()).record.response == RESPONSE


@pytest.mark.not_on_citus
@pytest.mark.postgresql
def test_a_new_record_is_made_under_a_lock_of_its_own_key(other_thread):
    block = transaction.atomic()
    other_thread(block.__enter__)
    other_thread(run_sql, MAKING, [operation("another").id])
    assert claimed()
    with (
        _connecting_with("statement_timeout=1s"),
        _kept_connection(),  # no other connection is tried
        pytest.raises(StoreUnavailable, match="statement timeout"),
    ):
        engine.claim(operation("another"), ATOMIC)
    commit(other_thread, block)
    assert isinstance(engine.claim(operation("another"), ATOMIC), Claimed)


@pytest.mark.not_on_citus
@pytest.mark.postgresql
def test_a_record_made_by_other_means_is_seen_when_asked_again(other_thread):
    block = transaction.atomic()
    other_thread(block.__enter__)
    made = other_thread(DatabaseStore(ATOMIC, "default").claim, operation(), uuid4())
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(in_threads, 1, lambda _: engine.claim(operation(), LEASE))
        eventually(someone_waits_for_a_lock)
        commit(other_thread, block)
        (outcome,) = asking.result(60)
    assert (outcome.attempt, outcome.id) == (2, made.id)


@pytest.mark.usefixtures("impatient")
@LOCKS
def test_a_live_owner_is_never_taken_over_however_slow(other_thread, lock):
    claim = claimed(ATOMIC)
    lapse(claim)
    block = lock_in(other_thread, claim)
    assert engine.claim(operation(), ATOMIC) == InFlight(retry_after=1)
    assert other_thread(store_for(ATOMIC).complete, claim, RESPONSE)
    commit(other_thread, block)
    assert engine.claim(operation(), ATOMIC) == Replay(RESPONSE)


def test_within_the_grace_a_claim_is_asked_again_every_10_ms(monkeypatch):
    pauses, claim = [], claimed()

    def complete_at_the_third(seconds):
        pauses.append(seconds)
        if len(pauses) == 3:
            store_for(ATOMIC).complete(claim, RESPONSE)

    monkeypatch.setattr(engine.waiting.time, "sleep", complete_at_the_third)
    assert engine.claim(operation(), Policy(mode=Atomic(takeover_grace=60))) == Replay(
        RESPONSE
    )
    assert pauses == [0.01] * 3


@MODES
@pytest.mark.parametrize("what", ["scope", "key"])
def test_a_digest_collision_is_an_error(policy, what):
    store_for(policy).complete(claimed(policy), RESPONSE)
    IdempotencyRecord.objects.update(**{what: "another"})
    before = IdempotencyRecord.objects.values().get()
    with pytest.raises(DigestCollision):
        engine.claim(operation(), policy)
    assert IdempotencyRecord.objects.values().get() == before
