"""One contract for every store, and the engine's outcomes on each: the same ones, whatever the database."""

from __future__ import annotations

import hashlib
import sqlite3
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import datetime, timedelta
from unittest.mock import ANY
from uuid import uuid4

import psycopg
import pytest
from django.contrib.auth import get_user_model
from django.db import (
    DataError,
    IntegrityError,
    InterfaceError,
    OperationalError,
    ProgrammingError,
    connection,
    transaction,
)
from django.utils import timezone

from django_idempotency import engine, stores
from django_idempotency.exceptions import (
    ClaimInsideTransaction,
    ClaimLost,
    DigestCollision,
    IllegalMove,
    StoreConflict,
    StoreRefused,
    StoreUnavailable,
)
from django_idempotency.models import IdempotencyRecord
from django_idempotency.outcomes import (
    Claimed,
    Fail,
    Held,
    InFlight,
    Keep,
    Mismatch,
    Operation,
    Release,
    Replay,
    StoredResponse,
)
from django_idempotency.policy import Policy
from django_idempotency.stores import database
from django_idempotency.stores.base import Lock, Seen, Store
from django_idempotency.stores.database import RETIRED, UNTIL, DatabaseStore, store_errors
from django_idempotency.stores.postgresql import PostgreSQLStore
from testproject.models import LedgerEntry
from tests.pgbouncer import free_port
from tests.threads import OtherThread, in_threads, wait_little_for_locks
from tests.waiting import eventually, someone_waits_for_a_lock

pytestmark = pytest.mark.usefixtures("transactional_db")

STORES = [DatabaseStore, PostgreSQLStore] if connection.vendor == "postgresql" else [DatabaseStore]
ATOMIC = Policy(grace=0)
LEASE = Policy(mode="lease")
HOLD = Policy(mode="lease", on_crash="hold")
MODES = pytest.mark.parametrize("policy", [ATOMIC, LEASE], ids=["atomic", "lease"])
LOCKS = pytest.mark.parametrize("lock", ["nowait", "skip_locked"])
ANSWER = StoredResponse(201, (("Content-Type", "a/b"), ("X-Twice", "1"), ("X-Twice", "2")), b"\0\xff{}")
BUSY = (Lock.BUSY, None)
SCOPE = ""
MANY = 8


@pytest.fixture(autouse=True)
def fresh_scope(monkeypatch):
    """No test's records are those of another: replays are counted a little later."""
    monkeypatch.setitem(globals(), "SCOPE", f"user:{uuid4()}")


@pytest.fixture(params=STORES, ids=lambda store: store.__name__)
def store(request, monkeypatch) -> Store:
    """Each store of this database in turn; the engine uses it too."""
    store = request.param()
    monkeypatch.setitem(stores._STORES, connection.vendor, store)
    return store


@pytest.fixture
def other(other_thread) -> OtherThread:
    return other_thread


@pytest.fixture
def impatient(transactional_db):
    wait_little_for_locks()
    yield
    connection.close()


def operation(key: str = "k", *, body: bytes = b"", scope: str = "") -> Operation:
    return Operation(scope or SCOPE, key, hashlib.sha256(body).digest(), "POST", "/charges/")


def claimed(store: Store, policy: Policy = ATOMIC, **asked) -> Claimed:
    claim = store.claim(operation(**asked), uuid4(), policy)
    assert isinstance(claim, Claimed)
    return claim


def contended(store: Store, claim: Claimed, policy: Policy):
    """What contending finds; ``None`` for a conflict."""
    with suppress(StoreConflict), store.contend(claim.id, policy) as found:
        return found


def lock_in(thread: OtherThread, store: Store, claim: Claimed, policy: Policy = ATOMIC) -> transaction.Atomic:
    """The other thread's business transaction, left open."""
    block = transaction.atomic()
    thread(block.__enter__)
    assert thread(store.lock, claim, policy)
    return block


def commit(thread: OtherThread, block: transaction.Atomic) -> None:
    thread(block.__exit__, None, None, None)


def shift(claim: Claimed, **by: timedelta) -> None:
    """Move the record's times."""
    record = IdempotencyRecord.objects.filter(pk=claim.id)
    now = record.get()
    record.update(**{name: getattr(now, name) + delta for name, delta in by.items()})


def lapse(claim: Claimed) -> None:
    shift(claim, locked_at=-timedelta(days=9), locked_until=-timedelta(days=9))


def expire(claim: Claimed) -> None:
    shift(claim, expires_at=-timedelta(days=9))


# --- The contract ----------------------------------------------------------------------------------------------------


@MODES
def test_a_first_claim_makes_a_record_that_is_being_processed(store, policy):
    claim = claimed(store, policy)
    record = store.read(claim.id, policy)
    assert (record.status, record.token, record.attempts, record.mode) == ("processing", claim.token, 1, policy.mode)
    assert record.fingerprint == claim.operation.fingerprint
    assert record.response is None
    assert record.locked_until - record.locked_at == timedelta(seconds=policy.lease)
    assert record.expires_at - record.created_at == timedelta(seconds=policy.retention)
    made = IdempotencyRecord.objects.get()
    assert (made.method, made.path, made.scope, made.key) == ("POST", "/charges/", SCOPE, "k")
    assert made.purge_at - made.created_at == timedelta(seconds=policy.kept_for)


