"""Statements are prepared where that is safe, and then called past psycopg's cursors."""

from __future__ import annotations

import gc
import socket
import subprocess
import sys
import weakref
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from urllib.parse import urlsplit
from uuid import uuid4

import pytest
from django.db import DatabaseError, DataError, ProgrammingError, connection, connections, transaction
from django.db.backends.postgresql.base import DatabaseWrapper
from django.http import HttpResponse
from django.test.utils import CaptureQueriesContext

from django_idempotency import engine
from django_idempotency.policy import Policy
from django_idempotency.stores import cursors, prepared
from tests.support.callers import MODES, effects, entry_point, operation, paying
from tests.support.databases import environment
from tests.support.servers import ROOT
from tests.support.statements import sent_statements
from tests.support.threads import in_threads

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
        assert entry_point(paying, mode=mode)(key).status_code == 201
    assert verbs_prepared() == VERBS[mode]


@pytest.fixture
def connect_directly(connect):
    """Connect anew, and have it known that no pooler stands between."""

    def connect_directly():
        connect()
        connection.ensure_connection()
        for _ in range(prepared.THRESHOLD):
            prepared.learn(connection.connection.pgconn.backend_pid, connections["default"])

    return connect_directly


def ask(statement, *values):
    return prepared.execute(statement, values, connections["default"]).row


@pytest.fixture
def no_cursor(monkeypatch):
    """Call it, and no statement of ours may go by a cursor."""
    return lambda: monkeypatch.setattr(cursors, "execute", lambda *_: pytest.fail("went by a cursor"))


# --- What is prepared, and where --------------------------------------------------------------------------------------


@in_each_mode
def test_statements_are_prepared_on_a_persistent_connection(connect, mode):
    connect()
    prepare(mode)
    assert connection.connection.prepare_threshold is None  # as Django has it
    first = statements_of(entry_point(paying, mode=mode), "four")
    assert len(first) == {"atomic": 6, "lease": 4}[mode]
    assert first[1].startswith("BEGIN; EXECUTE ") is (mode == "atomic")
    assert len(statements_of(entry_point(paying, mode=mode), "four")) == 1


def test_the_first_claim_on_a_connection_is_one_round_trip(connect):
    connect()
    engine.claim(operation(), Policy())
    assert not verbs_prepared()


@pytest.mark.parametrize(("threshold", "expected"), [(2, ["SELECT"]), (None, [])])
def test_a_stated_threshold_is_left_to_psycopg(connect, monkeypatch, threshold, expected):
    connect(prepare_threshold=threshold, server_side_binding=True)
    monkeypatch.setattr(prepared, "_by_libpq", lambda *_: pytest.fail("was prepared by us"))
    for key in "jklm":
        engine.claim(operation(key), Policy())
    assert verbs_prepared() == expected


@pytest.mark.pgbouncer
def test_behind_a_pooler_nothing_is_prepared(monkeypatch, connect, pgbouncer):
    address = urlsplit(pgbouncer(f"/{connection.settings_dict['NAME']}"))
    monkeypatch.setitem(connection.settings_dict, "HOST", address.hostname)
    monkeypatch.setitem(connection.settings_dict, "PORT", address.port)
    connect()
    for key in "jkl":
        entry_point(paying)(key)
    assert not verbs_prepared()


def test_whom_another_process_answers_goes_by_the_cursor_again(connect, monkeypatch):
    """A pooler that tells the process it has chosen first, and chooses another one later."""
    connect()
    prepare()
    prepared.learn(0, connections["default"])
    monkeypatch.setattr(prepared, "_by_libpq", lambda *_: pytest.fail("was called as prepared"))
    assert entry_point(paying)().status_code == 201


# --- What is prepared is called past psycopg's cursors ----------------------------------------------------------------


@in_each_mode
def test_what_is_prepared_goes_past_the_cursors(connect, no_cursor, mode):
    connect()
    prepare(mode)
    no_cursor()
    protected = entry_point(paying, mode=mode)
    first, again = protected(), protected()
    assert (first.status_code, again.content, again["Idempotent-Replayed"]) == (201, first.content, "true")
    assert protected(body=b"{}").status_code == 422
    assert effects() == 4


