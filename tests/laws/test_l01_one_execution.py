"""L1: at most one execution per key ever commits its effects."""

from __future__ import annotations

import pytest

from django_idempotency.values.policy import Policy
from tests.support.callers import claim, effects, entry_point, paying, record, shift
from tests.support.proxy import Cut
from tests.support.threads import in_threads
from tests.support.views_of_laws import HOUR, in_both_modes, postgresql, row_locks

pytestmark = pytest.mark.usefixtures("payer")


@row_locks
@in_both_modes
@pytest.mark.parametrize("lock", ["nowait", "skip_locked"], indirect=True)
def test_l1_of_many_who_find_a_dead_owner_one_runs(mode, lock):
    policy = {"mode": mode}
    claim(policy=Policy(**policy))
    shift(locked_at=-HOUR, locked_until=-HOUR)
    answers = in_threads(12, lambda _: entry_point(paying, **policy)())
    assert effects() == 1
    assert {answer.status_code for answer in answers} <= {201, 409}
    assert len({answer.content for answer in answers if answer.status_code == 201}) == 1


@row_locks
@in_both_modes
def test_l1_of_many_who_find_an_expired_response_one_runs(mode):
    entry_point(paying, mode=mode)()
    shift(expires_at=-1, purge_at=HOUR)
    in_threads(12, lambda _: entry_point(paying, mode=mode)())
    assert effects() == 2


@in_both_modes
def test_l1_up_to_the_end_of_the_retention_nothing_runs_again(mode):
    send = entry_point(paying, mode=mode)
    first = send()
    shift(expires_at=60, purge_at=HOUR)
    assert send().content == first.content
    assert effects() == 1


@postgresql
@in_both_modes
def test_l1_a_claim_whose_response_was_lost_is_still_the_callers_own(mode, proxy):
    proxy.cut = Cut.AFTER_CLAIM
    assert entry_point(paying, mode=mode)().status_code == 201
    assert (effects(), record().attempts, proxy.cuts) == (1, 1, 1)
