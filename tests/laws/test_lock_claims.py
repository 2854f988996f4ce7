"""The laws where the claim is a lock: nothing shows that a run is in progress but what
its transaction has locked.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from uuid import uuid4

import pytest
from django.db import connection, transaction
from django.db.backends.postgresql.psycopg_any import IsolationLevel
from django.http import HttpResponse

from django_idempotency import engine, signals
from django_idempotency.messages import (
    AlreadyDone,
    Consumer,
    Done,
    Exhausted,
    Message,
    Retry,
)
from django_idempotency.models import IdempotencyRecord
from django_idempotency.stores import lock_claims, postgresql, store_for
from django_idempotency.stores.base import Owned, Unlocked
from django_idempotency.stores.claim_function import request_lock
from django_idempotency.stores.database import DatabaseStore
from django_idempotency.stores.transactions import Transaction
from django_idempotency.values.exceptions import (
    ClaimInsideTransaction,
    TerminalFailure,
    TransactionEnded,
)
from django_idempotency.values.outcomes import Keep, StoredResponse
from django_idempotency.values.policy import Atomic, Policy
from tests.laws.test_ended_transaction import COMMITTED
from tests.support.callers import (
    Gate,
    claim,
    effects,
    entry_point,
    heard,
    is_replay,
    operation,
    pay,
    paying,
    record,
)
from tests.support.proxy import Cut
from tests.support.sql import run_sql
from tests.support.threads import in_threads, just_after, just_before
from tests.support.views_of_laws import OTHER_BODY, completed
from tests.support.waiting import eventually

pytestmark = [
    pytest.mark.postgresql,
    pytest.mark.not_on_citus,
    pytest.mark.usefixtures("payer"),
]

KINDS = ("record", "lock")
IN_CLAIM, IN_INSERT = (
    r"\s*SELECT pg_backend_pid",
    r"\s*INSERT INTO django_idempotency_record",
)


def by_lock(view, **policy):
    return entry_point(view, **{"mode": Atomic(claim="lock")} | policy)


def elsewhere(work, *args, **named):
    """What ``work`` returns in another thread, by a connection of its own."""
    return in_threads(1, lambda _index: work(*args, **named))[0]


def test_l1_claims_of_both_kinds_race_for_a_key():
    def race(number):
        answers = in_threads(
            4,
            lambda index: entry_point(paying, mode=Atomic(claim=KINDS[index % 2]))(
                f"k{number}"
            ),
        )
        assert {answer.status_code for answer in answers} <= {201, 409}
        last = entry_point(paying, mode=Atomic(claim=KINDS[number % 2]))(f"k{number}")
        assert last.status_code == 201
        assert {answer.content for answer in answers if answer.status_code == 201} <= {
            last.content
        }

    for number in range(15):
        race(number)
    assert effects() == 15


@pytest.mark.parametrize(
    ("owner", "other"), [("lock", "lock"), ("lock", "record"), ("record", "lock")]
)
def test_l10_a_run_in_progress_is_seen_by_claims_of_both_kinds(owner, other):
    with Gate().running(mode=Atomic(claim=owner)) as answer:
        assert (record() is None) == (owner == "lock")
        assert (
            elsewhere(entry_point(paying, mode=Atomic(claim=other))).status_code == 409
        )
        assert (
            elsewhere(
                entry_point(paying, mode=Atomic(claim=other)), body=OTHER_BODY
            ).status_code
            == 422
        )
        assert (
            elsewhere(
                entry_point(paying, mode=Atomic(claim=other)), "k2", body=OTHER_BODY
            ).status_code
            == 201
        )
    assert answer.result(60).status_code == 201
    assert is_replay(entry_point(paying, mode=Atomic(claim=other))())
    assert effects() == 2


@pytest.mark.parametrize("other", KINDS)
def test_a_caller_that_waits_for_a_lock_claim_gets_the_response(other):
    gate = Gate()
    with (
        gate.running(mode=Atomic(claim="lock")) as first,
        heard(signals.request_rejected) as rejected,
    ):
        waits = entry_point(paying, mode=Atomic(claim=other), wait=60)
        gate.let_go.set()
        answer = elsewhere(waits)
    assert (is_replay(answer), answer.content) == (True, first.result(60).content)
    assert (effects(), rejected) == (1, [])


def test_a_receiver_that_claims_another_key_leaves_the_run_alone():
    refused = []

    def claim_another(operation, **_named):
        if operation.key == "k":
            with pytest.raises(ClaimInsideTransaction):
                claim("another", policy=Policy(mode=Atomic(claim="lock")))
            refused.append(operation.key)

    signals.key_claimed.connect(claim_another)
    try:
        answer = by_lock(paying)("k")
    finally:
        signals.key_claimed.disconnect(claim_another)
    assert (answer.status_code, refused, effects()) == (201, ["k"], 1)
    assert is_replay(by_lock(paying)("k"))


def test_a_request_has_one_lock_whatever_key_digests_it(settings):
    settings.IDEMPOTENCY = {
        "DIGEST_KEYS": ["aGVsbG8gd29ybGQsIHRoaXMgaXMgYSBrZXkuLi4uLi4="]
    }
    under_a_key = operation()
    settings.IDEMPOTENCY = {}
    assert operation().fingerprint != under_a_key.fingerprint
    assert request_lock(operation()) == request_lock(under_a_key)
    assert request_lock(operation(body=OTHER_BODY)) != request_lock(under_a_key)


def test_the_lock_of_an_ending_transaction_is_not_a_mismatch(other_thread, monkeypatch):
    """What a transaction has locked goes bit by bit: here its request's lock has gone
    first.
    """
    owner_lock = f"SELECT pg_advisory_lock({postgresql.OWNER_LOCK.format(id='%s')})"
    other_thread(
        lambda: connection.cursor().execute(
            owner_lock, [operation().id, operation().id]
        )
    )
    store = postgresql.PostgreSQLStore(Policy(), "default")
    assert store._meet_owner(operation()) == Owned(same=None)
    monkeypatch.setattr(engine.waiting, "PATIENCE", 0.1)
    assert by_lock(paying, mode=Atomic(takeover_grace=0))().status_code == 503
    assert by_lock(paying)("free").status_code == 201


@pytest.mark.parametrize("status", [500, 503, None], ids=["500", "503", "an exception"])
def test_l3_what_fails_leaves_nothing(status):
    def view(request):
        pay()
        if status is None:
            raise LookupError
        return HttpResponse(status=status)

    with (
        heard(signals.key_failed) as failed,
        nullcontext() if status else pytest.raises(LookupError),
    ):
        assert by_lock(view)().status_code == status
    assert (effects(), record(), len(failed)) == (0, None, 1)
    assert by_lock(paying)().status_code == 201


def declining(request):
    pay()
    raise TerminalFailure(HttpResponse("declined", status=402))


@pytest.mark.parametrize("rival", KINDS)
def test_a_terminal_failure_yields_to_a_request_that_ran_meanwhile(rival):
    with once_rolled_back(
        lambda: elsewhere(entry_point(paying, mode=Atomic(claim=rival)))
    ):
        answer = by_lock(declining)()
    assert (answer.status_code, is_replay(answer), effects()) == (201, True, 1)


def test_a_terminal_failure_is_stored_once_a_caller_that_only_looks_has_gone():
    looks = (
        "SELECT"
        f" pg_try_advisory_xact_lock_shared({postgresql.OWNER_LOCK.format(id='%s')})"
    )
    threads, held = ThreadPoolExecutor(1), operation().id

    def look():
        with connection.cursor() as cursor:
            cursor.execute("BEGIN")
            cursor.execute(looks, [held, held])

    def go():
        run_sql("ROLLBACK")  # a session that is only closed has its locks for a moment
        connection.close()

    with (
        threads,
        once_rolled_back(
            lambda: threads.submit(look).result(60),
            then=lambda: threads.submit(go).result(60),
        ),
    ):
        assert by_lock(declining)().status_code == 402
    assert is_replay(by_lock(declining)())


@contextmanager
def once_rolled_back(act, then=None):
    real = lock_claims.LockClaimStore._claim_by_lock
    calls = []

    def claim_again(store, *args):
        calls.append(args)
        if len(calls) == 2:
            act()
        if len(calls) == 4 and then:
            then()
        return real(store, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lock_claims.LockClaimStore, "_claim_by_lock", claim_again)
        yield
    assert len(calls) > 1


def test_l5_a_released_key_whose_transaction_has_ended_is_an_error():
    def view(request):
        COMMITTED["COMMIT"]()
        return HttpResponse(status=404)

    with pytest.raises(TransactionEnded):
        by_lock(view)()
    assert record().on_hold


def make_record():
    store = DatabaseStore(Policy(scope="public"), "default")
    claimed = store.claim(operation(), uuid4())
    assert store.complete(claimed, StoredResponse(201, (), b"the other's"))


def test_l5_a_write_after_a_rollback_is_lost_to_a_record_made_meanwhile():
    store = store_for(POLICY)
    claimed = engine.claim(operation(), POLICY)
    store.transaction(claimed).roll_back()
    with pytest.raises(TransactionEnded):
        store.transaction(claimed)
    with just_before(IN_INSERT, lambda: elsewhere(make_record)):
        assert not store.complete(store.unlocked(claimed), StoredResponse(201))
    assert record().response_body == b"the other's"


def test_l5_a_record_made_meanwhile_undoes_the_run():
    """As by a process that can't call the functions: it does not meet the lock."""

    def view(request):
        elsewhere(make_record)
        return paying(request)

    with heard(signals.stale_write_rejected) as rejected:
        answer = by_lock(view)()
    assert (is_replay(answer), answer.content, effects(), len(rejected)) == (
        True,
        b"the other's",
        0,
        1,
    )