def test_no_more_are_prepared_than_a_connection_is_to_keep(connect, monkeypatch):
    connect()
    prepare()
    monkeypatch.setattr(prepared, "MOST", 4)
    for number in range(4):
        assert ask(f"SELECT %s::integer + {number}", number) == (2 * number,)
    assert len(verbs_prepared()) == 4
    assert entry_point(paying)("five").status_code == 201


@in_each_mode
@pytest.mark.parametrize("statement", ["DISCARD ALL", "DEALLOCATE ALL"])
def test_whoever_throws_the_prepared_statements_away_meets_no_error(connect, mode, statement):
    connect()
    prepare(mode)
    connection.cursor().execute(statement)
    for key in "kl":
        assert entry_point(paying, mode=mode)(key).status_code == 201
    assert effects() == 5


def test_a_view_may_roll_back_to_a_savepoint(connect, no_cursor):
    def view(request):
        with transaction.atomic():
            transaction.set_rollback(True)
        return paying(request)

    connect()
    prepare()
    no_cursor()
    for key in "kl":
        assert entry_point(view)(key).status_code == 201
    assert effects() == 5


def test_whoever_watches_statements_sees_them(connect):
    connect()
    prepare()
    with CaptureQueriesContext(connection) as captured:
        entry_point(paying)("logged")
    seen = []
    with connection.execute_wrapper(lambda execute, sql, *details: (seen.append(sql), execute(sql, *details))[1]):
        entry_point(paying)("wrapped")
    for statements in ([query["sql"] for query in captured.captured_queries], seen):
        assert len([statement for statement in statements if "django_idempotency_" in statement]) == 3


@pytest.mark.parametrize(("patched", "by_a_cursor"), [("select", True), ("socket", False)])
def test_libpq_may_block_unless_gevent_patched_psycopg(connect, monkeypatch, patched, by_a_cursor):
    connect()
    prepare()
    gevent = SimpleNamespace(is_module_patched=lambda name: name == patched)
    monkeypatch.setitem(sys.modules, "gevent.monkey", gevent)
    went = []
    by_cursor = cursors.execute
    monkeypatch.setattr(cursors, "execute", lambda *given: (went.append(given), by_cursor(*given))[1])
    assert entry_point(paying)().status_code == 201
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
def test_once_statements_were_discarded_nothing_is_prepared(connect, mode):
    """As on a connection of a pool that says DISCARD ALL whenever it gets it back: a new one would be no better."""
    connect()
    prepare(mode)
    inner = connection.connection
    for key in "klmn":
        inner.pgconn.exec_(b"DISCARD ALL")
        assert entry_point(paying, mode=mode)(key).status_code == 201
    assert connection.connection is inner
    assert not verbs_prepared()


def test_discarded_in_a_transaction_it_is_rolled_back(connect):
    def view(request):
        response = paying(request)
        connection.connection.pgconn.exec_(b"DEALLOCATE ALL")
        return response

    connect()
    prepare()
    assert entry_point(view)("thrown").status_code == 503
    assert effects() == 3
    assert entry_point(view)("thrown").status_code == 201
    assert effects() == 4


def test_after_any_other_error_statements_are_prepared_as_before(connect_directly):
    connect_directly()
    with pytest.raises(ProgrammingError):
        ask("SELECT no_such_function(%s)", 1)
    prepare()


@pytest.mark.parametrize(("statement", "value"), [("SELECT %s::text", "\0"), ("SELECT %s::timestamptz", "infinity")])
def test_what_psycopg_cannot_send_or_read_is_an_error_of_djangos(connect_directly, statement, value):
    connect_directly()
    for _ in range(2):  # prepared just now, and before
        with pytest.raises(DataError):
            ask(statement, value)


def test_errors_are_read_in_the_connections_encoding(connect_directly, no_cursor):
    connect_directly()
    connection.cursor().execute("SET client_encoding TO latin1")
    no_cursor()
    with pytest.raises(DataError, match='"ü"'):
        ask("SELECT %s::integer", "ü")


