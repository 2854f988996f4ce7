"""The message entry point: once, however often it is delivered, and the right word to
the broker each time.
"""

from __future__ import annotations

import pytest
from django.db import transaction

from django_idempotency.messages import (
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
from django_idempotency.values.exceptions import ClaimInsideTransaction
from django_idempotency.values.policy import Lease, Policy
from tests.messages.handlers import MESSAGE, pay
from tests.support.callers import all_effects as effects
from tests.support.threads import in_threads, wait_little_for_locks
from tests.support.waiting import eventually

pytestmark = pytest.mark.usefixtures("transactional_db")


def test_json_that_is_only_written_otherwise_is_the_same_body():
    consume(MESSAGE, pay)
    assert isinstance(
        consume(Message("payments", "id-1", b'{"currency":"EUR","amount":5}'), pay),
        AlreadyDone,
    )


def test_an_id_that_is_used_for_another_body_is_rejected():
    consume(MESSAGE, pay)
    assert isinstance(
        consume(Message("payments", "id-1", b'{"amount": 6}'), pay), Reject
    )
    assert effects() == 1


def test_of_concurrent_deliveries_one_is_handled():
    """And then again: where writers meet, as in SQLite and MariaDB, all of them may be
    told to come again.
    """
    answers = in_threads(8, lambda _index: consume(MESSAGE, pay))

    def again():
        answers.append(consume(MESSAGE, pay))
        return isinstance(answers[-1], Ack)

    eventually(again)
    (done,) = [answer for answer in answers if type(answer) is Done]
    assert done.result["paid"] == 5
    assert all(
        isinstance(answer, RetryLater) or answer.result == done.result
        for answer in answers
    )
    assert effects() == 1


def test_a_delivery_while_another_is_at_work_is_to_be_retried_later(other_thread):
    def work(message, context):
        other_thread(wait_little_for_locks)
        meanwhile.append(other_thread(consume, MESSAGE, pay))
        return pay(message, context)

    meanwhile = []
    assert isinstance(consume(MESSAGE, work), Ack)
    assert meanwhile == [
        InFlightElsewhere(1, "another consumer is handling the message")
    ]
    assert effects() == 1


def test_a_rejected_message_stays_rejected_and_its_effects_are_undone():
    def refuse(message, context):
        pay(message, context)
        raise RejectMessage("no such account")

    assert consume(MESSAGE, refuse) == Refused("no such account")
    assert consume(MESSAGE, pay) == Refused("no such account")
    assert effects() == 0


def test_a_message_whose_handler_died_waits_for_an_operator():
    def die(message, context):
        pay(message, context)
        raise SystemExit

    policy = Policy(mode=Lease(on_crash="hold"))
    with pytest.raises(SystemExit):
        consume(MESSAGE, die, policy=policy)
    assert consume(MESSAGE, pay, policy=policy) == AwaitsOperator(60, "SystemExit")
    assert effects() == 1


def test_a_message_whose_handler_raises_waits_for_nobody():
    def crash(message, context):
        raise LookupError("not yet")

    policy = Policy(mode=Lease(on_crash="hold"))
    assert isinstance(consume(MESSAGE, crash, policy=policy), Retry)
    assert consume(MESSAGE, pay, policy=policy) == Done({"paid": 5, "attempt": 2})


def test_consuming_inside_an_open_transaction_is_refused():
    with pytest.raises(ClaimInsideTransaction), transaction.atomic():
        consume(MESSAGE, pay)