@MODES
def test_a_second_claim_shows_the_record_there_is_and_changes_nothing(store, policy):
    claim = claimed(store, policy)
    before = IdempotencyRecord.objects.values().get()
    seen = store.claim(operation(body=b"other"), uuid4(), policy)
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
def test_a_second_claim_tries_the_row_lock_only_where_the_holders_life_depends_on_it(policy, body, answered, tried):
    store = PostgreSQLStore()
    claim = claimed(store, policy)
    if answered:
        store.complete(claim, ANSWER, policy)
    store.claim(operation(body=body), uuid4(), policy)
    with connection.cursor() as cursor:
        cursor.execute("SELECT xmax <> '0' FROM django_idempotency_record")  # who has had a version of the row locked
        assert cursor.fetchall() == [(tried,)]


def test_a_key_is_its_own_in_every_scope(store):
    assert claimed(store, scope="a").id != claimed(store, scope="b").id


@pytest.mark.parametrize("failure", [False, True])
def test_an_answer_is_kept_to_the_byte(store, failure):
    claim = claimed(store)
    assert store.complete(claim, ANSWER, ATOMIC, failure=failure)
    record = store.read(claim.id, ATOMIC)
    assert record.response == ANSWER
    assert type(record.response.body) is type(record.fingerprint) is bytes
    assert (record.status, record.token) == ("failed" if failure else "completed", None)
    assert store.claim(claim.operation, uuid4(), ATOMIC).record.response == ANSWER


def test_an_answer_without_its_body_is_kept_so(store):
    claim = claimed(store)
    store.complete(claim, StoredResponse(200, (), None), ATOMIC)
    assert store.read(claim.id, ATOMIC).response == StoredResponse(200, (), None)


def test_retention_and_audit_count_from_the_answer(store):
    policy = Policy(retention=100, audit=500)
    claim = claimed(store, policy)
    shift(claim, expires_at=-timedelta(days=9), purge_at=-timedelta(days=9))
    store.complete(claim, ANSWER, policy)
    record = IdempotencyRecord.objects.get()
    assert record.expires_at - record.updated_at == timedelta(seconds=100)
    assert record.purge_at - record.updated_at == timedelta(seconds=500)


@pytest.mark.parametrize("held", [False, True])
def test_a_failure_leaves_its_reason(store, held):
    claim = claimed(store)
    assert store.fail(claim, "broke", ATOMIC, held=held)
    record = store.read(claim.id, ATOMIC)
    assert (record.status, record.reason, record.held, record.response) == ("failed", "broke", held, None)


def test_a_released_key_is_as_if_never_used(store):
    claim = claimed(store)
    assert store.release(claim, ATOMIC)
    assert store.read(claim.id, ATOMIC) is None
    assert claimed(store).attempt == 1


@pytest.mark.parametrize(
    "write",
    [
        lambda store, lost: store.complete(lost, ANSWER, ATOMIC),
        lambda store, lost: store.fail(lost, "late", ATOMIC),
        lambda store, lost: store.release(lost, ATOMIC),
        lambda store, lost: store.renew([lost], LEASE),
    ],
    ids=["complete", "fail", "release", "renew"],
)
@pytest.mark.parametrize("became", ["taken", "completed", "absent"])
def test_a_lost_claim_can_write_nothing(store, write, became):
    lost = claimed(store)
    with store.contend(lost.id, ATOMIC) as record:
        owner = store.take(record, operation(), uuid4(), ATOMIC)
    if became == "completed":
        store.complete(owner, ANSWER, ATOMIC)
    elif became == "absent":
        store.release(owner, ATOMIC)
    before = list(IdempotencyRecord.objects.values())
    assert not write(store, lost)
    assert list(IdempotencyRecord.objects.values()) == before


def test_only_the_holder_gets_the_row_lock(store):
    lost = claimed(store)
    with store.contend(lost.id, ATOMIC) as record:
        owner = store.take(record, operation(), uuid4(), ATOMIC)
    with transaction.atomic():
        assert not store.lock(lost, ATOMIC)
        assert store.lock(owner, ATOMIC)


def test_a_holder_finds_its_record_though_it_was_written_to_meanwhile(store):
    """PostgreSQL has put it elsewhere then."""
    holder = claimed(store)
    IdempotencyRecord.objects.update(replays=1)
    with transaction.atomic():
        assert store.lock(holder, ATOMIC)
        IdempotencyRecord.objects.update(replays=2)
        assert store.complete(holder, ANSWER, ATOMIC)
    assert store.read(holder.id, ATOMIC).response == ANSWER


@pytest.mark.usefixtures("impatient")
@LOCKS
def test_contending_for_a_locked_record_finds_it_busy(store, other, lock):
    claim = claimed(store)
    block = lock_in(other, store, claim)
    assert contended(store, claim, Policy(lock=lock)) in BUSY
    commit(other, block)


@LOCKS
def test_contending_for_no_record_finds_none(store, lock):
    with store.contend(operation().id, Policy(lock=lock)) as found:
        assert found is Lock.ABSENT


