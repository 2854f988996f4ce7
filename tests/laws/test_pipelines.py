"""L1, L3, L4, L8: what begins a business transaction, and what ends it, may be cut
anywhere.
"""

from __future__ import annotations

import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from urllib.parse import urlsplit

import pytest
from django.db import close_old_connections, connection, connections, transaction

from django_idempotency import engine
from django_idempotency.messages import Ack, Consumer, Message
from django_idempotency.stores import pipeline
from django_idempotency.values.policy import Atomic, Policy
from testproject.models import LedgerEntry
from tests.support.callers import effects, entry_point, is_replay, paying, record
from tests.support.proxy import Cut, Moment
from tests.support.sql import run_sql, value_of
from tests.support.statements import sent_statements
from tests.support.threads import in_threads, locked
from tests.support.views_of_laws import completed
from tests.support.waiting import eventually, someone_waits_for_a_lock

pytestmark = [
    pytest.mark.postgresql,
    pytest.mark.not_on_citus,
    pytest.mark.usefixtures("payer"),
]

of_both_kinds = pytest.mark.parametrize("kind", ["lock", "record"])
AT_COMMIT = [cut for cut in Cut if "COMMIT" in cut.name]
AT_BEGIN = [cut for cut in Cut if "BEGIN" in cut.name]
COMMITTED = (Moment.AFTER, Moment.UNSYNCED, Moment.CRASHED)
prepared_or_not = pytest.mark.parametrize(
    "earlier", ["", "abcd"], ids=["unprepared", "prepared"]
)


def warm_up(keys, kind):
    connection.ensure_connection()
    for key in keys:
        assert entry_point(paying, mode=Atomic(claim=kind))(key).status_code == 201
    LedgerEntry.objects.all().delete()


@of_both_kinds
@prepared_or_not
@pytest.mark.parametrize("cut", AT_COMMIT, ids=lambda cut: cut.name)
def test_the_end_takes_place_as_a_whole_or_not_at_all(proxy, kind, earlier, cut):
    hooks = []

    def view(request):
        transaction.on_commit(lambda: hooks.append(request))
        proxy.cut = cut
        return paying(request)

    warm_up(earlier, kind)
    committed = cut.moment in COMMITTED
    first = entry_point(view, mode=Atomic(claim=kind))()
    assert (first.status_code, is_replay(first)) == (201 if committed else 503, False)
    assert (effects(), len(hooks), proxy.cuts) == (committed, committed, 1)
    again = eventually(
        lambda: completed(entry_point(paying, mode=Atomic(claim=kind))())
    )
    assert (is_replay(again), effects(), record().status) == (committed, 1, "completed")


@of_both_kinds
@prepared_or_not
@pytest.mark.parametrize("cut", AT_BEGIN, ids=lambda cut: cut.name)
def test_the_beginning_of_a_run_may_be_cut_anywhere(proxy, kind, earlier, cut):
    warm_up(earlier, kind)
    proxy.cut = cut
    first = entry_point(paying, mode=Atomic(claim=kind))()
    assert first.status_code in ((201, 409) if kind == "lock" else (503,))
    assert proxy.cuts == 1
    assert (
        eventually(
            lambda: completed(
                entry_point(paying, mode=Atomic(claim=kind, takeover_grace=0))()
            )
        ).status_code
        == 201
    )
    assert effects() == 1


@pytest.mark.parametrize("kind", ["lock", "record", "batch"])
@pytest.mark.parametrize("cut", AT_COMMIT, ids=lambda cut: cut.name)
def test_messages_end_as_requests_do(proxy, kind, cut):
    def handle(message, context):
        if not proxy.cuts and message.id == "last":
            proxy.cut = cut
        return paying(None).content.decode()

    policy = Policy(
        mode=Atomic(claim="record" if kind == "batch" else kind, takeover_grace=0)
    )
    consumer = Consumer("c", handle, policy=policy)
    messages = [Message("queue", id, b"{}") for id in ("first", "last")]
    consume = (
        consumer.consume_many
        if kind == "batch"
        else lambda batch: [*map(consumer.consume, batch)]
    )
    consume(messages)
    assert proxy.cuts == 1
    eventually(lambda: all(isinstance(delivery, Ack) for delivery in consume(messages)))
    assert effects() == 2


