"""L10: a mismatch is answered first, and changes nothing."""

from __future__ import annotations

import pytest

from django_idempotency.stores import store_for
from django_idempotency.values.policy import Lease, Policy
from tests.support.callers import Gate, claim, entry_point, paying, row, shift
from tests.support.views_of_laws import (
    HOUR,
    OTHER_BODY,
    in_both_modes,
    on_hold,
    row_locks,
)

pytestmark = pytest.mark.usefixtures("payer")


def dead_holder(mode):
    claim(policy=Policy(mode=mode))
    shift(locked_at=-HOUR, locked_until=-HOUR)


def failed(mode):
    store_for(Policy()).fail(claim(policy=Policy(mode=mode)), "refused")


def crashed_and_to_be_held(mode):
    claim(policy=Policy(mode=Lease(on_crash="hold")))
    shift(locked_until=-HOUR)


STATES = {
    "claimed just now": lambda mode: claim(policy=Policy(mode=mode)),
    "dead owner": dead_holder,
    "crashed and to be put on hold": crashed_and_to_be_held,
    "failed": failed,
    "on_hold": on_hold,
    "completed": lambda mode: entry_point(paying, mode=mode)(),
}


@in_both_modes
@pytest.mark.parametrize("state", STATES.values(), ids=STATES)
def test_l10_a_mismatch_leaves_the_record_alone_in_every_state(mode, state):
    state(mode)
    before = row()
    answer = entry_point(paying, mode=mode)(body=OTHER_BODY)
    assert answer.status_code == 422
    assert b"idempotency_key_reused" in answer.content
    assert row() == before


@row_locks
@in_both_modes
def test_l10_a_mismatch_is_answered_while_a_live_owner_runs(mode):
    with Gate().running(mode=mode) as answer:
        assert entry_point(paying, mode=mode)(body=OTHER_BODY).status_code == 422
    assert answer.result().status_code == 201
