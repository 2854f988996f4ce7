"""Claims, as every store makes them."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from uuid import uuid4

import pytest
from django.db import (
    connection,
    transaction,
)

from django_idempotency import engine
from django_idempotency.exceptions import (
    StoreConflict,
    StoreUnavailable,
)
from django_idempotency.models import IdempotencyRecord
from django_idempotency.outcomes import (
    Claimed,
)
from django_idempotency.policy import Policy
from django_idempotency.stores.base import Seen, Store
from django_idempotency.stores.claim_function import KEY_LOCKS
from django_idempotency.stores.database import DatabaseStore
from django_idempotency.stores.postgresql import PostgreSQLStore
from tests.stores.contract import (
    ATOMIC,
    LEASE,
    MANY,
    MODES,
    RESPONSE,
    _connecting_with,
    _kept_connection,
    claimed,
    commit,
    lock_in,
    operation,
)
from tests.support.threads import in_threads
from tests.support.waiting import eventually, someone_waits_for_a_lock

pytestmark = pytest.mark.usefixtures("transactional_db")


def on_postgresql(policy: Policy) -> Store:
    return PostgreSQLStore(policy, "default")


@MODES
def test_a_first_claim_makes_a_record_that_is_being_processed(store, policy):
    claim = claimed(store, policy)
    record = store(policy).read(claim.id)
    assert (record.status, record.token, record.attempts, record.mode) == ("processing", claim.token, 1, policy.mode)
    assert record.fingerprint == claim.operation.fingerprint
    assert record.response is None
    assert record.locked_until - record.locked_at == timedelta(seconds=policy.lease)
    assert record.expires_at - record.created_at == timedelta(seconds=policy.retention)
    made = IdempotencyRecord.objects.get()
    assert (made.method, made.path, made.scope, made.key) == ("POST", "/charges/", operation().scope, "k")
    assert made.purge_at - made.created_at == timedelta(seconds=policy.kept_for)


@MODES
def test_a_second_claim_shows_the_record_there_is_and_changes_nothing(store, policy):
    claim = claimed(store, policy)
    before = IdempotencyRecord.objects.values().get()
    seen = store(policy).claim(operation(body=b"other"), uuid4())
    assert isinstance(seen, Seen)
    assert (seen.record.token, seen.record.fingerprint) == (claim.token, claim.operation.fingerprint)
    assert seen.record.now >= seen.record.created_at
    assert IdempotencyRecord.objects.values().get() == before


@pytest.mark.postgresql
@pytest.mark.parametrize(
    ("policy", "body", "answered", "tried"),
    [
        (ATOMIC, b"", False, True),
        (ATOMIC, b"", True, False),
        (ATOMIC, b"other", False, False),
        (LEASE, b"", False, False),
    ],
    ids=["a duplicate in atomic mode", "of what is answered", "of another request", "in lease mode"],
)
def test_a_second_claim_tries_the_row_lock_only_in_atomic_mode(policy, body, answered, tried):
    claim = claimed(on_postgresql, policy)
    if answered:
        on_postgresql(policy).complete(claim, RESPONSE)
    on_postgresql(policy).claim(operation(body=body), uuid4())
    with connection.cursor() as cursor:
        cursor.execute("SELECT xmax <> '0' FROM django_idempotency_record")  # who has had a version of the row locked
        assert cursor.fetchall() == [(tried,)]


def test_a_key_is_its_own_in_every_scope(store):
    assert claimed(store, scope="a").id != claimed(store, scope="b").id


@MODES
def test_of_concurrent_first_claims_one_makes_the_record(store, policy):
    for key in "abcde":
        seen = in_threads(MANY, lambda _index, key=key: store(policy).claim(operation(key), uuid4()))
        (winner,) = [outcome for outcome in seen if isinstance(outcome, Claimed)]
        assert all(outcome.record.token == winner.token for outcome in seen if isinstance(outcome, Seen))
        assert store(policy).read(winner.id).token == winner.token


@pytest.mark.row_locks
def test_a_claim_with_an_old_snapshot_does_not_wait_for_the_owner(store, other_thread, monkeypatch):
    claim = claimed(store)
    block = lock_in(other_thread, store, claim)
    monkeypatch.setattr(DatabaseStore, "read", lambda *_: None)  # it was not there when looked for
    began = time.monotonic()
    with suppress(StoreConflict):
        assert not isinstance(store(ATOMIC).claim(operation(), uuid4()), Claimed)
    assert time.monotonic() - began < 3
    commit(other_thread, block)


@pytest.mark.postgresql
@pytest.mark.usefixtures("impatient")
def test_a_duplicate_does_not_wait_for_the_owners_commit(other_thread):
    """An INSERT … ON CONFLICT would: the completing UPDATE makes an index entry that is not committed yet."""
    claim = claimed(on_postgresql)
    block = lock_in(other_thread, on_postgresql, claim)
    assert other_thread(on_postgresql(ATOMIC).complete, claim, RESPONSE)
    seen = on_postgresql(ATOMIC).claim(operation(), uuid4())
    assert (seen.record.token, seen.busy) == (claim.token, True)
    commit(other_thread, block)
    assert on_postgresql(ATOMIC).claim(operation(), uuid4()).record.response == RESPONSE


@pytest.mark.postgresql
def test_a_new_record_is_made_under_a_lock_of_its_own_key(other_thread):
    block = transaction.atomic()
    other_thread(block.__enter__)
    other_thread(lambda: connection.cursor().execute(MAKING, [operation("another").id]))
    assert claimed(on_postgresql)
    connection.cursor().execute("SET statement_timeout = '300ms'")
    with pytest.raises(StoreUnavailable):  # it waited
        on_postgresql(ATOMIC).claim(operation("another"), uuid4())
    connection.close()
    commit(other_thread, block)
    assert isinstance(on_postgresql(ATOMIC).claim(operation("another"), uuid4()), Claimed)


@pytest.mark.postgresql
def test_whoever_is_kept_from_making_a_record_gives_up_in_time(other_thread, monkeypatch):
    monkeypatch.setattr(engine.claims, "PATIENCE", 0.2)
    block = transaction.atomic()
    other_thread(block.__enter__)
    other_thread(lambda: connection.cursor().execute(MAKING, [operation().id]))
    connection.cursor().execute("SET lock_timeout = '20ms'")
    with pytest.raises(StoreUnavailable, match="again and again"):
        engine.claim(operation(), ATOMIC)
    connection.close()
    commit(other_thread, block)
    assert isinstance(engine.claim(operation(), ATOMIC), Claimed)


@pytest.mark.postgresql
def test_a_claim_that_takes_too_long_is_not_tried_elsewhere(other_thread):
    block = transaction.atomic()
    other_thread(block.__enter__)
    other_thread(lambda: connection.cursor().execute(MAKING, [operation().id]))
    with (
        _connecting_with("statement_timeout=300ms"),
        _kept_connection(),
        pytest.raises(StoreUnavailable, match="statement timeout"),
    ):
        engine.claim(operation(), ATOMIC)
    commit(other_thread, block)


MAKING = f"SELECT pg_advisory_xact_lock({KEY_LOCKS}, uuid_hash(%s))"


@pytest.mark.postgresql
def test_a_record_made_by_other_means_is_seen_when_asked_again(other_thread):
    block = transaction.atomic()
    other_thread(block.__enter__)
    made = other_thread(DatabaseStore(ATOMIC, "default").claim, operation(), uuid4())
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(in_threads, 1, lambda _: engine.claim(operation(), LEASE))
        eventually(someone_waits_for_a_lock)
        commit(other_thread, block)
        (outcome,) = asking.result(10)
    assert outcome.attempt == 2
    assert outcome.id == made.id