@pytest.mark.row_locks
def test_skip_locked_tells_a_locked_record_from_none(store, other):
    claim, policy = claimed(store), Policy(lock="skip_locked")
    block = lock_in(other, store, claim)
    with store.contend(claim.id, policy) as found:
        assert found is Lock.BUSY
    other(store.release, claim, policy)
    commit(other, block)
    with store.contend(claim.id, policy) as found:
        assert found is Lock.ABSENT


@LOCKS
def test_contending_for_a_free_record_locks_it(store, other, lock):
    claim, policy = claimed(store), Policy(lock=lock)
    with store.contend(claim.id, policy) as record:
        assert record.token == claim.token
        other(wait_little_for_locks)
        assert other(contended, store, claim, policy) in BUSY
    assert other(contended, store, claim, policy).token == claim.token


def test_taking_a_record_gives_it_a_new_token_and_one_more_attempt(store):
    dead = claimed(store)
    with store.contend(dead.id, ATOMIC) as record:
        taken = store.take(record, operation(), uuid4(), ATOMIC)
    assert taken.taken_over
    record = store.read(dead.id, ATOMIC)
    assert (record.token, record.attempts, taken.attempt) == (taken.token, 2, 2)
    assert record.locked_at < record.now < record.locked_until


def test_taking_a_dead_holders_record_counts_on_however_old_it_is(store):
    dead = claimed(store)
    expire(dead)
    with store.contend(dead.id, ATOMIC) as record:
        taken = store.take(record, operation(), uuid4(), ATOMIC)
    assert (taken.attempt, taken.taken_over) == (2, True)


def test_a_record_that_is_taken_is_held_no_more_and_has_no_reason(store):
    failed = claimed(store)
    store.fail(failed, "broke", HOLD, held=True)
    take(store, failed)
    record = store.read(failed.id, ATOMIC)
    assert (record.status, record.held, record.reason) == ("processing", False, "")


def test_a_record_that_expires_now_can_be_taken_afresh(store):
    done = claimed(store)
    store.complete(done, ANSWER, ATOMIC)
    with store.contend(done.id, ATOMIC) as record:
        taken = store.take(replace(record, expires_at=record.now), operation(), uuid4(), ATOMIC)
    assert taken.attempt == 1


@pytest.mark.postgresql
@LOCKS
def test_who_only_refers_to_a_record_is_not_taken_for_its_holder(store, other, lock):
    """As the check of a foreign key does."""
    claim, policy = claimed(store), Policy(lock=lock)
    block = transaction.atomic()
    other(block.__enter__)
    other(lambda: connection.cursor().execute("SELECT 1 FROM django_idempotency_record FOR KEY SHARE"))
    with store.contend(claim.id, policy) as found:
        assert found.token == claim.token
    commit(other, block)


def take(store, claim):
    with store.contend(claim.id, ATOMIC) as record:
        store.take(record, operation(), uuid4(), ATOMIC)


def hold(store, claim):
    with store.contend(claim.id, HOLD) as record:
        store.hold(record, "who knows", HOLD)


@pytest.mark.parametrize(
    "write",
    [
        take,
        hold,
        lambda store, claim: store.complete(claim, ANSWER, ATOMIC),
        lambda store, claim: store.fail(claim, "broke", ATOMIC),
        lambda store, claim: store.release(claim, ATOMIC),
        lambda store, claim: store.renew([claim], LEASE),
        lambda store, claim: store.count_replays({claim.id: 1}, ATOMIC),
    ],
    ids=["take", "hold", "complete", "fail", "release", "renew", "count_replays"],
)
def test_a_write_changes_no_other_record(store, write):
    claim, others = claimed(store), [claimed(store, key="other"), claimed(store, scope="other")]
    before = list(IdempotencyRecord.objects.filter(pk__in=[other.id for other in others]).order_by("pk").values())
    mine = IdempotencyRecord.objects.filter(pk=claim.id).values().get()
    write(store, claim)
    assert list(IdempotencyRecord.objects.exclude(pk=claim.id).order_by("pk").values()) == before
    assert IdempotencyRecord.objects.filter(pk=claim.id).values().first() != mine


def test_taking_an_expired_record_starts_it_afresh(store):
    done = claimed(store)
    store.complete(done, ANSWER, ATOMIC)
    store.count_replays({done.id: 5}, ATOMIC)
    expire(done)
    with store.contend(done.id, LEASE) as record:
        other = replace(operation(body=b"other"), method="PUT", path="/other/")
        taken = store.take(record, other, uuid4(), LEASE)
    assert (taken.attempt, taken.taken_over) == (1, False)
    record = IdempotencyRecord.objects.get()
    assert (record.method, record.path) == ("PUT", "/other/")
    assert (record.mode, record.response_status, record.response_body, record.replays) == ("lease", None, None, 0)
    assert bytes(record.fingerprint) == taken.operation.fingerprint
    assert record.created_at == record.updated_at


def test_a_completed_record_can_not_be_taken(store):
    done = claimed(store)
    store.complete(done, ANSWER, ATOMIC)
    with pytest.raises(IllegalMove), store.contend(done.id, ATOMIC) as record:
        store.take(record, operation(), uuid4(), ATOMIC)
    assert store.read(done.id, ATOMIC).response == ANSWER