def test_l6_a_record_that_is_stuck_is_taken_over_as_records_are():
    claim(policy=Policy(scope="public"))
    answer = by_lock(paying, mode=Atomic(takeover_grace=0))()
    assert (answer.status_code, is_replay(answer), record().attempts, effects()) == (
        201,
        False,
        2,
        1,
    )


def test_a_commit_that_never_arrived_is_not_taken_for_anothers_that_looks_the_same(
    proxy,
):
    hooks = []

    def view(request):
        transaction.on_commit(lambda: hooks.append(request))
        pay()
        return HttpResponse("the same", status=201)

    def first(request):
        rival = lambda: eventually(lambda: completed(by_lock(view)()))  # noqa: E731
        proxy.cut, proxy.meanwhile = Cut.BEFORE_COMMIT, lambda: elsewhere(rival)
        return view(request)

    assert is_replay(by_lock(first)())
    assert (effects(), len(hooks)) == (1, 1)


def test_a_commit_is_in_doubt_for_as_long_as_its_locks_are_taken(other_thread):
    policy = Policy(mode=Atomic(claim="lock"), scope="public")
    store = store_for(policy)
    run = other_thread(
        engine.execution,
        claimed := other_thread(engine.claim, operation(), policy),
        policy,
    )
    other_thread(run.__enter__).verdict = Keep(StoredResponse(201))
    assert store.read_after_commit(claimed) is Unlocked.BUSY
    other_thread(run.__exit__, None, None, None)
    assert store.read_after_commit(claimed).response == StoredResponse(201)
    assert (
        store.read_after_commit(replace(claimed, operation=operation("another")))
        is Unlocked.ABSENT
    )


