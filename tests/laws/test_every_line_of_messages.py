"""L1, L3, L4: an exception from a signal's handler strikes at each line of a message in turn, ours or Django's."""

from __future__ import annotations

import pytest

from django_idempotency.messages import Ack, Message, consume, current_context
from django_idempotency.policy import Policy
from tests.support.callers import pay
from tests.support.striking import ERRORS, POLICIES, assert_all_or_nothing

pytestmark = [pytest.mark.usefixtures("payer"), pytest.mark.row_locks, pytest.mark.slow, pytest.mark.interruptions]


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("policy", POLICIES)
def test_an_atomic_message_that_is_struck_leaves_all_or_nothing(policy, error):
    stated = Policy(**policy)  # once, as in a project: what makes a policy is no part of a delivery

    def deliver(reference):
        return consume(Message("queue", reference), lambda message, _context: str(pay(message.id).pk), policy=stated)

    def is_done(delivery):
        assert current_context() is None, "no handler is running"
        return isinstance(delivery, Ack)

    assert_all_or_nothing(deliver, is_done, error)