def test_a_completed_record_can_not_be_held(store):
    done = claimed(store)
    store.complete(done, ANSWER, ATOMIC)
    with pytest.raises(IllegalMove), store.contend(done.id, HOLD) as record:
        store.hold(record, "too late", HOLD)
    assert store.read(done.id, ATOMIC).response == ANSWER


def test_in_atomic_mode_no_crash_waits_for_a_person(store):
    policy = Policy(on_crash="hold")
    assert not store.read(claimed(store, policy).id, policy).hold_on_crash


def test_holding_sets_a_record_aside_with_its_reason(store):
    dead = claimed(store, HOLD)
    with store.contend(dead.id, HOLD) as record:
        store.hold(record, "who knows", HOLD)
    record = store.read(dead.id, HOLD)
    assert (record.status, record.held, record.reason, record.token) == ("failed", True, "who knows", None)
    assert not store.complete(dead, ANSWER, HOLD)


def test_renewing_extends_the_leases_that_are_still_held(store):
    mine, lost = claimed(store, LEASE), claimed(store, LEASE, key="other")
    store.release(lost, LEASE)
    before = store.read(mine.id, LEASE).locked_until
    assert store.renew([mine, lost], Policy(mode="lease", lease=600)) == {mine.token}
    assert store.read(mine.id, LEASE).locked_until - before >= timedelta(seconds=600 - LEASE.lease)


def test_replays_are_added_to_what_was_counted(store):
    once, twice = claimed(store), claimed(store, key="other")
    store.count_replays({once.id: 1, twice.id: 2}, ATOMIC)
    store.count_replays({twice.id: 3, uuid4(): 9}, ATOMIC)
    counted = dict(IdempotencyRecord.objects.filter(last_replayed_at__isnull=False).values_list("id", "replays"))
    assert counted == {once.id: 1, twice.id: 5}


@MODES
def test_of_concurrent_first_claims_one_makes_the_record(store, policy):
    for key in "abcde":
        seen = in_threads(MANY, lambda _index, key=key: store.claim(operation(key), uuid4(), policy))
        (winner,) = [outcome for outcome in seen if isinstance(outcome, Claimed)]
        assert all(outcome.record.token == winner.token for outcome in seen if isinstance(outcome, Seen))
        assert store.read(winner.id, policy).token == winner.token


@pytest.mark.row_locks
def test_a_claim_that_comes_too_late_to_see_the_record_does_not_wait_for_its_holder(store, other, monkeypatch):
    claim = claimed(store)
    block = lock_in(other, store, claim)
    monkeypatch.setattr(store, "read", lambda *_: None)  # it was not there when looked for
    began = time.monotonic()
    with suppress(StoreConflict):
        assert not isinstance(store.claim(operation(), uuid4(), ATOMIC), Claimed)
    assert time.monotonic() - began < 3
    commit(other, block)


@pytest.mark.postgresql
@pytest.mark.usefixtures("impatient")
def test_a_duplicate_does_not_wait_for_the_commit_of_an_answer_that_is_written(other):
    """An INSERT … ON CONFLICT would: the completing UPDATE makes an index entry that is not committed yet."""
    store = PostgreSQLStore()
    claim = claimed(store)
    block = lock_in(other, store, claim)
    assert other(store.complete, claim, ANSWER, ATOMIC)
    seen = store.claim(operation(), uuid4(), ATOMIC)
    assert (seen.record.token, seen.busy) == (claim.token, True)
    commit(other, block)
    assert store.claim(operation(), uuid4(), ATOMIC).record.response == ANSWER


@pytest.mark.postgresql
def test_a_new_record_is_made_under_a_lock_of_its_own_key(other):
    store = PostgreSQLStore()
    block = transaction.atomic()
    other(block.__enter__)
    other(lambda: connection.cursor().execute(MAKING, [operation("another").id]))
    assert claimed(store)
    connection.cursor().execute("SET statement_timeout = '300ms'")
    with pytest.raises(StoreUnavailable):  # it waited
        store.claim(operation("another"), uuid4(), ATOMIC)
    connection.close()
    commit(other, block)
    assert isinstance(store.claim(operation("another"), uuid4(), ATOMIC), Claimed)


@pytest.mark.postgresql
def test_whoever_is_kept_from_making_a_record_gives_up_in_time(other, monkeypatch):
    monkeypatch.setattr(engine, "PATIENCE", 0.2)
    block = transaction.atomic()
    other(block.__enter__)
    other(lambda: connection.cursor().execute(MAKING, [operation().id]))
    connection.cursor().execute("SET lock_timeout = '20ms'")
    with pytest.raises(StoreUnavailable, match="again and again"):
        engine.claim(operation(), ATOMIC)
    connection.close()
    commit(other, block)
    assert isinstance(engine.claim(operation(), ATOMIC), Claimed)


@pytest.mark.postgresql
def test_a_claim_that_takes_too_long_is_given_up_and_not_begun_again_on_another_connection(other):
    block = transaction.atomic()
    other(block.__enter__)
    other(lambda: connection.cursor().execute(MAKING, [operation().id]))
    with (
        _connecting_with("statement_timeout=300ms"),
        _kept_connection(),
        pytest.raises(StoreUnavailable, match="statement timeout"),
    ):
        engine.claim(operation(), ATOMIC)
    commit(other, block)