AT_THE_END = """
CREATE OR REPLACE FUNCTION {name}() RETURNS trigger LANGUAGE plpgsql
    AS $$ BEGIN {body}; RETURN NULL; END $$;
CREATE CONSTRAINT TRIGGER {name} AFTER INSERT ON testproject_ledgerentry
DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION {name}()
"""


@contextmanager
def at_commit(body):
    """Execute ``body`` in each COMMIT of an effect."""
    run_sql(AT_THE_END.format(name="at_the_end", body=body))
    try:
        yield
    finally:
        run_sql("DROP FUNCTION at_the_end CASCADE")


def outcome_of(ask):
    try:
        return ask().status_code
    except Exception as error:
        return type(error).__name__


@of_both_kinds
@pytest.mark.parametrize(
    "sqlstate", ["23505", "22012", "2201F", "26000", "0A000", "23514", "40001", "XX000"]
)
def test_an_error_of_commit_is_not_taken_for_one_of_the_write(kind, sqlstate):
    """Whatever its code, and with the same outcome as where the statements go one by
    one.
    """

    def ask():
        return entry_point(paying, mode=Atomic(claim=kind))()

    with at_commit(f"RAISE 'at the end' USING ERRCODE = '{sqlstate}'"):
        together = outcome_of(ask)
        with connection.execute_wrapper(lambda execute, *details: execute(*details)):
            assert outcome_of(ask) == together != 201
    assert effects() == 0
    assert (ask().status_code, is_replay(ask()), effects()) == (201, True, 1)


@of_both_kinds
def test_a_cancelled_commit_is_a_failure(kind):
    """As by an administrator. A statement timeout does not reach what COMMIT
    executes.
    """

    def view(request):
        pool.submit(cancel, connection.connection.info.backend_pid)
        return paying(request)

    def cancel(process):
        in_commit = (
            f"SELECT 1 FROM pg_stat_activity WHERE pid = {process} AND query = 'COMMIT'"
            " AND state = 'active'"
        )
        eventually(lambda: run_sql(in_commit))
        run_sql(f"SELECT pg_cancel_backend({process})")
        connection.close()

    with at_commit("PERFORM pg_sleep(600)"), ThreadPoolExecutor(1) as pool:
        assert entry_point(view, mode=Atomic(claim=kind))().status_code == 503
    assert effects() == 0
    assert (
        eventually(
            lambda: completed(entry_point(paying, mode=Atomic(claim=kind))())
        ).status_code
        == 201
    )


def test_a_statement_timeout_in_the_write_commits_nothing(other_thread):
    def view(request):
        for statement in (
            "BEGIN",
            "LOCK TABLE django_idempotency_record IN SHARE MODE",
        ):
            other_thread(run_sql, statement)
        response = paying(request)
        run_sql("SET LOCAL statement_timeout = '100ms'")
        return response

    assert entry_point(view, mode=Atomic(claim="lock"))().status_code == 503
    other_thread(run_sql, "ROLLBACK")
    assert (effects(), record()) == (0, None)


class Struck(Exception):
    pass


class StruckForGood(BaseException):
    pass


@contextmanager
def struck(once, error=Struck, then=lambda: None):
    """An exception from a signal's handler, as Celery's soft time limit and a worker's
    timeout raise, when ``once()`` is true, which another thread asks; ``then`` that
    thread calls ``then``.
    """
    has_struck = threading.Event()

    def strike(*_signal):
        has_struck.set()
        raise error

    def watch():
        eventually(once)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGALRM)
        assert has_struck.wait(60)
        then()

    before = signal.signal(signal.SIGALRM, strike)
    try:
        with ThreadPoolExecutor(1) as pool:
            watching = pool.submit(watch)
            yield
            watching.result(60)
    finally:
        signal.signal(signal.SIGALRM, before)


GATE = 77
IN_COMMIT = (
    "SELECT 1 FROM pg_stat_activity WHERE pid = %s AND query = 'COMMIT' AND"
    " wait_event_type = 'Lock'"
)