@pytest.fixture
def isolated(monkeypatch):
    with monkeypatch.context() as patch:

        def at(level):
            connection.close()
            options = connection.settings_dict["OPTIONS"] | {"isolation_level": level}
            patch.setitem(connection.settings_dict, "OPTIONS", options)

        yield at
    connection.close()


def test_at_repeatable_read_a_snapshot_older_than_the_lock_runs_nothing_twice(
    isolated, monkeypatch
):
    isolated(IsolationLevel.REPEATABLE_READ)
    real = Transaction.begin

    def with_a_snapshot(transaction):
        real(transaction)
        if not first:
            connection.cursor().execute("SELECT 1")

    first = []
    with (
        monkeypatch.context() as patch,
        just_before(IN_CLAIM, lambda: first.append(elsewhere(by_lock(paying)))),
    ):
        patch.setattr(Transaction, "begin", with_a_snapshot)
        answer = by_lock(paying)()
    assert (is_replay(answer), answer.content, effects()) == (True, first[0].content, 1)


# The statement has its snapshot before it waits.
WAIT = "WITH held_up AS MATERIALIZED (SELECT pg_advisory_lock_shared(77) IS NOT NULL) "
WAITING = (
    "SELECT 1 FROM pg_locks WHERE locktype = 'advisory' AND objid = 77 AND NOT granted"
    " AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
)