@pytest.mark.postgresql
def test_without_a_partition_no_other_connection_is_tried():
    table = IdempotencyRecord._meta.db_table
    connection.cursor().execute(f"ALTER TABLE {table} ADD CONSTRAINT {UNTIL} CHECK (key <> 'refused')")
    try:
        with _kept_connection(), pytest.raises(StoreUnavailable, match="idempotency_partitions ensure"):
            engine.claim(operation("refused"), ATOMIC)
    finally:
        connection.cursor().execute(f"ALTER TABLE {table} DROP CONSTRAINT {UNTIL}")


@contextmanager
def _kept_connection():
    connection.ensure_connection()
    before = connection.connection
    yield
    assert connection.connection is before


@pytest.mark.row_locks
def test_where_there_is_no_server_one_connection_is_tried(monkeypatch):
    """Each may take as long as the driver waits for an answer."""
    tried = []
    connect = connection.get_new_connection
    monkeypatch.setattr(connection, "get_new_connection", lambda named: tried.append(named) or connect(named))
    connection.close()
    with monkeypatch.context() as patch:
        patch.setitem(connection.settings_dict, "HOST", "127.0.0.1")
        patch.setitem(connection.settings_dict, "PORT", free_port())
        with pytest.raises(StoreUnavailable):
            engine.claim(operation(), ATOMIC)
    assert len(tried) == 1


MAKING = "SELECT pg_advisory_xact_lock(uuid_hash_extended(%s, 0))"

ZONES = {"postgresql": "SET TIME ZONE 'Asia/Tokyo'", "mysql": "SET time_zone = '+09:00'", "sqlite": "SELECT 1"}


@pytest.mark.postgresql
@pytest.mark.parametrize(
    ("constraint", "error", "message"),
    [
        ("refused", IntegrityError, "refused"),
        (UNTIL, StoreUnavailable, "idempotency_partitions ensure"),
        (RETIRED, StoreUnavailable, "again and again"),  # another partition may take it, the next time
    ],
)
def test_a_record_that_the_table_refuses_is_an_error_and_asked_for_again_only_where_that_helps(
    constraint, error, message, monkeypatch
):
    monkeypatch.setattr(engine, "PATIENCE", 0.2)
    table = IdempotencyRecord._meta.db_table
    with connection.cursor() as cursor:
        cursor.execute(f"ALTER TABLE {table} ADD CONSTRAINT {constraint} CHECK (key <> 'refused')")
    try:
        with pytest.raises(error, match=message):
            engine.claim(operation("refused"), ATOMIC)
    finally:
        with connection.cursor() as cursor:
            cursor.execute(f"ALTER TABLE {table} DROP CONSTRAINT {constraint}")


@pytest.mark.postgresql
def test_where_no_partition_takes_a_record_somebody_is_told_loudly(caplog):
    with pytest.raises(StoreUnavailable, match="idempotency_partitions ensure"), store_errors():
        connection.cursor().execute("DO $$ BEGIN RAISE check_violation; END $$")  # of no constraint, as then
    (told,) = caplog.records
    assert (told.name, told.levelname) == ("django_idempotency", "CRITICAL")
    assert "idempotency_partitions ensure" in told.getMessage()


def sqlite_error(name: str) -> Exception:
    error = sqlite3.OperationalError("database is locked")
    error.sqlite_errorname = name
    return error


@pytest.mark.parametrize(
    ("error", "cause", "kind"),
    [
        (OperationalError("…"), psycopg.errors.LockNotAvailable(), StoreConflict),
        (OperationalError("…"), psycopg.errors.SerializationFailure(), StoreConflict),
        (OperationalError("…"), psycopg.errors.DeadlockDetected(), StoreConflict),
        (OperationalError("…"), psycopg.errors.QueryCanceled(), StoreRefused),
        (OperationalError("…"), psycopg.errors.AdminShutdown(), StoreUnavailable),
        (OperationalError("…"), psycopg.OperationalError("the connection is closed"), StoreUnavailable),
        *((OperationalError(number, "…"), None, StoreConflict) for number in (1205, 1213, 1020, 3572)),
        *((OperationalError(number, "…"), None, StoreRefused) for number in (1969, 1317, 3024)),
        (OperationalError(2006, 1205), None, StoreUnavailable),
        (OperationalError(), None, StoreUnavailable),
        (OperationalError("…"), sqlite_error("SQLITE_BUSY"), StoreConflict),
        (OperationalError("…"), sqlite_error("SQLITE_BUSY_SNAPSHOT"), StoreConflict),
        (OperationalError("…"), sqlite_error("SQLITE_LOCKED_SHAREDCACHE"), StoreConflict),
        (OperationalError("…"), sqlite_error("SQLITE_FULL"), StoreUnavailable),
        (InterfaceError("connection already closed"), None, StoreUnavailable),
    ],
    ids=str,
)
def test_whether_another_transaction_was_in_the_way_or_it_took_too_long_is_told_from_a_store_that_is_away(
    error, cause, kind
):
    with pytest.raises(StoreUnavailable) as raised, store_errors():
        raise error from cause
    assert type(raised.value) is kind


