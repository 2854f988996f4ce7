"""The message entry point: once, however often it is delivered, and the right word to the broker each time."""

from __future__ import annotations

import pytest
from django.contrib.auth import get_user_model
from django.db import connection, transaction

from django_idempotency.consumers import (
    NOT_KEPT,
    Ack,
    AlreadyDone,
    AwaitsOperator,
    Done,
    InFlightElsewhere,
    Message,
    Refused,
    Reject,
    RejectMessage,
    Retry,
    RetryLater,
    consume,
)
from django_idempotency.exceptions import ClaimInsideTransaction
from django_idempotency.policy import Policy
from testproject.models import LedgerEntry
from tests.support.callers import all_effects as effects
from tests.support.threads import in_threads, wait_little_for_locks

pytestmark = pytest.mark.usefixtures("transactional_db")

MESSAGE = Message("payments", "id-1", b'{"amount": 5, "currency": "EUR"}')


@pytest.fixture
def pay():
    """A handler that writes one effect and says which attempt it was."""
    user = get_user_model().objects.create_user("carol")

    def handle(message, context):
        LedgerEntry.objects.create(user=user, amount=5, reference=message.id)
        return {"paid": 5, "attempt": context.attempt}

    return handle


def test_a_message_is_handled_and_acknowledged_with_its_result(pay):
    assert consume(MESSAGE, pay) == Done({"paid": 5, "attempt": 1})
    assert effects() == 1


def test_a_duplicate_message_is_acknowledged_with_its_result(pay):
    consume(MESSAGE, pay)
    assert consume(MESSAGE, pay) == AlreadyDone({"paid": 5, "attempt": 1})
    assert effects() == 1


def test_the_same_id_from_another_source_is_another_message(pay):
    consume(MESSAGE, pay)
    assert consume(Message("refunds", MESSAGE.id, MESSAGE.body), pay) == Done({"paid": 5, "attempt": 1})


def test_json_that_is_only_written_otherwise_is_the_same_body(pay):
    consume(MESSAGE, pay)
    assert isinstance(consume(Message("payments", "id-1", b'{"currency":"EUR","amount":5}'), pay), AlreadyDone)


def test_an_id_that_is_used_for_another_body_is_rejected(pay):
    consume(MESSAGE, pay)
    assert isinstance(consume(Message("payments", "id-1", b'{"amount": 6}'), pay), Reject)
    assert effects() == 1


def test_of_concurrent_deliveries_one_is_handled(pay):
    """And then once more: where writers meet, as in SQLite and MariaDB, all of them may be told to come again."""
    answers = [*in_threads(8, lambda _index: consume(MESSAGE, pay)), consume(MESSAGE, pay)]
    (done,) = [answer for answer in answers if type(answer) is Done]
    assert done.result["paid"] == 5
    assert all(isinstance(answer, RetryLater) or answer.result == done.result for answer in answers)
    assert effects() == 1


def test_a_delivery_while_another_is_at_work_is_to_be_retried_later(pay, other_thread):
    def work(message, context):
        other_thread(wait_little_for_locks)
        meanwhile.append(other_thread(consume, MESSAGE, pay))
        return pay(message, context)

    meanwhile = []
    assert isinstance(consume(MESSAGE, work), Ack)
    assert meanwhile == [InFlightElsewhere(1, "another consumer is handling the message")]
    assert effects() == 1


def test_a_rejected_message_stays_rejected_and_leaves_no_effect(pay):
    def refuse(message, context):
        pay(message, context)
        raise RejectMessage("no such account")

    assert consume(MESSAGE, refuse) == Refused("no such account")
    assert consume(MESSAGE, pay) == Refused("no such account")
    assert effects() == 0


def test_a_crash_leaves_no_effect_and_a_redelivery_runs_again(pay):
    def crash(message, context):
        pay(message, context)
        raise LookupError("not yet")

    assert consume(MESSAGE, crash).reason == "LookupError: not yet"
    assert effects() == 0
    assert consume(MESSAGE, pay) == Done({"paid": 5, "attempt": 2})


def test_a_result_that_is_no_json_is_refused_before_commit(pay):
    assert "can't be kept" in consume(MESSAGE, lambda *given: [pay(*given), object()]).reason
    assert effects() == 0
    assert consume(MESSAGE, pay) == Done({"paid": 5, "attempt": 2})


def test_a_result_too_large_to_keep_is_still_never_earned_twice(pay):
    policy = Policy(max_body_size=10)
    assert consume(MESSAGE, pay, policy=policy) == Done({"paid": 5, "attempt": 1})
    assert consume(MESSAGE, pay, policy=policy) == AlreadyDone(NOT_KEPT)
    assert effects() == 1


def test_a_message_whose_handler_died_waits_for_an_operator(pay):
    class Killed(BaseException):
        pass

    def die(message, context):
        pay(message, context)
        raise Killed

    policy = Policy(mode="lease", on_crash="hold")
    with pytest.raises(Killed):
        consume(MESSAGE, die, policy=policy)
    assert consume(MESSAGE, pay, policy=policy) == AwaitsOperator(60, "Killed")
    assert effects() == 1


def test_a_message_whose_handler_raises_waits_for_nobody(pay):
    def crash(message, context):
        raise LookupError("not yet")

    policy = Policy(mode="lease", on_crash="hold")
    assert isinstance(consume(MESSAGE, crash, policy=policy), Retry)
    assert consume(MESSAGE, pay, policy=policy) == Done({"paid": 5, "attempt": 2})


def test_consuming_inside_an_open_transaction_is_refused(pay):
    with pytest.raises(ClaimInsideTransaction), transaction.atomic():
        consume(MESSAGE, pay)


def test_a_store_out_of_reach_leaves_the_message_for_later(pay, other_thread, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setitem(connection.settings_dict, "NAME", "/nowhere/at/all")
        assert isinstance(other_thread(consume, MESSAGE, pay), RetryLater)
    assert consume(MESSAGE, pay) == Done({"paid": 5, "attempt": 1})