def test_at_repeatable_read_a_read_after_commit_is_younger_than_the_locks(
    other_thread, monkeypatch
):
    policy = Policy(mode=Atomic(claim="lock"), scope="public")
    run = engine.execution(claimed := engine.claim(operation(), policy), policy)
    run.__enter__().verdict = Keep(StoredResponse(201))
    monkeypatch.setattr(postgresql, "MEET", f"{WAIT}{postgresql.MEET} FROM held_up")
    run_sql("SELECT pg_advisory_lock(77)")
    other_thread(run_sql, "SET default_transaction_isolation = 'repeatable read'")
    with ThreadPoolExecutor(1) as pool:
        read = pool.submit(other_thread, store_for(policy).read_after_commit, claimed)
        eventually(lambda: run_sql(WAITING))
        run.__exit__(None, None, None)
        run_sql("SELECT pg_advisory_unlock(77)")
        assert read.result(60).response == StoredResponse(201)


@pytest.mark.parametrize(
    ("level", "kind"), [("REPEATABLE_READ", "lock"), ("SERIALIZABLE", "record")]
)
def test_above_read_committed_a_key_runs_once(isolated, level, kind):
    isolated(IsolationLevel[level])
    with Gate().running(mode=Atomic(claim="lock")):
        assert (record() is None) == (kind == "lock")
        assert elsewhere(by_lock(paying)).status_code == 409
    assert is_replay(by_lock(paying)())
    answers = in_threads(4, lambda _: by_lock(paying)("k2"))
    assert {answer.status_code for answer in answers} <= {201, 409}
    assert effects() == 2


POLICY = Policy(mode=Atomic(claim="lock"))


def test_attempts_of_a_message_are_counted_once_it_has_failed():
    def handler(message, context):
        pay()
        attempts.append(context.attempt)
        raise LookupError

    attempts = []
    consumer = Consumer("c", handler, policy=POLICY, max_attempts=3)
    deliveries = [
        consumer.consume(Message("queue", "1", b"{}")) for _delivery in range(3)
    ]
    assert [type(delivery) for delivery in deliveries] == [Retry, Retry, Exhausted]
    assert (attempts, effects()) == ([1, 2, 3], 0)


def test_attempts_of_a_redelivered_message_are_counted_before_they_have_ended():
    """A process may have died in the handler. Of a lock, nothing would be left to
    tell.
    """

    def handler(message, context):
        attempts.append(
            elsewhere(
                IdempotencyRecord.objects.values_list("attempts", flat=True).first
            )
        )

    attempts = []
    consumer = Consumer("c", handler, policy=POLICY)
    for id, redelivered in (("1", True), ("2", False)):
        consumer.consume(Message("queue", id, b"{}", redelivered=redelivered))
        IdempotencyRecord.objects.all().delete()
    assert attempts == [1, None]


def test_messages_that_are_handled_together_are_claimed_by_records():
    consumer = Consumer("c", lambda message, context: str(pay().pk), policy=POLICY)
    messages = [Message("queue", str(number), b"{}") for number in range(5)]
    consumer.consume(messages[3])
    deliveries = consumer.consume_many(messages)
    assert [type(delivery) for delivery in deliveries] == [
        Done,
        Done,
        Done,
        AlreadyDone,
        Done,
    ]
    assert effects() == 5


def test_l4_nothing_is_committed_between_the_response_and_the_effects(other_thread):
    seen = []
    with just_after(
        IN_INSERT, lambda: seen.append((other_thread(effects), other_thread(record)))
    ):
        assert by_lock(paying)().status_code == 201
    assert seen == [(0, None)]
    assert (effects(), record().response_status) == (1, 201)
