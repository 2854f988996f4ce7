"""Statements go past psycopg's cursors, those that follow each other together, and
prepared where that is safe.
"""

from __future__ import annotations

import gc
import socket
import subprocess
import sys
import weakref
from contextlib import contextmanager
from functools import partial

import psycopg
import pytest
from django.db import (
    DatabaseError,
    DataError,
    ProgrammingError,
    connection,
    connections,
    transaction,
)
from django.db.backends.postgresql.base import DatabaseWrapper
from django.test.utils import CaptureQueriesContext

from django_idempotency import engine
from django_idempotency.stores import pipeline
from django_idempotency.stores.django_state import IN_TRANSACTION
from django_idempotency.values.policy import Atomic, Policy
from tests.support.callers import MODES, effects, entry_point, operation, paying
from tests.support.databases import environment
from tests.support.servers import ROOT
from tests.support.sql import run_sql
from tests.support.statements import sent_statements
from tests.support.threads import in_threads

pytestmark = [
    pytest.mark.postgresql,
    pytest.mark.not_on_citus,
    pytest.mark.usefixtures("payer", "connect"),
]

NAME = "prepare_threshold"
VERBS = {"atomic": ["SELECT", "SELECT", "WITH"], "lease": ["SELECT", "UPDATE"]}
in_each_mode = pytest.mark.parametrize("mode", MODES)


@pytest.fixture
def connect(monkeypatch):
    """A new connection without a stated ``prepare_threshold``. Call it to connect anew
    with one.
    """

    def connect(**stated):
        connection.close()
        options = {
            name: value
            for name, value in connection.settings_dict["OPTIONS"].items()
            if name != NAME
        }
        monkeypatch.setitem(connection.settings_dict, "OPTIONS", options | stated)

    connect()
    yield connect
    connection.close()


def statements_of(view, *key):
    with sent_statements() as sent:
        assert view(*key).status_code == 201
    return sent.all


def verbs_prepared():
    """The verbs of the statements that the session has prepared."""
    return sorted(
        statement.split()[0]
        for (statement,) in run_sql("SELECT statement FROM pg_prepared_statements")
    )


def prepare(mode="atomic"):
    for key in ("one", "two", "three"):
        assert entry_point(paying, mode=mode)(key).status_code == 201
    assert verbs_prepared() == VERBS[mode]


@pytest.fixture
def connect_directly(connect):
    """A new connection of which is known that no pooler stands between. Call it to
    connect anew.
    """

    def connect_directly():
        connect()
        connection.ensure_connection()
        for _ in range(pipeline.THRESHOLD):
            pipeline.note_process(
                connection.connection.pgconn.backend_pid, connections["default"]
            )

    connect_directly()
    return connect_directly


def ask(statement, *values):
    return pipeline.execute(statement, values, connections["default"]).row


@pytest.fixture
def no_cursor(monkeypatch):
    """Call it, and no statement of ours may go by a cursor."""
    return lambda: monkeypatch.setattr(
        pipeline, "_by_cursors", lambda *_: pytest.fail("went by a cursor")
    )


@in_each_mode
def test_statements_are_prepared_on_a_persistent_connection(mode):
    engine.claim(operation("first"), Policy())
    assert not verbs_prepared()  # one claim is one round trip
    prepare(mode)
    assert connection.connection.prepare_threshold is None  # as Django has it
    first = statements_of(entry_point(paying, mode=mode), "four")
    assert len(first) == {"atomic": 7, "lease": 4}[mode]
    assert len(statements_of(entry_point(paying, mode=mode), "four")) == 1


def test_a_stated_threshold_is_left_to_psycopg(connect, monkeypatch):
    connect(prepare_threshold=2, server_side_binding=True)
    monkeypatch.setattr(
        pipeline, "_by_pipeline", lambda *_, **_named: pytest.fail("was prepared by us")
    )
    for key in "jklm":
        engine.claim(operation(key), Policy())
    assert verbs_prepared() == ["SELECT"]


def test_where_nothing_is_to_be_prepared_nothing_is(connect, no_cursor):
    connect(prepare_threshold=None)
    no_cursor()
    for key in "jklm":
        assert entry_point(paying)(key).status_code == 201
    assert not verbs_prepared()


def test_whom_another_process_answers_calls_nothing_prepared_any_more():
    """A pooler that tells the process it has chosen first, and chooses another one
    later.
    """
    prepare()
    pipeline.note_process(0, connections["default"])
    run_sql("DEALLOCATE ALL")
    assert entry_point(paying)().status_code == 201
    assert not verbs_prepared()
    assert not pipeline._session(connections["default"]).prepared.discarded


@in_each_mode
def test_prepared_statements_go_past_the_cursors(no_cursor, mode):
    prepare(mode)
    no_cursor()
    protected = entry_point(paying, mode=mode)
    first, again = protected(), protected()
    assert (first.status_code, again.content, again["Idempotent-Replayed"]) == (
        201,
        first.content,
        "true",
    )
    assert protected(body=b"{}").status_code == 422
    assert effects() == 4


