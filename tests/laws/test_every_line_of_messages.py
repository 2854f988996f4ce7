"""L1, L3, L4: an exception from a signal's handler strikes at each line of a message in
turn, ours or Django's.
"""

from __future__ import annotations

import pytest

from django_idempotency import current
from django_idempotency.messages import (
    Ack,
    InFlightElsewhere,
    Message,
    consume,
)
from django_idempotency.values.policy import Policy
from tests.support.callers import pay
from tests.support.striking import Interrupted, assert_all_or_nothing, struck_by

pytestmark = [
    pytest.mark.usefixtures("payer"),
    pytest.mark.row_locks,
    pytest.mark.slow,
    pytest.mark.interruptions,
]


@struck_by(SystemExit, Interrupted)
def test_an_atomic_message_that_is_struck_leaves_all_or_nothing(policy, error):
    stated = Policy(**policy)

    def deliver(reference):
        return consume(
            Message("queue", reference),
            lambda *_handled: str(pay(reference).pk),
            policy=stated,
        )

    def is_done(delivery):
        assert not current(), "no handler is running"
        return isinstance(delivery, Ack)

    is_running = lambda delivery: isinstance(delivery, InFlightElsewhere)  # noqa: E731
    assert_all_or_nothing(deliver, is_done=is_done, is_running=is_running, error=error)
