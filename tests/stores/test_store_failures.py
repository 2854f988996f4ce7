"""What a database refuses or can't do is told by its kind, whatever the store."""

from __future__ import annotations

import sqlite3
from uuid import uuid4

import psycopg
import pytest
from django.db import (
    DataError,
    IntegrityError,
    InterfaceError,
    OperationalError,
    ProgrammingError,
    connection,
    transaction,
)

from django_idempotency import engine
from django_idempotency.exceptions import (
    StoreConflict,
    StoreRefused,
    StoreUnavailable,
)
from django_idempotency.models import IdempotencyRecord
from django_idempotency.outcomes import (
    Claimed,
)
from django_idempotency.stores import errors
from django_idempotency.stores.errors import RETIRED, UNTIL, store_errors
from tests.stores.contract import ATOMIC, MODES, RESPONSE, _connecting_with, _kept_connection, claimed, operation
from tests.support.pgbouncer import free_port
from tests.support.threads import in_threads

pytestmark = pytest.mark.usefixtures("transactional_db")


@pytest.mark.postgresql
def test_without_a_partition_no_other_connection_is_tried():
    table = IdempotencyRecord._meta.db_table
    connection.cursor().execute(f"ALTER TABLE {table} ADD CONSTRAINT {UNTIL} CHECK (key <> 'refused')")
    try:
        with _kept_connection(), pytest.raises(StoreUnavailable, match="idempotency_partitions ensure"):
            engine.claim(operation("refused"), ATOMIC)
    finally:
        connection.cursor().execute(f"ALTER TABLE {table} DROP CONSTRAINT {UNTIL}")


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


@pytest.mark.postgresql
@pytest.mark.parametrize(
    ("constraint", "error", "message"),
    [
        ("refused", IntegrityError, "refused"),
        (UNTIL, StoreUnavailable, "idempotency_partitions ensure"),
        (RETIRED, StoreUnavailable, "again and again"),  # another partition may take it, the next time
    ],
)
def test_a_refused_record_is_tried_again_only_where_that_helps(constraint, error, message, monkeypatch):
    monkeypatch.setattr(engine.claims, "PATIENCE", 0.2)
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
        connection.cursor().execute(
            "DO $$ BEGIN RAISE check_violation USING TABLE = 'record'; END $$"
        )  # of no constraint
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
def test_a_conflict_is_told_from_a_store_that_is_away(error, cause, kind):
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
def test_a_programming_error_is_not_an_outage(sql, error):
    with pytest.raises(error), store_errors():
        connection.cursor().execute(sql)


def test_what_a_database_said_is_told_without_what_may_quote_a_row():
    assert errors.told(IntegrityError("duplicate key\nDETAIL: Key (key)=(secret)")) == "IntegrityError: duplicate key"


ASKING = {
    "claim": lambda store, claim: store(ATOMIC).claim(operation(), uuid4()),
    "contend": lambda store, claim: store(ATOMIC).try_lock(claim.id).__enter__(),
    "read": lambda store, claim: store(ATOMIC).read(claim.id),
    "now": lambda store, claim: store(ATOMIC).now(),
    "lock": lambda store, claim: store(ATOMIC).lock(claim),
    "complete": lambda store, claim: store(ATOMIC).complete(claim, RESPONSE),
    "fail": lambda store, claim: store(ATOMIC).fail(claim, "broke"),
    "release": lambda store, claim: store(ATOMIC).release(claim),
    "renew": lambda store, claim: store(ATOMIC).renew([claim]),
    "count_replays": lambda store, claim: store(ATOMIC).count_replays({claim.id: 1}),
}


@pytest.mark.row_locks
@pytest.mark.parametrize("ask", ASKING.values(), ids=ASKING)
def test_every_verb_of_an_unreachable_store_is_unavailable(store, ask, monkeypatch):
    claim = claimed(store)
    connection.close()
    with monkeypatch.context() as patch:
        patch.setitem(connection.settings_dict, "HOST", "127.0.0.1")
        patch.setitem(connection.settings_dict, "PORT", free_port())
        with pytest.raises(StoreUnavailable):
            ask(store, claim)


@pytest.mark.postgresql
def test_a_missing_partition_is_logged_without_the_row(db, caplog):
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute(f"CREATE TEMP TABLE divided (key text, CONSTRAINT {UNTIL} CHECK (false))")
        with pytest.raises(StoreUnavailable, match="idempotency_partitions ensure"), store_errors():
            cursor.execute("INSERT INTO divided VALUES ('the-raw-key')")
        transaction.set_rollback(True)
    (said,) = caplog.records
    assert (said.event, said.levelname, said.record_id) == ("no_partition", "CRITICAL", None)
    assert "23514" in said.getMessage()
    assert "the-raw-key" not in caplog.text


@pytest.mark.server
def test_no_caller_gets_a_500_from_a_database_that_is_busy(server):
    def pay(index: int) -> int:
        body = {"amount": 1, "currency": "EUR", "reference": f"busy-{index % 4}"}
        return server.post("/api/charges/", body, key=f"busy-{index % 4}").status_code

    assert set(in_threads(12, pay)) <= {201, 409, 503}
    assert [server.ledger(f"busy-{index}") for index in range(4)] == [1, 1, 1, 1]


@pytest.fixture
def only_reads():
    """Connect anew, to a server that only reads; and to one that writes, with the next connection."""
    with _connecting_with("default_transaction_read_only=on") as undo:
        yield undo


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
