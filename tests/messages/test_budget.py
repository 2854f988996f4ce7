"""What a message costs in statements."""

from __future__ import annotations

import pytest

from django_idempotency.messages import AlreadyDone, Consumer, Done
from django_idempotency.policy import Atomic, Policy
from tests.messages.handlers import MESSAGE, Message
from tests.support.statements import sent_statements

pytestmark = [pytest.mark.postgresql, pytest.mark.usefixtures("transactional_db")]


def test_a_message_takes_three_round_trips_and_a_duplicate_one():
    """Claim; lock with BEGIN; complete with COMMIT."""
    first, duplicate = statements_of(Policy())
    assert (len(first.round_trips), len(duplicate.round_trips)) == (3, 1)
    assert [len(together) for together in first.round_trips] == [1, 2, 2]


def test_a_message_by_lock_takes_two_round_trips():
    """Claim with BEGIN; insert with COMMIT. A duplicate begins and ends a transaction to find out."""
    first, duplicate = statements_of(Policy(mode=Atomic(claim="lock")))
    assert [together[0] for together in first.round_trips] == ["BEGIN", first.all[3]]
    assert (len(first.round_trips), len(duplicate.round_trips)) == (2, 2)


def statements_of(policy):
    """What a first delivery sends, and a duplicate."""
    consumer = Consumer("c", lambda message, context: None, policy=policy)
    for number in range(8):  # until they are prepared
        consumer.consume(Message("queue", f"warm-{number}"))
    with sent_statements() as first:
        assert isinstance(consumer.consume(MESSAGE), Done)
    with sent_statements() as second:
        assert isinstance(consumer.consume(MESSAGE), AlreadyDone)
    return first, second
