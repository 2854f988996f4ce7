"""Statements that are prepared where that is safe, and then called past psycopg's cursors."""

from __future__ import annotations

import socket
import subprocess
import sys
from functools import partial
from types import SimpleNamespace
from urllib.parse import urlsplit

import pytest
from django.db import DatabaseError, DataError, ProgrammingError, connection, connections, transaction
from django.db.backends.postgresql.base import DatabaseWrapper
from django.http import HttpResponse
from django.test.utils import CaptureQueriesContext

from django_idempotency import engine
from django_idempotency.policy import Policy
from django_idempotency.stores import prepared
from tests.callers import MODES, door, effects, operation, paying
from tests.databases import environment
from tests.servers import ROOT
from tests.statements import sent_statements
from tests.threads import in_threads

pytestmark = [pytest.mark.postgresql, pytest.mark.usefixtures("payer")]

NAME = "prepare_threshold"
VERBS = {"atomic": ["SELECT", "SELECT", "UPDATE"], "lease": ["SELECT", "UPDATE"]}
in_each_mode = pytest.mark.parametrize("mode", MODES)


@pytest.fixture
def connect(monkeypatch):
    """Connect anew, with this as ``prepare_threshold``, or with none stated."""

    def connect(**stated):
        connection.close()
        options = {name: value for name, value in connection.settings_dict["OPTIONS"].items() if name != NAME}
        monkeypatch.setitem(connection.settings_dict, "OPTIONS", options | stated)

    yield connect
    connection.close()


def statements_of(view, *key):
    with sent_statements() as sent:
        assert view(*key).status_code == 201
    return sent.all