def test_a_connection_keeps_a_bounded_number_of_prepared_statements(monkeypatch):
    prepare()
    monkeypatch.setattr(pipeline, "MOST", 4)
    for number in range(4):
        assert ask(f"SELECT %s::integer + {number}", number) == (2 * number,)
    assert len(verbs_prepared()) == 4
    assert entry_point(paying)("five").status_code == 201


def test_a_view_may_roll_back_to_a_savepoint(no_cursor):
    def view(request):
        with transaction.atomic():
            transaction.set_rollback(True)
        return paying(request)

    prepare()
    no_cursor()
    for key in "kl":
        assert entry_point(view)(key).status_code == 201
    assert effects() == 5


def test_prepared_statements_are_seen_by_captures_and_wrappers():
    prepare()
    with CaptureQueriesContext(connection) as captured:
        entry_point(paying)("logged")
    seen = []
    with connection.execute_wrapper(
        lambda execute, sql, *details: (seen.append(sql), execute(sql, *details))[1]
    ):
        entry_point(paying)("wrapped")
    for statements in ([query["sql"] for query in captured.captured_queries], seen):
        assert (
            len(
                [
                    statement
                    for statement in statements
                    if "django_idempotency_" in statement
                ]
            )
            == 3
        )


@pytest.mark.parametrize("whose", ["tool's", "backend's"])
@pytest.mark.parametrize("name", pipeline.REPLACED[:-1])
def test_a_backend_that_changes_every_cursor_changes_the_packages_too(
    monkeypatch, name, whose
):
    """As the backend of django-tenants, which sets the search_path there."""

    def make(self, *args):
        made.append(name)
        return getattr(DatabaseWrapper, name)(self, *args)

    made = []
    prepare()
    if whose == "tool's":
        monkeypatch.setattr(connection, name, partial(make, connection))
    else:
        monkeypatch.setattr(
            connections["default"],
            "__class__",
            type("Backend", (DatabaseWrapper,), {name: make}),
        )
    engine.claim(operation(), Policy())
    assert made == [name]


def test_whoever_has_a_hand_in_commit_has_it_in_ours(monkeypatch):
    def commit():
        made.append(connection.connection.info.transaction_status)
        DatabaseWrapper._commit(connections["default"])

    made = []
    monkeypatch.setattr(connection, "_commit", commit)
    assert entry_point(paying)().status_code == 201
    assert made == [IN_TRANSACTION]


@in_each_mode
@pytest.mark.parametrize("statement", [b"DISCARD ALL", b"DEALLOCATE ALL"])
def test_once_statements_were_discarded_nothing_is_prepared(mode, statement):
    """As on a connection of a pool that says DISCARD ALL whenever it gets it back: a
    new one would be no better.
    """
    prepare(mode)
    inner = connection.connection
    for key in "klmn":
        inner.pgconn.exec_(statement)
        assert entry_point(paying, mode=mode)(key).status_code == 201
    assert (connection.connection is inner, effects()) == (True, 7)
    assert not verbs_prepared()


def test_a_claim_by_lock_is_repeated_once_statements_were_discarded():
    by_lock = entry_point(paying, mode=Atomic(claim="lock"))
    for key in "klm":
        assert by_lock(key).status_code == 201
    connection.connection.pgconn.exec_(b"DEALLOCATE ALL")
    assert by_lock("n").status_code == 201
    assert (effects(), verbs_prepared()) == (4, [])


@pytest.mark.parametrize("error", [psycopg.DataError, LookupError])
@pytest.mark.parametrize("where", ["_encode", "_receive"])
def test_a_connection_is_given_up_where_nobody_could_tell_its_results(
    connect_directly, monkeypatch, error, where
):
    """As an exception of a signal's may strike, or psycopg fail."""

    def fail(*_args):
        raise error

    inner, lock = connection.connection, connection.connection.lock
    with monkeypatch.context() as patch:
        patch.setattr(pipeline, where, fail)
        with pytest.raises((DataError, LookupError)):
            ask("SELECT %s::integer", 1)
    given_up = (where, error) != ("_encode", psycopg.DataError)
    assert inner.closed == given_up
    # the old one may be held, and a rollback would wait for it
    assert (inner.lock is not lock) == given_up


@pytest.mark.parametrize(
    "spoil",
    [
        lambda driver: driver.exec_(b"DEALLOCATE ALL"),
        # As by an exception of a signal's, such as Celery's soft time limit, which the
        # view takes for its end.
        lambda driver: driver.send_query(
            b"UPDATE testproject_ledgerentry SET amount = 6"
        ),
    ],
    ids=["prepared statements discarded", "a statement left in the middle"],
)
def test_a_view_that_leaves_its_connection_unusable_commits_nothing(spoil):
    def view(request):
        response = paying(request)
        spoil(connection.connection.pgconn)
        return response

    prepare()
    assert (entry_point(view)("spoilt").status_code, effects()) == (503, 3)
    assert (entry_point(paying)("spoilt").status_code, effects()) == (201, 4)


def test_after_any_other_error_statements_are_prepared_as_before(connect_directly):
    for _time in range(2):  # its name is not kept
        with pytest.raises(ProgrammingError):
            ask("SELECT no_such_function(%s)", 1)
    prepare()


