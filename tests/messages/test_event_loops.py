"""Consumers in event loops."""

from __future__ import annotations

import asyncio

import pytest
from asgiref.sync import sync_to_async
from django.core.exceptions import ImproperlyConfigured

from django_idempotency import current as context_here
from django_idempotency.messages import (
    AlreadyDone,
    Consumer,
    Done,
    Message,
    Refused,
    RejectMessage,
    Retry,
    consume,
)
from django_idempotency.values.policy import Policy
from tests.messages.handlers import MESSAGE, pay
from tests.support.callers import all_effects as effects
from tests.support.loops import run as in_a_loop

pytestmark = pytest.mark.usefixtures("transactional_db")
LEASE = Policy(mode="lease")


def aconsume(message, handler, **options):
    return Consumer("default", handler, **options).aconsume(message)


async def apay(message, context):
    assert context_here() is context
    return await sync_to_async(pay)(message, context)


def run(*deliveries):
    async def together():
        return await asyncio.gather(*deliveries)

    return in_a_loop(together)


def test_a_coroutine_function_is_awaited_once():
    assert run(aconsume(MESSAGE, apay, policy=LEASE)) == [
        Done({"paid": 5, "attempt": 1})
    ]
    assert run(aconsume(MESSAGE, apay, policy=LEASE)) == [
        AlreadyDone({"paid": 5, "attempt": 1})
    ]
    assert effects() == 1


def test_a_plain_function_runs_in_a_thread_in_atomic_mode():
    messages = [Message("queue", str(number)) for number in range(8)]
    assert (
        run(*(aconsume(message, pay) for message in messages))
        == [Done({"paid": 5, "attempt": 1})] * 8
    )
    assert run(aconsume(messages[0], pay)) == [AlreadyDone({"paid": 5, "attempt": 1})]
    assert effects() == 8


def test_a_coroutine_function_in_atomic_mode_is_refused():
    with pytest.raises(
        ImproperlyConfigured, match=r'^tests\.\S+\.apay is async .*mode="lease"'
    ):
        run(aconsume(MESSAGE, apay))


class Callable:
    async def __call__(self, message, context):
        return await apay(message, context)


@pytest.mark.parametrize(
    ("handler", "name"),
    [(apay, "apay"), (Callable(), "Callable")],
    ids=["function", "object"],
)
def test_a_coroutine_function_is_refused_where_it_would_not_be_awaited(handler, name):
    """Its effects would be missing, and each message would be tried until it is a dead
    letter.
    """
    consumer = Consumer("receipts", handler, policy=LEASE)
    for use in (
        lambda: consumer.consume(MESSAGE),
        lambda: consumer.consume_many([MESSAGE]),
    ):
        with pytest.raises(
            ImproperlyConfigured,
            match=rf"{name} is async, so only aconsume\(\) can run it",
        ):
            use()
    assert run(aconsume(MESSAGE, handler, policy=LEASE)) == [
        Done({"paid": 5, "attempt": 1})
    ]
    assert effects() == 1


def test_a_message_whose_handler_returns_a_coroutine_is_not_done():
    delivery = consume(
        MESSAGE, lambda message, context: apay(message, context), policy=LEASE
    )
    assert isinstance(delivery, Retry)
    assert "aconsume()" in delivery.reason
    assert run(aconsume(MESSAGE, apay, policy=LEASE)) == [
        Done({"paid": 5, "attempt": 2})
    ]
    assert effects() == 1


def test_an_exception_of_a_coroutine_is_a_retry_or_a_refusal():
    async def crash(message, context):
        raise LookupError("not yet")

    async def refuse(message, context):
        raise RejectMessage("no")

    (retry,) = run(aconsume(MESSAGE, crash, policy=LEASE))
    assert isinstance(retry, Retry)
    assert (retry.attempt, retry.reason) == (1, "LookupError: not yet")
    assert run(aconsume(MESSAGE, refuse, policy=LEASE)) == [Refused("no")]