@pytest.mark.postgresql
@pytest.mark.parametrize(
    ("sql", "error"),
    [
        ("DEALLOCATE nothing", StoreUnavailable),  # an InternalError
        ("SELECT nothing", ProgrammingError),
        ("SELECT 1 / 0", DataError),
    ],
)
def test_a_mistake_in_a_statement_is_not_taken_for_a_store_that_is_away(sql, error):
    with pytest.raises(error), store_errors():
        connection.cursor().execute(sql)


def test_what_a_database_said_is_told_without_what_may_quote_a_row():
    assert database.told(IntegrityError("duplicate key\nDETAIL: Key (key)=(secret)")) == "IntegrityError: duplicate key"


@pytest.mark.postgresql
def test_whoever_does_not_get_the_row_lock_has_lost_its_claim(store, other):
    claim = claimed(store)
    block = lock_in(other, store, claim)
    with transaction.atomic():
        connection.cursor().execute("SET LOCAL lock_timeout = '20ms'")
        assert store.lock(claim, ATOMIC) is False
        transaction.set_rollback(True)
    commit(other, block)


@pytest.mark.postgresql
def test_a_record_made_by_other_means_in_the_same_moment_is_seen_when_asked_for_again(other):
    block = transaction.atomic()
    other(block.__enter__)
    made = other(DatabaseStore().claim, operation(), uuid4(), ATOMIC)
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(in_threads, 1, lambda _: engine.claim(operation(), LEASE))
        eventually(someone_waits_for_a_lock)
        commit(other, block)
        (outcome,) = asking.result(10)
    assert outcome.attempt == 2
    assert outcome.id == made.id


ASKING = {
    "claim": lambda store, claim: store.claim(operation(), uuid4(), ATOMIC),
    "contend": lambda store, claim: store.contend(claim.id, ATOMIC).__enter__(),
    "read": lambda store, claim: store.read(claim.id, ATOMIC),
    "now": lambda store, claim: store.now(ATOMIC),
    "lock": lambda store, claim: store.lock(claim, ATOMIC),
    "complete": lambda store, claim: store.complete(claim, ANSWER, ATOMIC),
    "fail": lambda store, claim: store.fail(claim, "broke", ATOMIC),
    "release": lambda store, claim: store.release(claim, ATOMIC),
    "renew": lambda store, claim: store.renew([claim], ATOMIC),
    "count_replays": lambda store, claim: store.count_replays({claim.id: 1}, ATOMIC),
}


@pytest.mark.row_locks
@pytest.mark.parametrize("ask", ASKING.values(), ids=ASKING)
def test_whatever_is_asked_a_store_that_can_not_be_reached_is_unavailable(store, ask, monkeypatch):
    claim = claimed(store)
    connection.close()
    with monkeypatch.context() as patch:
        patch.setitem(connection.settings_dict, "HOST", "127.0.0.1")
        patch.setitem(connection.settings_dict, "PORT", free_port())
        with pytest.raises(StoreUnavailable):
            ask(store, claim)


@pytest.mark.row_locks
@pytest.mark.parametrize("mode", ["atomic", "lease"])
def test_records_are_in_the_database_that_the_policy_states_and_nowhere_else(store, other_alias, mode):
    policy = Policy(using=other_alias, mode=mode, grace=0)
    holding = Policy(using=other_alias, mode="lease", on_crash="hold")
    records = IdempotencyRecord.objects.using(other_alias)

    def run(verdict, key="k"):
        with engine.execution(engine.claim(operation(key), policy), policy) as run:
            run.settle(verdict)

    def lapse(claim):
        long_ago = store.now(policy) - timedelta(days=9)
        records.filter(pk=claim.id).update(locked_at=long_ago, locked_until=long_ago)

    run(Release())
    assert not records.exists()
    run(Fail("broke"))
    run(Keep(ANSWER))
    assert engine.claim(operation(), policy) == Replay(ANSWER)
    assert engine.duplicate(operation(), policy) == Replay(ANSWER)
    store.count_replays({operation().id: 2}, policy)
    assert records.get().replays == 2

    lapse(engine.claim(operation("dead"), policy))
    taken = engine.claim(operation("dead"), policy)
    assert taken.taken_over
    assert store.renew([taken], policy) == {taken.token}
    lapse(engine.claim(operation("held"), holding))
    assert isinstance(engine.claim(operation("held"), holding), Held)
    assert records.count() == 3


def test_the_stores_time_is_now_whatever_it_has(store):
    claim = claimed(store)
    shift(claim, created_at=-timedelta(days=9))
    assert timedelta(seconds=-1) < store.now(ATOMIC) - _database_time() < timedelta(seconds=9)


@pytest.mark.postgresql
@LOCKS
@pytest.mark.parametrize(
    "lacking",
    ["has_select_for_update_nowait", "has_select_for_update_skip_locked", "has_select_for_no_key_update"],
)
def test_a_free_record_is_locked_on_a_database_that_lacks_a_kind_of_lock(lock, lacking, monkeypatch):
    store = DatabaseStore()
    claim, policy = claimed(store), Policy(lock=lock)
    monkeypatch.setattr(connection.features, lacking, False)
    with store.contend(claim.id, policy) as record:
        assert record.token == claim.token