@pytest.mark.parametrize(
    ("statement", "value"),
    [("SELECT %s::text", "\0"), ("SELECT %s::timestamptz", "infinity")],
)
def test_a_value_that_psycopg_can_not_send_or_read_is_a_data_error(
    connect_directly, statement, value
):
    for _ in range(2):  # prepared just now, and before
        with pytest.raises(DataError):
            ask(statement, value)


def test_parameters_and_errors_follow_a_change_of_the_encoding(
    connect_directly, no_cursor
):
    no_cursor()
    assert ask("SELECT length(%s::text)", "ü") == (1,)
    run_sql("SET client_encoding TO latin1")
    assert ask("SELECT length(%s::text)", "ü") == (1,)
    with pytest.raises(DataError, match='"ü"'):
        ask("SELECT %s::integer", "ü")


def test_prepared_statements_do_not_keep_a_connection_alive(no_cursor):
    """So that a thread that ends leaves no session behind."""
    wrapper = connections.create_connection("default")
    wrapper.ensure_connection()
    for _ in range(pipeline.THRESHOLD):
        pipeline.note_process(wrapper.connection.pgconn.backend_pid, wrapper)
    no_cursor()
    assert pipeline.execute("SELECT %s::integer", (1,), wrapper).row == (1,)
    inner = weakref.ref(wrapper.connection)
    wrapper.connection.close()
    del wrapper
    gc.collect()
    assert inner() is None


def test_prepared_statements_are_known_after_a_pool_lends_their_connection_again(
    connect_directly,
):
    assert ask("SELECT %s::integer", 1) == (1,)
    borrower = connections.create_connection("default")
    borrower.connection = connection.connection
    assert pipeline.execute("SELECT %s::integer", (2,), borrower).row == (2,)
    assert pipeline.execute("SELECT %s::text", ("3",), borrower).row == ("3",)
    assert len(verbs_prepared()) == 2


SETTINGS = (
    "SELECT current_setting('transaction_isolation'),"
    " current_setting('transaction_deferrable')"
)


@pytest.mark.parametrize("name", ["isolation_level", "read_only", "deferrable"])
def test_a_transaction_begins_as_the_connection_says(name):
    def view(request):
        begun.extend(run_sql(SETTINGS))
        return paying(request)

    begun = []
    stated = {"isolation_level": 4, "read_only": False, "deferrable": True}
    expected = {
        "isolation_level": ("serializable", "off"),
        "deferrable": ("read committed", "on"),
    }
    prepare()
    setattr(connection.connection, name, stated[name])
    assert entry_point(view)().status_code == 201
    assert begun == [expected.get(name, ("read committed", "off"))]


@contextmanager
def borrowing(borrowed):
    """This thread uses the connection of another one."""
    own = connections["default"]
    connections["default"] = borrowed
    try:
        yield
    finally:
        connections["default"] = own


def test_another_threads_connection_is_refused_as_by_a_cursor(
    connect_directly, no_cursor
):
    def refused(mine):
        with borrowing(mine), pytest.raises(DatabaseError, match="created in a thread"):
            ask("SELECT %s::integer", 1)

    no_cursor()
    assert ask("SELECT %s::integer", 1) == (1,)
    in_threads(1, lambda _index, mine=connections["default"]: refused(mine))


def test_a_transaction_to_be_rolled_back_is_refused_as_by_a_cursor(
    connect_directly, no_cursor
):
    no_cursor()
    with transaction.atomic():
        transaction.set_rollback(True)
        with pytest.raises(transaction.TransactionManagementError):
            ask("SELECT %s::integer", 1)


def test_threads_that_share_a_connection_take_turns(connect_directly):
    """Django lets them, once somebody says inc_thread_sharing."""

    def ask_by(borrowed, number):
        with borrowing(borrowed):
            return ask("SELECT %s::integer FROM pg_sleep(0.1)", number)

    mine = connections["default"]
    mine.inc_thread_sharing()
    try:
        assert in_threads(3, partial(ask_by, mine)) == [(0,), (1,), (2,)]
    finally:
        mine.dec_thread_sharing()


def test_djangos_health_check_covers_our_statements(connect_directly, monkeypatch):
    monkeypatch.setitem(connection.settings_dict, "CONN_HEALTH_CHECKS", True)
    connect_directly()
    for _ in range(2):
        connection.health_check_done = False
        assert ask("SELECT %s::integer", 1) == (1,)
        cut()


@in_each_mode
def test_a_connection_that_broke_since_is_replaced(mode):
    prepare(mode)
    broken = connection.connection
    cut()
    assert entry_point(paying, mode=mode)().status_code == 201
    assert connection.connection is not broken


def cut():
    """As a network does."""
    with socket.socket(fileno=socket.dup(connection.connection.pgconn.socket)) as copy:
        copy.shutdown(socket.SHUT_RDWR)


def test_greenlets_wait_for_each_other():
    """A call that blocks would stop the greenlet, too, that has the row locked."""
    command = [sys.executable, "-m", "tests.support.greenlets"]
    subprocess.run(command, cwd=ROOT, env=environment(), timeout=300, check=True)