def test_what_is_sent_follows_a_change_of_the_encoding(connect_directly, no_cursor):
    connect_directly()
    no_cursor()
    assert ask("SELECT length(%s::text)", "ü") == (1,)
    connection.cursor().execute("SET client_encoding TO latin1")
    assert ask("SELECT length(%s::text)", "ü") == (1,)


def test_begin_goes_out_with_the_first_statement(connect_directly):
    connect_directly()
    values = ("it's \\ 'quoted'; COMMIT", 2**40, uuid4(), b"\0\xff'", True, None)
    question = "SELECT %s::text, %s::bigint, %s::uuid, %s::bytea, %s::boolean, %s::text"
    assert ask(question, *values) == values
    with sent_statements() as sent, transaction.atomic():
        assert ask(question, *values) == values  # written out, behind BEGIN
        assert ask(question, *values) == values  # as parameters
    begun, asked, committed = sent.all
    assert begun.startswith("BEGIN; EXECUTE ")
    assert (asked.startswith("SELECT"), committed) == (True, "COMMIT")


def test_what_is_kept_of_a_connection_does_not_keep_it(no_cursor):
    """So that a thread that ends leaves no session behind."""
    wrapper = connections.create_connection("default")
    wrapper.ensure_connection()
    for _ in range(prepared.THRESHOLD):
        prepared.learn(wrapper.connection.pgconn.backend_pid, wrapper)
    no_cursor()
    assert prepared.execute("SELECT %s::integer", (1,), wrapper).row == (1,)
    inner = weakref.ref(wrapper.connection)
    wrapper.connection.close()
    del wrapper
    gc.collect()
    assert inner() is None


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
    assert entry_point(view)().status_code == 201
    assert begun == [expected.get(name, ("read committed", "off"))]


def test_a_statement_that_was_left_in_the_middle_is_not_committed(connect):
    """By an exception of a signal's, such as Celery's soft time limit, which the view takes for its end."""

    def view(request):
        response = paying(request)
        connection.connection.pgconn.send_query(b"UPDATE testproject_ledgerentry SET amount = 6")
        return response

    connect()
    prepare()
    assert entry_point(view)("left").status_code == 503
    assert effects() == 3


@contextmanager
def borrowing(borrowed):
    """This thread uses the connection of another one."""
    own = connections["default"]
    connections["default"] = borrowed
    try:
        yield
    finally:
        connections["default"] = own


def test_another_threads_connection_is_refused_as_by_a_cursor(connect_directly, no_cursor):
    def refused(mine):
        with borrowing(mine), pytest.raises(DatabaseError, match="created in a thread"):
            ask("SELECT %s::integer", 1)

    connect_directly()
    no_cursor()
    assert ask("SELECT %s::integer", 1) == (1,)
    in_threads(1, lambda _index, mine=connections["default"]: refused(mine))


def test_a_transaction_to_be_rolled_back_is_refused_as_by_a_cursor(connect_directly, no_cursor):
    connect_directly()
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

    connect_directly()
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
def test_a_connection_that_broke_since_is_replaced(connect, mode):
    connect()
    prepare(mode)
    broken = connection.connection
    cut()
    assert entry_point(paying, mode=mode)().status_code == 201
    assert connection.connection is not broken


def test_a_connection_that_breaks_on_the_way_is_the_stores_error(connect, no_cursor):
    """libpq has no SQLSTATE for that."""

    def view(request):
        cut()
        return HttpResponse()

    connect()
    prepare()
    no_cursor()
    assert entry_point(view)().status_code == 503


def cut():
    """As a network does."""
    with socket.socket(fileno=socket.dup(connection.connection.pgconn.socket)) as copy:
        copy.shutdown(socket.SHUT_RDWR)


def test_greenlets_wait_for_each_other():
    """A call that blocks would stop the greenlet, too, that has the row locked."""
    command = [sys.executable, "-m", "tests.support.greenlets"]
    subprocess.run(command, cwd=ROOT, env=environment(), timeout=60, check=True)