@pytest.mark.postgresql
def test_that_a_partition_is_missing_is_logged_without_the_row_that_has_none(db, caplog):
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute(f"CREATE TEMP TABLE divided (key text, CONSTRAINT {UNTIL} CHECK (false))")
        with pytest.raises(StoreUnavailable, match="idempotency_partitions ensure"), store_errors():
            cursor.execute("INSERT INTO divided VALUES ('the-raw-key')")
        transaction.set_rollback(True)
    (said,) = caplog.records
    assert (said.event, said.levelname, said.record_id) == ("no_partition", "CRITICAL", None)
    assert "23514" in said.getMessage()
    assert "the-raw-key" not in caplog.text


def test_times_are_the_databases_own_in_whatever_time_zone_it_is(store, monkeypatch):
    began = _database_time()
    monkeypatch.setattr(timezone, "now", lambda: pytest.fail("the application's clock was asked"))
    connection.cursor().execute(ZONES[connection.vendor])
    claim = claimed(store)
    connection.close()
    record = store.read(claim.id, ATOMIC)
    for told in (record.created_at, record.locked_at, record.now):
        assert timedelta(seconds=-1) < told - began < timedelta(seconds=9)


def _database_time() -> datetime:
    """In UTC, by other means than the package's."""
    seconds = {"postgresql": "extract(epoch FROM now())", "mysql": "UNIX_TIMESTAMP(NOW(6))", "sqlite": "unixepoch()"}
    with connection.cursor() as cursor:
        cursor.execute(f"SELECT {seconds[connection.vendor]}")
        return datetime.fromtimestamp(float(cursor.fetchone()[0]), tz=timezone.get_fixed_timezone(0))


# --- The engine on every store ---------------------------------------------------------------------------------------


@pytest.fixture
def user():
    return get_user_model().objects.create_user("carol")


def perform(user, policy: Policy = ATOMIC, *, key: str = "k", hold=lambda: None):
    """Claim, and run if claimed: one ledger entry."""
    outcome = engine.claim(operation(key), policy)
    if not isinstance(outcome, Claimed):
        return outcome
    try:
        with engine.execution(outcome, policy) as run:
            LedgerEntry.objects.create(user=user, amount=1, reference=key)
            hold()
            run.settle(Keep(ANSWER))
    except ClaimLost:
        return engine.duplicate(outcome.operation, policy)
    return outcome


def kinds(outcomes) -> Counter[str]:
    return Counter(type(outcome).__name__ for outcome in outcomes)


@MODES
@LOCKS
def test_of_concurrent_callers_one_runs_and_the_others_are_told(store, user, policy, lock):
    policy = Policy(mode=policy.mode, lock=lock)
    told = kinds(in_threads(MANY, lambda _index: perform(user, policy)))
    assert told["Claimed"] == 1
    assert told.keys() <= {"Claimed", "InFlight", "Replay"}
    assert LedgerEntry.objects.count() == 1
    assert perform(user, policy) == Replay(ANSWER)


@LOCKS
def test_with_no_grace_at_all_there_is_still_one_effect(store, user, lock):
    policy = Policy(grace=0, lock=lock)
    for key in "abcde":
        told = in_threads(MANY, lambda _index, key=key: perform(user, policy, key=key))
        assert kinds(told).keys() <= {"Claimed", "InFlight", "Replay"}
    assert LedgerEntry.objects.count() == 5


@LOCKS
def test_callers_that_wait_all_get_the_one_answer(store, user, lock):
    policy = Policy(in_flight="wait", lock=lock)
    told = kinds(in_threads(MANY, lambda _index: perform(user, policy)))
    assert told == {"Claimed": 1, "Replay": MANY - 1}
    assert LedgerEntry.objects.count() == 1


@pytest.mark.usefixtures("impatient")
@LOCKS
def test_a_live_holder_is_never_taken_over_however_slow(store, other, lock):
    policy = Policy(grace=0, lock=lock)
    claim = claimed(store, policy)
    lapse(claim)
    block = lock_in(other, store, claim, policy)
    assert engine.claim(operation(), policy) == InFlight(retry_after=1)
    assert other(store.complete, claim, ANSWER, policy)
    commit(other, block)
    assert engine.claim(operation(), policy) == Replay(ANSWER)


@pytest.mark.usefixtures("impatient")
@LOCKS
def test_a_dead_holder_is_taken_over_at_once_and_its_effects_are_gone(store, other, user, lock):
    policy = Policy(lock=lock)
    claim = claimed(store, policy)
    lock_in(other, store, claim, policy)
    other(LedgerEntry.objects.create, user=user, amount=1, reference="k")
    other(lambda: connection.close())
    outcome = eventually(lambda: _run_if_claimed(user, policy), within=2)
    assert (outcome.attempt, outcome.taken_over) == (2, True)
    assert LedgerEntry.objects.count() == 1
    assert not store.complete(claim, ANSWER, policy)


def _run_if_claimed(user, policy):
    outcome = perform(user, policy)
    return outcome if isinstance(outcome, Claimed) else None


def test_a_claim_without_its_row_lock_yet_is_let_alone_for_the_grace(store):
    claimed(store)
    began = time.monotonic()
    outcome = engine.claim(operation(), Policy(grace=0.3))
    assert outcome.taken_over
    assert time.monotonic() - began > 0.2


