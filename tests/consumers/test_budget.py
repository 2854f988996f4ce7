"""What a message costs in statements."""

from __future__ import annotations

import pytest

from django_idempotency.consumers import AlreadyDone, Consumer, Done
from django_idempotency.policy import Policy
from tests.consumers.handlers import MESSAGE, Message
from tests.support.statements import sent_statements

pytestmark = [pytest.mark.postgresql, pytest.mark.usefixtures("transactional_db")]


def test_a_message_takes_three_statements_and_a_duplicate_one():
    """Beside COMMIT, which a handler that writes needs anyway: claim, lock with BEGIN, complete."""
    first, duplicate = statements_of(Policy())
    assert (len(first.all), len(duplicate.all)) == (4, 1)


def test_a_message_by_lock_takes_two_statements_in_one_transaction():
    """Claim with BEGIN, insert, COMMIT. A duplicate begins and ends a transaction to find out."""
    first, duplicate = statements_of(Policy(claim="lock"))
    assert first.all[0].startswith("BEGIN")
    assert (len(first.all), len(duplicate.all)) == (3, 2)


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
