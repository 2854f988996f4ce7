"""L3, L4: a transaction that ended behind Django's back has no success to tell of, and
nothing is stored for it.
"""

from __future__ import annotations

import threading

import pytest
from django.db import OperationalError, connection, transaction
from django.http import Http404, HttpResponse

from django_idempotency.messages import Ack, Message, Retry, consume
from django_idempotency.models import IdempotencyRecord
from django_idempotency.values.exceptions import TransactionEnded
from testproject.models import LedgerEntry
from tests.support.callers import effects, entry_point, pay, record
from tests.support.sql import run_sql
from tests.support.threads import in_threads
from tests.support.views_of_laws import BY_LOCK

# SQLite has no transaction after the end
pytestmark = [pytest.mark.row_locks, pytest.mark.usefixtures("payer")]


def sql(*statements):
    def end():
        for statement in statements:
            run_sql(statement)

    return end


BEGIN = {"postgresql": "BEGIN", "mysql": "START TRANSACTION", "sqlite": "BEGIN"}[
    connection.vendor
]
ROLLED_BACK = {
    "ROLLBACK": sql("ROLLBACK"),
    "ROLLBACK, and another": sql("ROLLBACK", BEGIN),
    "the driver's rollback": lambda: connection.connection.rollback(),
}
COMMITTED = {
    "COMMIT": sql("COMMIT"),
    "COMMIT, and another": sql("COMMIT", BEGIN),
    "the driver's commit": lambda: connection.connection.commit(),
}
FINISHES = {
    "returns 201": lambda: HttpResponse(status=201),
    "returns 409": lambda: HttpResponse(status=409),
    "returns 422": lambda: HttpResponse(status=422),
}
# After a raw end psycopg2 does not notice that it is outside a transaction, so what
# follows is committed at once.
UNNOTICED = connection.Database.__name__ == "psycopg2"
in_atomic_mode = pytest.mark.parametrize("mode", ["atomic", BY_LOCK])
finishing = pytest.mark.parametrize("finish", FINISHES.values(), ids=FINISHES)


def paying_around(end, finish):
    """A view that pays, ends its transaction the first time it runs, and pays again."""
    ends = [end]

    def view(request):
        pay("before")
        if ends:
            ends.pop()()
            pay("after")
        return finish()

    return view


@finishing
@in_atomic_mode
@pytest.mark.parametrize("end", ROLLED_BACK.values(), ids=ROLLED_BACK)
def test_after_a_rollback_nothing_is_stored_and_a_retry_runs(end, mode, finish):
    send = entry_point(paying_around(end, finish), mode=mode)
    with pytest.raises(TransactionEnded):
        send()
    after = int(UNNOTICED and end is ROLLED_BACK["ROLLBACK"])
    assert (effects("before"), effects("after")) == (0, after)
    assert record() is None if mode != "atomic" else record().response_status is None
    assert send().status_code == finish().status_code
    assert (effects("before"), effects("after")) == (1, after)


@finishing
@in_atomic_mode
@pytest.mark.parametrize("end", COMMITTED.values(), ids=COMMITTED)
def test_after_a_commit_nothing_is_stored_and_an_operator_decides(end, mode, finish):
    send = entry_point(paying_around(end, finish), mode=mode)
    with pytest.raises(TransactionEnded):
        send()
    after = int(UNNOTICED and end is COMMITTED["COMMIT"])
    assert (effects("before"), effects("after"), record().response_status) == (
        1,
        after,
        None,
    )
    assert record().on_hold
    assert send().status_code == 409
    assert effects("before") == 1


@pytest.mark.postgresql
def test_after_a_rollback_under_serializable_nothing_is_stored(monkeypatch):
    """There the record is found by its place, with a statement of its own."""
    from django.db.backends.postgresql.psycopg_any import IsolationLevel

    connection.close()
    send = entry_point(
        paying_around(ROLLED_BACK["ROLLBACK, and another"], FINISHES["returns 201"])
    )
    with monkeypatch.context() as patch:
        patch.setitem(
            connection.settings_dict,
            "OPTIONS",
            {"isolation_level": IsolationLevel.SERIALIZABLE},
        )
        with pytest.raises(TransactionEnded):
            send()
    connection.close()
    assert (effects(), record().status, record().response_status) == (0, "failed", None)