def test_whoever_comes_within_the_grace_looks_again_every_hundredth_of_a_second(store, monkeypatch):
    pauses, claim = [], claimed(store)

    def complete_at_the_third(seconds):
        pauses.append(seconds)
        if len(pauses) == 3:
            store.complete(claim, ANSWER, ATOMIC)

    monkeypatch.setattr(engine.time, "sleep", complete_at_the_third)
    assert engine.claim(operation(), Policy(grace=5)) == Replay(ANSWER)
    assert pauses == [0.01] * 3


def _dead(store, policy):
    lapse(claimed(store, policy))


def _failed(store, policy):
    store.fail(claimed(store, policy), "broke", policy)


def _expired(store, policy):
    claim = claimed(store, policy)
    store.complete(claim, ANSWER, policy)
    expire(claim)


@MODES
@LOCKS
@pytest.mark.parametrize(("before", "attempt"), [(_dead, 2), (_failed, 2), (_expired, 1)])
def test_a_record_that_may_change_hands_goes_to_one_of_its_concurrent_callers(
    store, user, policy, lock, before, attempt
):
    policy = Policy(mode=policy.mode, lock=lock, grace=5)  # on a slow machine too, nobody is taken for dead
    before(store, policy)
    told = in_threads(MANY, lambda _index: perform(user, policy))
    (winner,) = [outcome for outcome in told if isinstance(outcome, Claimed)]
    assert (winner.attempt, winner.taken_over) == (attempt, before is _dead)
    assert kinds(told).keys() <= {"Claimed", "InFlight", "Replay"}
    assert LedgerEntry.objects.count() == 1


@MODES
@pytest.mark.parametrize("what", ["scope", "key"])
def test_a_record_of_another_key_with_the_same_digest_is_an_error_and_nobodys_answer(store, policy, what):
    store.complete(claimed(store, policy), ANSWER, policy)
    IdempotencyRecord.objects.update(**{what: "another"})
    before = IdempotencyRecord.objects.values().get()
    with pytest.raises(DigestCollision):
        engine.claim(operation(), policy)
    assert IdempotencyRecord.objects.values().get() == before


def test_a_live_lease_is_not_taken_over_and_a_lapsed_one_is(store):
    claim = claimed(store, LEASE)
    assert isinstance(engine.claim(operation(), LEASE), InFlight)
    lapse(claim)
    assert engine.claim(operation(), LEASE).taken_over


@LOCKS
def test_a_crash_that_a_person_has_to_judge_is_held_for_all(store, lock):
    policy = Policy(mode="lease", on_crash="hold", lock=lock)
    lapse(claimed(store, policy))
    told = in_threads(MANY, lambda _index: engine.claim(operation(), policy))
    assert kinds(told).keys() <= {"Held", "InFlight"}
    assert isinstance(engine.claim(operation(), policy), Held)


@pytest.mark.parametrize("before", [lambda store, policy: claimed(store, policy), _dead, _failed])
@MODES
def test_another_request_under_the_key_is_a_mismatch_whatever_the_state(store, policy, before):
    before(store, policy)
    record = store.read(operation().id, policy)
    assert engine.claim(operation(body=b"other"), policy) == Mismatch()
    assert store.read(operation().id, policy) == replace(record, now=ANY)


@pytest.mark.server
def test_no_caller_gets_a_500_from_a_database_that_is_busy(server):
    def pay(index: int) -> int:
        body = {"amount": 1, "currency": "EUR", "reference": f"busy-{index % 4}"}
        return server.post("/api/charges/", body, key=f"busy-{index % 4}").status_code

    assert set(in_threads(12, pay)) <= {201, 409, 503}
    assert [server.ledger(f"busy-{index}") for index in range(4)] == [1, 1, 1, 1]


def test_headers_come_back_as_they_were_stored(store):
    claim = claimed(store)
    headers = (("X-Json", '{"a": "ü"}'), ("X-Empty", ""))
    store.complete(claim, StoredResponse(200, headers, b""), ATOMIC)
    assert store.read(claim.id, ATOMIC).response.headers == headers


@pytest.fixture
def only_reads():
    """Connect anew, to a server that only reads; and to one that writes, with the next connection."""
    with _connecting_with("default_transaction_read_only=on") as undo:
        yield undo


@contextmanager
def _connecting_with(setting):
    connection.close()
    with pytest.MonkeyPatch.context() as patch:
        options = connection.settings_dict["OPTIONS"] | {"options": f"-c {setting}"}
        patch.setitem(connection.settings_dict, "OPTIONS", options)
        connection.ensure_connection()
        yield patch.undo
    connection.close()


@pytest.mark.postgresql
@MODES
def test_a_server_that_only_reads_is_a_store_that_is_unavailable(store, only_reads, policy):
    with pytest.raises(StoreUnavailable, match="read-only"):
        engine.claim(operation(), policy)


@pytest.mark.postgresql
@MODES
def test_after_a_failover_the_claim_finds_the_server_that_writes(store, only_reads, policy):
    only_reads()
    assert isinstance(engine.claim(operation(), policy), Claimed)


@MODES
def test_with_autocommit_off_nothing_is_claimed_because_nobody_would_commit_it(store, policy):
    transaction.set_autocommit(False)
    try:
        with pytest.raises(ClaimInsideTransaction):
            engine.claim(operation(), policy)
    finally:
        transaction.rollback()
        transaction.set_autocommit(True)
    assert store.read(operation().id, policy) is None