@of_both_kinds
@pytest.mark.parametrize("error", [Struck, StruckForGood])
def test_effects_are_reported_despite_a_signals_exception_during_commit(
    kind, error, other_thread, monkeypatch
):
    """COMMIT is under way when it strikes, and takes place."""
    monkeypatch.setattr(engine.atomic_runs, "PATIENCE", 60)
    ask = entry_point(paying, mode=Atomic(claim=kind))
    other_thread(run_sql, f"SELECT pg_advisory_lock({GATE})")

    def let_commit_go_on():
        other_thread(run_sql, f"SELECT pg_advisory_unlock({GATE})")

    with at_commit(f"PERFORM pg_advisory_xact_lock_shared({GATE})"):
        process = connection.connection.info.backend_pid
        in_commit = lambda: other_thread(run_sql, IN_COMMIT, [process])  # noqa: E731
        with struck(in_commit, error, let_commit_go_on):
            try:
                assert ask().status_code == 201
            except StruckForGood:
                assert error is StruckForGood
        assert eventually(lambda: completed(ask())).status_code == 201
    assert (is_replay(ask()), effects()) == (True, 1)


@of_both_kinds
def test_a_signals_exception_during_a_claim_leaves_a_sound_connection(
    kind, other_thread
):
    ask = entry_point(paying, mode=Atomic(claim=kind))
    assert ask("before").status_code == 201
    struck_one = connection.connection
    with (
        locked("django_idempotency_record"),
        struck(lambda: other_thread(someone_waits_for_a_lock)),
        pytest.raises(Struck),
    ):
        ask()
    close_old_connections()  # as Django does before each request, if there were errors
    assert effects() == 1
    assert eventually(lambda: completed(ask())).status_code == 201
    assert (struck_one.closed, effects()) == (True, 2)


@of_both_kinds
@pytest.mark.parametrize("sent", [False, True])
def test_a_connection_that_was_left_in_a_pipeline_is_replaced(kind, sent):
    """A second exception may have struck while the first one was dealt with."""
    ask = entry_point(paying, mode=Atomic(claim=kind))
    assert ask("before").status_code == 201
    left = connection.connection
    left.pgconn.enter_pipeline_mode()
    if sent:
        left.pgconn.send_query_params(b"SELECT 1", None)
    assert ask().status_code == 201
    assert (connection.connection is not left, effects()) == (True, 2)


def test_other_threads_run_while_a_statement_is_waited_for(other_thread):
    """libpq's own get_result() would keep the interpreter's lock for as long, and
    nobody could let the statement go on.
    """
    other_thread(run_sql, f"SELECT pg_advisory_lock({GATE})")

    def wait():
        run_sql("SET statement_timeout = '50s'")
        statement = f"SELECT pg_advisory_lock_shared({GATE})"
        pipeline.execute(statement, (), connections["default"])

    def let_go():
        eventually(someone_waits_for_a_lock)
        other_thread(run_sql, f"SELECT pg_advisory_unlock({GATE})")

    in_threads(2, lambda index: (wait, let_go)[index]())


@pytest.mark.pgbouncer
@of_both_kinds
def test_behind_a_pooler_round_trips_are_as_few_and_nothing_is_prepared(
    pgbouncer, monkeypatch, kind
):
    address = urlsplit(pgbouncer(f"/{connection.settings_dict['NAME']}"))
    connection.close()
    with monkeypatch.context() as patch:
        patch.setitem(connection.settings_dict, "HOST", address.hostname)
        patch.setitem(connection.settings_dict, "PORT", address.port)
        for key in "abcd":
            assert entry_point(paying, mode=Atomic(claim=kind))(key).status_code == 201
        with sent_statements() as sent:
            assert (
                entry_point(
                    lambda request: paying(request), mode=Atomic(claim=kind)
                )().status_code
                == 201
            )
        assert is_replay(entry_point(paying, mode=Atomic(claim=kind))())
        assert value_of("SELECT count(*) FROM pg_prepared_statements") == 0
        connection.close()
    ours = [
        together
        for together in sent.round_trips
        if "django_idempotency" in " ".join(together)
    ]
    assert len(ours) == {"lock": 2, "record": 3}[kind]
    assert effects() == 5
