"""What a message costs in statements."""

from __future__ import annotations

import pytest

from django_idempotency.consumers import AlreadyDone, Consumer, Done
from tests.consumers.handlers import MESSAGE, Message
from tests.support.statements import sent_statements

pytestmark = [pytest.mark.postgresql, pytest.mark.usefixtures("transactional_db")]


def test_a_message_takes_three_statements_and_a_duplicate_one():
    """Beside BEGIN and COMMIT, which a handler that writes needs anyway: claim, lock, complete."""
    consumer = Consumer("c", lambda message, context: None)
    for number in range(8):  # until they are prepared
        consumer.consume(Message("queue", f"warm-{number}"))
    with sent_statements() as first:
        assert isinstance(consumer.consume(MESSAGE), Done)
    with sent_statements() as second:
        assert isinstance(consumer.consume(MESSAGE), AlreadyDone)
    assert (len(first.data), len(first.transaction), len(second.all)) == (3, 2, 1)
