"""A transaction ends once, and says what became of it."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
from django.db import DataError, connection, transaction
from django.db.transaction import TransactionManagementError

from django_idempotency.stores.transactions import (
    Committed,
    InDoubt,
    State,
    Transaction,
    Undone,
)
from tests.support.callers import effects, pay
from tests.support.proxy import Cut

pytestmark = [pytest.mark.usefixtures("payer"), pytest.mark.postgresql]

# by a pipeline, or where something watches each statement
SENDING = {
    "together": nullcontext,
    "one by one": lambda: connection.execute_wrapper(
        lambda execute, *details: execute(*details)
    ),
}
either_way = pytest.mark.parametrize("sending", SENDING.values(), ids=SENDING)


@pytest.fixture
def business():
    business = Transaction("default", durable=True)
    assert "new" in repr(business)
    business.begin()
    pay()
    assert business.state is State.OPEN
    yield business
    business.close()
    assert not connection.in_atomic_block


def fence(divisor):
    return lambda send: send("SELECT 6 / %s::int", (divisor,)).row


@either_way
def test_a_transaction_is_committed_after_its_last_write(business, sending):
    with sending():
        assert business.commit_after(fence(2)) == Committed((3,))
    assert (business.state, effects()) == (State.COMMITTED, 1)


@either_way
def test_a_last_write_that_fails_undoes_the_transaction(business, sending):
    with sending():
        ended = business.commit_after(fence(0))
    assert isinstance(ended, Undone)
    with pytest.raises(DataError, match="division by zero"):
        ended.expect()
    assert (business.state, effects()) == (State.ROLLED_BACK, 0)


def test_a_commit_whose_reply_is_lost_is_in_doubt(proxy):
    business = Transaction("default")
    business.begin()
    pay()
    proxy.cut = Cut.AFTER_COMMIT
    ended = business.commit_after(fence(1))
    assert isinstance(ended, InDoubt)
    assert (repr(business), effects()) == ("<Transaction on 'default': in doubt>", 1)


@either_way
@pytest.mark.parametrize("ends", ["marks it", "fails", "enters a block"])
def test_a_transaction_that_cannot_be_committed_is_undone(business, sending, ends):
    def write(send):
        if ends == "marks it":
            transaction.set_rollback(True)
        elif ends == "fails":
            with pytest.raises(DataError), connection.cursor() as cursor:
                cursor.execute("SELECT 1 / 0")
        else:
            transaction.atomic().__enter__()
            send("SELECT 1", ())

    with sending():
        ended = business.commit_after(write)
    assert isinstance(ended, Undone)
    assert isinstance(ended.error, TransactionManagementError)
    assert effects() == 0


def test_a_transaction_is_rolled_back_on_request(business):
    business.roll_back()
    assert (business.state, effects()) == (State.ROLLED_BACK, 0)


def test_an_error_after_commit_is_in_doubt(business):
    """As one that a signal's handler raises before the caller knows."""
    assert business.commit_after(fence(1)) == Committed((6,))
    assert isinstance(business.abort(LookupError()), InDoubt)
    assert (business.state, effects()) == (State.COMMITTED, 1)