def verbs_prepared():
    """The verbs of the statements that the session has prepared."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT statement FROM pg_prepared_statements")
        return sorted(statement.split()[0] for (statement,) in cursor.fetchall())


def prepare(mode="atomic"):
    for key in ("one", "two", "three"):
        assert door(paying, mode=mode)(key).status_code == 201
    assert verbs_prepared() == VERBS[mode]


@pytest.fixture
def no_cursor(monkeypatch):
    """Call it, and no statement of ours may go by a cursor."""
    return lambda: monkeypatch.setattr(prepared, "_by_cursor", lambda *_: pytest.fail("went by a cursor"))


# --- What is prepared, and where --------------------------------------------------------------------------------------


@in_each_mode
def test_on_a_connection_that_stays_the_statements_of_every_request_are_prepared(connect, mode):
    connect()
    prepare(mode)
    assert connection.connection.prepare_threshold is None  # as Django has it
    first = statements_of(door(paying, mode=mode), "four")
    assert len(first) == {"atomic": 7, "lease": 4}[mode]
    assert (first[1] == "BEGIN") is (mode == "atomic")
    assert len(statements_of(door(paying, mode=mode), "four")) == 1


def test_the_first_claim_on_a_connection_is_one_round_trip(connect):
    connect()
    engine.claim(operation(), Policy())
    assert not verbs_prepared()


@in_each_mode
def test_a_stated_threshold_has_them_prepared_at_once(connect, mode):
    connect(prepare_threshold=5)
    door(paying, mode=mode)()
    assert verbs_prepared() == VERBS[mode]


def test_a_threshold_of_none_is_heeded(connect):
    connect(prepare_threshold=None)
    for key in "jkl":
        door(paying)(key)
    assert not verbs_prepared()


@pytest.mark.pgbouncer
def test_behind_a_pooler_nothing_is_prepared(monkeypatch, connect, pgbouncer):
    address = urlsplit(pgbouncer(f"/{connection.settings_dict['NAME']}"))
    monkeypatch.setitem(connection.settings_dict, "HOST", address.hostname)
    monkeypatch.setitem(connection.settings_dict, "PORT", address.port)
    connect()
    for key in "jkl":
        door(paying)(key)
    assert not verbs_prepared()


def test_whom_another_process_answers_goes_by_the_cursor_again(connect, monkeypatch):
    """A pooler that tells the process it has chosen first, and chooses another one later."""
    connect()
    prepare()
    prepared.learn(0, "default")
    monkeypatch.setattr(prepared, "_by_libpq", lambda *_: pytest.fail("was called as prepared"))
    assert door(paying)().status_code == 201


# --- What psycopg has prepared is called past its cursors -------------------------------------------------------------


@in_each_mode
def test_what_is_prepared_goes_past_the_cursors(connect, no_cursor, mode):
    connect()
    prepare(mode)
    no_cursor()
    protected = door(paying, mode=mode)
    first, again = protected(), protected()
    assert (first.status_code, again.content, again["Idempotent-Replayed"]) == (201, first.content, "true")
    assert protected(body=b"{}").status_code == 422
    assert effects() == 4


def test_where_psycopg_keeps_no_such_books_its_cursor_does(connect, monkeypatch):
    connect()
    prepare()
    books = connection.connection._prepared
    monkeypatch.delattr(connection.connection, "_prepared")
    assert prepared._prepared(connection.connection, "SELECT %s", ["k"]) is None
    monkeypatch.setattr(connection.connection, "_prepared", books, raising=False)


@in_each_mode
@pytest.mark.parametrize("statement", ["DISCARD ALL", "DEALLOCATE ALL"])
def test_whoever_throws_the_prepared_statements_away_meets_no_error(connect, mode, statement):
    connect()
    prepare(mode)
    connection.cursor().execute(statement)
    for key in "kl":
        assert door(paying, mode=mode)(key).status_code == 201
    assert effects() == 5


def test_a_view_that_rolls_back_a_part_of_its_transaction_meets_no_error(connect):
    """psycopg forgets, and throws away, whatever it has prepared when it sees a ROLLBACK."""

    def view(request):
        with transaction.atomic():
            transaction.set_rollback(True)
        assert not verbs_prepared()
        return paying(request)

    connect(prepare_threshold=5)
    prepare()
    for key in "kl":
        assert door(view)(key).status_code == 201
    assert effects() == 5


def test_whoever_watches_statements_sees_them(connect):
    connect()
    prepare()
    with CaptureQueriesContext(connection) as captured:
        door(paying)("logged")
    seen = []
    with connection.execute_wrapper(lambda execute, sql, *details: (seen.append(sql), execute(sql, *details))[1]):
        door(paying)("wrapped")
    for statements in ([query["sql"] for query in captured.captured_queries], seen):
        assert len([statement for statement in statements if "django_idempotency_" in statement]) == 3


@pytest.mark.parametrize(("patched", "by_a_cursor"), [("select", True), ("socket", False)])
def test_libpq_may_block_unless_gevent_has_patched_what_psycopg_waits_by(connect, monkeypatch, patched, by_a_cursor):
    connect()
    prepare()
    gevent = SimpleNamespace(is_module_patched=lambda name: name == patched)
    monkeypatch.setitem(sys.modules, "gevent.monkey", gevent)
    went = []
    by_cursor = prepared._by_cursor
    monkeypatch.setattr(prepared, "_by_cursor", lambda *given: (went.append(given), by_cursor(*given))[1])
    assert door(paying)().status_code == 201
    assert bool(went) == by_a_cursor


@pytest.mark.parametrize("whose", ["tool's", "backend's"])
@pytest.mark.parametrize("name", prepared.CURSORS)
def test_whoever_has_a_hand_in_every_cursor_has_it_in_ours(connect, monkeypatch, name, whose):
    """As the backend of django-tenants, which sets the search_path there."""

    def make(self, *args):
        made.append(name)
        return getattr(DatabaseWrapper, name)(self, *args)

    made = []
    connect()
    prepare()
    if whose == "tool's":
        monkeypatch.setattr(connection, name, partial(make, connection))
    else:
        monkeypatch.setattr(connections["default"], "__class__", type("Backend", (DatabaseWrapper,), {name: make}))
    engine.claim(operation(), Policy())
    assert made == [name]


@in_each_mode
@pytest.mark.parametrize("stated", [{}, {"prepare_threshold": 5}])
def test_where_prepared_statements_were_thrown_away_once_nothing_is_prepared_any_more(connect, mode, stated):
    """As on a connection of a pool that says DISCARD ALL whenever it gets it back: a new one would be no better."""
    connect(**stated)
    prepare(mode)
    inner = connection.connection
    for key in "klmn":
        inner.pgconn.exec_(b"DISCARD ALL")
        assert door(paying, mode=mode)(key).status_code == 201
    assert connection.connection is inner
    assert not verbs_prepared()


def test_where_they_are_thrown_away_in_a_transaction_it_is_rolled_back_and_a_retry_runs(connect):
    def view(request):
        response = paying(request)
        connection.connection.pgconn.exec_(b"DEALLOCATE ALL")
        return response

    connect()
    prepare()
    assert door(view)("thrown").status_code == 503
    assert effects() == 3
    assert door(view)("thrown").status_code == 201
    assert effects() == 4


def test_after_any_other_error_statements_are_prepared_as_before(connect):
    connect(prepare_threshold=5)
    with pytest.raises(ProgrammingError):
        prepared.execute("SELECT no_such_function(%s)", [1], "default")
    prepare()


@pytest.mark.parametrize(("statement", "value"), [("SELECT %s::text", "\0"), ("SELECT %s::timestamptz", "infinity")])
def test_what_psycopg_cannot_send_or_read_is_an_error_of_djangos(connect, statement, value):
    connect(prepare_threshold=5)
    for _ in range(2):  # by a cursor, and as prepared
        with pytest.raises(DataError):
            prepared.execute(statement, [value], "default")


def test_errors_are_read_in_the_connections_encoding(connect, no_cursor):
    connect(prepare_threshold=5)
    connection.cursor().execute("SET client_encoding TO latin1")
    prepared.execute("SELECT %s::integer", ["1"], "default")
    no_cursor()
    with pytest.raises(DataError, match='"ü"'):
        prepared.execute("SELECT %s::integer", ["ü"], "default")


@pytest.mark.parametrize("name", ["isolation_level", "read_only", "deferrable"])
def test_a_transaction_begins_as_the_connection_says(connect, name):
    def view(request):
        with connection.cursor() as cursor:
            cursor.execute("SELECT current_setting('transaction_isolation'), current_setting('transaction_deferrable')")
            begun.append(cursor.fetchone())
        return paying(request)

    begun = []
    stated = {"isolation_level": 4, "read_only": False, "deferrable": True}
    expected = {"isolation_level": ("serializable", "off"), "deferrable": ("read committed", "on")}
    connect()
    prepare()
    setattr(connection.connection, name, stated[name])
    assert door(view)().status_code == 201
    assert begun == [expected.get(name, ("read committed", "off"))]


def test_a_statement_that_was_left_in_the_middle_is_not_committed(connect):
    """By an exception of a signal's, such as Celery's soft time limit, which the view takes for its end."""

    def view(request):
        response = paying(request)
        connection.connection.pgconn.send_query(b"UPDATE testproject_ledgerentry SET amount = 6")
        return response

    connect()
    prepare()
    assert door(view)("left").status_code == 503
    assert effects() == 3


def test_another_threads_connection_and_a_transaction_to_be_rolled_back_are_refused_as_by_a_cursor(connect, no_cursor):
    def ask():
        return prepared.execute("SELECT %s::integer", [1], "default").row

    def ask_by(borrowed):
        connections["default"] = borrowed
        try:
            with pytest.raises(DatabaseError, match="created in a thread"):
                ask()
        finally:
            del connections["default"]

    connect(prepare_threshold=5)
    ask()
    no_cursor()
    assert ask() == (1,)
    in_threads(1, lambda _index, mine=connections["default"]: ask_by(mine))
    with transaction.atomic():
        transaction.set_rollback(True)
        with pytest.raises(transaction.TransactionManagementError):
            ask()


def test_threads_that_share_a_connection_take_turns(connect):
    """Django lets them, once somebody says inc_thread_sharing."""

    def ask(number):
        return prepared.execute("SELECT %s::integer FROM pg_sleep(0.1)", [number], "default").row

    def ask_by(borrowed, number):
        connections["default"] = borrowed
        try:
            return ask(number)
        finally:
            del connections["default"]

    connect(prepare_threshold=5)
    ask(0)
    mine = connections["default"]
    mine.inc_thread_sharing()
    try:
        assert in_threads(3, partial(ask_by, mine)) == [(0,), (1,), (2,)]
    finally:
        mine.dec_thread_sharing()


def test_where_django_checks_a_connections_health_first_it_does_for_us(connect, monkeypatch):
    connect(prepare_threshold=5)
    monkeypatch.setitem(connection.settings_dict, "CONN_HEALTH_CHECKS", True)
    for _ in range(2):
        connection.health_check_done = False
        assert prepared.execute("SELECT %s::integer", [1], "default").row == (1,)
        cut()


@in_each_mode
def test_a_connection_that_broke_since_is_replaced(connect, mode):
    connect()
    prepare(mode)
    broken = connection.connection
    cut()
    assert door(paying, mode=mode)().status_code == 201
    assert connection.connection is not broken


def test_a_connection_that_breaks_on_the_way_is_the_stores_error(connect, no_cursor):
    """libpq has no SQLSTATE for that."""

    def view(request):
        cut()
        return HttpResponse()

    connect()
    prepare()
    no_cursor()
    assert door(view)().status_code == 503


def cut():
    """As a network does."""
    with socket.socket(fileno=socket.dup(connection.connection.pgconn.socket)) as copy:
        copy.shutdown(socket.SHUT_RDWR)


def test_greenlets_wait_for_each_other():
    """A call that blocks would stop the greenlet, too, that has the row locked."""
    command = [sys.executable, "-m", "tests.greenlets"]
    subprocess.run(command, cwd=ROOT, env=environment(), timeout=60, check=True)
