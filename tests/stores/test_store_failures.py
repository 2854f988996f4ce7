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
)

from django_idempotency import engine
from django_idempotency.stores import errors, store_for
from django_idempotency.stores.errors import store_errors
from django_idempotency.values.exceptions import (
    StoreConflict,
    StoreRefused,
    StoreUnavailable,
)
from django_idempotency.values.outcomes import Claimed, Release
from django_idempotency.values.policy import Atomic, Policy
from tests.stores.contract import (
    ATOMIC,
    LEASE,
    WRITES,
    _connecting_with,
    claimed,
    operation,
)
from tests.support.private_servers import free_port

pytestmark = pytest.mark.usefixtures("transactional_db")


@pytest.fixture
def unreachable(monkeypatch):
    """Call it, and nothing listens where the database is said to be."""

    with monkeypatch.context() as patch:

        def go():
            connection.close()
            patch.setitem(connection.settings_dict, "HOST", "127.0.0.1")
            patch.setitem(connection.settings_dict, "PORT", free_port())

        yield go


@pytest.mark.row_locks
def test_a_server_that_is_down_is_tried_once(monkeypatch, unreachable):
    """Each may take as long as the driver waits for an answer."""
    tried = []
    connect = connection.get_new_connection
    monkeypatch.setattr(
        connection,
        "get_new_connection",
        lambda named: tried.append(named) or connect(named),
    )
    unreachable()
    with pytest.raises(StoreUnavailable):
        engine.claim(operation(), ATOMIC)
    assert len(tried) == 1


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
        (
            OperationalError("…"),
            psycopg.OperationalError("the connection is closed"),
            StoreUnavailable,
        ),
        *(
            (OperationalError(number, "…"), None, StoreConflict)
            for number in (1205, 1213, 1020, 3572)
        ),
        *(
            (OperationalError(number, "…"), None, StoreRefused)
            for number in (1969, 1317, 3024)
        ),
        (OperationalError(2006, 1205), None, StoreUnavailable),
        (OperationalError(), None, StoreUnavailable),
        (OperationalError("…"), sqlite_error("SQLITE_BUSY"), StoreConflict),
        (OperationalError("…"), sqlite_error("SQLITE_BUSY_SNAPSHOT"), StoreConflict),
        (
            OperationalError("…"),
            sqlite_error("SQLITE_LOCKED_SHAREDCACHE"),
            StoreConflict,
        ),
        (OperationalError("…"), sqlite_error("SQLITE_FULL"), StoreUnavailable),
        (InterfaceError("connection already closed"), None, StoreUnavailable),
    ],
    ids=str,
)
def test_a_conflict_is_distinguished_from_an_unavailable_store(error, cause, kind):
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


def test_an_error_of_the_database_is_described_without_its_detail():
    assert (
        errors.brief(IntegrityError("duplicate key\nDETAIL: Key (key)=(secret)"))
        == "IntegrityError: duplicate key"
    )


ASKING = WRITES | {
    "claim": lambda claim: store_for(ATOMIC).claim(operation(), uuid4()),
    "read": lambda claim: store_for(ATOMIC).read(claim.id),
    "lock": lambda claim: store_for(ATOMIC).lock(claim),
}


@pytest.mark.row_locks
@pytest.mark.parametrize("ask", ASKING.values(), ids=ASKING)
def test_every_verb_of_an_unreachable_store_is_unavailable(ask, unreachable):
    claim = claimed()
    unreachable()
    with pytest.raises(StoreUnavailable):
        ask(claim)


@pytest.mark.postgresql
@pytest.mark.parametrize(
    "policy",
    [ATOMIC, LEASE, Policy(mode=Atomic(claim="lock"))],
    ids=["atomic", "lease", "lock"],
)
def test_after_a_failover_the_claim_finds_the_server_that_writes(policy):
    with _connecting_with("default_transaction_read_only=on") as undo:
        with pytest.raises(StoreUnavailable, match="read-only"):
            engine.claim(operation(), policy)
        undo()  # the next connection is to another server
        found = engine.claim(operation(), policy)
        assert isinstance(found, Claimed)
        # a claim by lock has left its transaction open
        with engine.execution(found, policy) as run:
            run.verdict = Release()