def test_an_exception_after_a_commit_puts_the_key_on_hold():
    def view(request):
        pay("before")
        COMMITTED["COMMIT"]()
        raise LookupError

    send = entry_point(view)
    with pytest.raises(LookupError):
        send()
    assert (effects("before"), record().on_hold) == (1, True)


@pytest.mark.postgresql
@pytest.mark.parametrize(
    "loss", [True, False], ids=["the connection is lost", "an exception"]
)
@pytest.mark.parametrize(
    "statement",
    [
        "VACUUM (FREEZE) {table}",
        "VACUUM FULL {table}",
        "UPDATE {table} SET replays = 1",
    ],
)
def test_a_commit_is_known_whatever_happens_to_the_row_afterwards(
    other_thread, statement, loss
):
    """The lock that the transaction has left on the row goes with that."""

    def view(request):
        pay("before")
        COMMITTED["COMMIT"]()
        other_thread(sql(statement.format(table=IdempotencyRecord._meta.db_table)))
        if loss:
            pid = connection.connection.info.backend_pid
            other_thread(sql(f"SELECT pg_terminate_backend({pid}, 60000)"))
            pay("after")
        raise LookupError

    send = entry_point(view)
    with pytest.raises((LookupError, OperationalError)):
        send()
    assert (effects("before"), record().on_hold) == (1, True)
    assert send().status_code == 409


def test_a_handlers_transaction_that_ended_is_not_acknowledged():
    def handler(message, context):
        pay("before")
        if context.attempt == 1:
            ROLLED_BACK["ROLLBACK"]()

    message = Message("queue", "1", b"")
    assert isinstance(consume(message, handler), Retry)
    assert isinstance(consume(message, handler), Ack)
    assert effects("before") == 1


@pytest.mark.parametrize("finish", [HttpResponse, Http404])
def test_the_views_own_savepoints_do_not_end_the_run(finish):
    def view(request):
        with transaction.atomic():
            pay("kept")
        try:
            with transaction.atomic():
                pay("undone")
                raise LookupError
        except LookupError:
            pass
        if finish is Http404:
            raise Http404
        return finish()

    if finish is Http404:
        with pytest.raises(Http404):
            entry_point(view)()
    else:
        entry_point(view)()
    assert (effects("kept"), effects("undone")) == (1, 0)


@pytest.mark.mariadb
def test_a_deadlock_under_a_raw_retry_is_a_failure():
    """InnoDB rolls back all of the victim's transaction, the one that has written
    least; Django does not know it.
    """
    first, second = pay("first").pk, pay("second").pk
    locked, asked = threading.Event(), threading.Event()

    def rival(_index):
        with transaction.atomic():
            for _row in range(50):
                pay("rival")
            LedgerEntry.objects.filter(pk=second).update(amount=7)
            locked.set()
            assert asked.wait(60)
            LedgerEntry.objects.filter(pk=first).update(amount=7)

    def view(request):
        pay("before")
        LedgerEntry.objects.filter(pk=first).update(amount=8)
        assert locked.wait(60)
        asked.set()
        with connection.cursor() as cursor:  # the ORM would mark the transaction
            raw = f"UPDATE {LedgerEntry._meta.db_table} SET amount = 8 WHERE id = %s"
            with pytest.raises(OperationalError, match="Deadlock"):
                cursor.execute(
                    raw, [LedgerEntry._meta.pk.get_db_prep_value(second, connection)]
                )
            cursor.execute(
                raw, [LedgerEntry._meta.pk.get_db_prep_value(second, connection)]
            )
        return HttpResponse(status=201)

    def request(_index):
        with pytest.raises(TransactionEnded):
            entry_point(view)()

    in_threads(2, lambda index: (rival, request)[index](index))
    assert (effects("before"), effects("rival"), record().response_status) == (
        0,
        50,
        None,
    )
