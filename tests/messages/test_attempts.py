"""How often a message is tried, and what its consumer hears of it."""

from __future__ import annotations

import sys

import pytest
from django.core.exceptions import ImproperlyConfigured

from django_idempotency import current
from django_idempotency.messages import (
    Backoff,
    Consumer,
    Done,
    Exhausted,
    Message,
    Retry,
    consume,
)
from django_idempotency.models import IdempotencyRecord
from django_idempotency.values.policy import Policy
from tests.messages.handlers import MESSAGE, pay
from tests.support.callers import all_effects as effects

pytestmark = pytest.mark.usefixtures("transactional_db")


def crash(message, context):
    pay(message, context)
    raise LookupError("not yet")


@pytest.mark.parametrize("mode", ["atomic", "lease"])
def test_a_handler_that_raises_is_retried_with_backoff(mode):
    consumer = Consumer("c", crash, policy=Policy(mode=mode), backoff=Backoff(first=3))
    retries = [consumer.consume(MESSAGE) for _attempt in range(3)]
    assert [(retry.delay, retry.attempt) for retry in retries] == [
        (3, 1),
        (6, 2),
        (12, 3),
    ]
    assert {retry.reason for retry in retries} == {"LookupError: not yet"}
    assert isinstance(retries[0].error, LookupError)
    assert effects() == (0 if mode == "atomic" else 3)


def test_the_last_attempt_that_fails_makes_a_dead_letter():
    consumer = Consumer("c", crash, max_attempts=2)
    assert isinstance(consumer.consume(MESSAGE), Retry)
    assert consumer.consume(MESSAGE) == Exhausted(
        "attempt 2 of 2 failed: LookupError: not yet", 2
    )


def test_a_dead_letter_that_comes_back_as_it_went_is_not_run():
    consumer = Consumer("c", crash, max_attempts=1)
    consumer.consume(MESSAGE)
    assert consumer.consume(MESSAGE) == Exhausted(
        "1 attempts failed or were cut short", 1
    )
    assert IdempotencyRecord.objects.get().status == "failed"


def test_a_replayed_dead_letter_is_tried_as_often_again():
    consumer = Consumer("c", crash, max_attempts=2)
    for _attempt in range(2):
        consumer.consume(MESSAGE)
    again = Message(
        MESSAGE.source, MESSAGE.id, MESSAGE.body, {"idempotency-attempts": "2"}
    )
    assert isinstance(consumer.consume(again), Retry)
    assert Consumer("c", pay, max_attempts=2).consume(again) == Done(
        {"paid": 5, "attempt": 4}
    )


@pytest.mark.parametrize("attempts", ["", "-1", "x", "9" * 50, None])
def test_a_header_without_a_count_of_attempts_counts_none(attempts):
    assert (
        Message("queue", "1", b"", {"idempotency-attempts": attempts}).attempts_before
        == 0
    )


def test_a_message_whose_handler_exits_is_a_dead_letter_in_the_end():
    """As is one that kills its process: see the batches."""
    consumer = Consumer("c", lambda *_given: sys.exit(3), max_attempts=2)
    for _attempt in range(2):
        with pytest.raises(SystemExit):
            consumer.consume(MESSAGE)
    assert isinstance(consumer.consume(MESSAGE), Exhausted)


@pytest.mark.parametrize("wrong", [0, -1, 1.5, "3"])
def test_attempts_are_a_number_from_one(wrong):
    with pytest.raises(ImproperlyConfigured, match="max_attempts is"):
        consume(MESSAGE, pay, max_attempts=wrong)


def test_backoff_grows_to_its_longest_and_never_overflows():
    backoff = Backoff(first=1, factor=2, longest=300)
    assert [backoff(attempt) for attempt in (1, 2, 3, 9, 10, 10_000)] == [
        1,
        2,
        4,
        256,
        300,
        300,
    ]


@pytest.mark.parametrize("mode", ["atomic", "lease"])
def test_code_deep_inside_a_handler_finds_its_context(mode):
    def deep():
        return current().child_key("mail")

    def handle(message, context):
        return [deep() == context.child_key("mail"), context.attempt]

    assert consume(MESSAGE, handle, policy=Policy(mode=mode)) == Done([True, 1])
    assert not current()


def test_a_handler_has_its_context_again_after_a_message_of_its_own_that_failed():
    def handle(message, context):
        assert isinstance(consume(Message("inner", "1"), crash), Retry)
        return current() is context

    assert consume(MESSAGE, handle, policy=Policy(mode="lease")) == Done(True)
