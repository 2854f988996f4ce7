"""Which keys a policy lets in, how many callers may wait for one, and when those that may not come back."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest
from asgiref.sync import sync_to_async
from django.core.exceptions import ImproperlyConfigured
from django.db import connections
from django.http import HttpResponse

from django_idempotency import signals
from django_idempotency.decorators import idempotent
from django_idempotency.engine.waiters import waiters
from django_idempotency.http.problems import jittered
from django_idempotency.models import IdempotencyRecord
from django_idempotency.policy import Policy
from tests.support.callers import SCOPE, Gate, entry_point, heard, is_replay, paying, post
from tests.support.views import Runs, code
from tests.support.waiting import eventually

UUID = "8e03978e-40d5-43dd-bc93-6894a57f9324"


# --- Keys ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "fitting", "others"),
    [
        ({"min_key_length": 16}, "k" * 16, ["k" * 15, "k"]),
        ({"key_pattern": "[0-9a-f-]{36}"}, UUID, [UUID + "0", "x" + UUID, "order-1", UUID.upper()]),
        ({"key_pattern": "a|b"}, "b", ["ab", "c"]),
    ],
    ids=str,
)
def test_a_key_that_does_not_fit_is_refused(call, policy, fitting, others):
    runs = Runs()
    view = idempotent(**policy)(runs.view)
    for key in others:
        refused = call(view, key=key)
        assert (refused.status_code, code(refused)) == (400, "idempotency_key_malformed")
        assert refused.json()["safe_new_key"] is False, "it may have been used before the policy was stated"
    assert (runs.count, IdempotencyRecord.objects.count()) == (0, 0)
    assert call(view, key=fitting).status_code == 200


def test_the_form_of_keys_may_be_a_setting(call, settings):
    settings.IDEMPOTENCY = {"KEY_PATTERN": "order-[0-9]+", "MIN_KEY_LENGTH": 8}
    assert [call(idempotent(Runs().view), key=key).status_code for key in ("order-1", "order-12")] == [400, 200]


@pytest.mark.parametrize("wrong", [{"key_pattern": "("}, {"key_pattern": b"a"}, {"min_key_length": 0}])
def test_a_form_that_no_key_can_have_is_refused(wrong):
    with pytest.raises(ImproperlyConfigured, match=next(iter(wrong))):
        Policy(**wrong)


# --- Waiters ---------------------------------------------------------------------------------------------------------

WAIT = {"mode": "lease", "on_conflict": "wait", "wait_timeout": 30}


def one_waits(**policy):
    try:
        return entry_point(paying, **WAIT, **policy)()
    finally:
        connections.close_all()


@pytest.mark.usefixtures("payer")
def test_no_more_callers_wait_for_a_key_than_may():
    gate = Gate()
    with ThreadPoolExecutor(3) as pool:
        with gate.running(mode="lease") as first:
            waiting = [pool.submit(one_waits, max_waiters=2) for _ in range(2)]
            eventually(lambda: len(waiters) == 2)
            with heard(signals.request_rejected) as rejected:
                refused = one_waits(max_waiters=2)
            assert (refused.status_code, code(refused)) == (409, "idempotency_key_in_use")
            assert int(refused.headers["Retry-After"]) >= 1
            assert [named["reason"] for named in rejected] == ["in_flight"], "it did not wait"
            assert not any(caller.done() for caller in waiting)
            with Gate().running_with("other", mode="lease"):
                other = pool.submit(another_waits, max_waiters=2)
                eventually(lambda: len(waiters) == 3)
        answers = [caller.result(30) for caller in (*waiting, other)]
    assert [answer.content for answer in answers[:2]] == [first.result().content] * 2
    assert all(map(is_replay, answers))
    assert len(waiters) == 0


def another_waits(**policy):
    try:
        return entry_point(paying, **WAIT, **policy)("other")
    finally:
        connections.close_all()


@pytest.mark.usefixtures("payer")
@pytest.mark.parametrize("raised", [KeyboardInterrupt, LookupError])
def test_a_caller_that_is_interrupted_waits_no_more(monkeypatch, raised):
    def interrupt(seconds):
        assert len(waiters) == 1
        raise raised

    with Gate().running(mode="lease"):
        monkeypatch.setattr("django_idempotency.engine.claims.time.sleep", interrupt)
        with pytest.raises(raised):
            entry_point(paying, **WAIT)()
    assert len(waiters) == 0


@pytest.mark.usefixtures("payer")
def test_an_async_caller_that_hangs_up_waits_no_more():
    async def main():
        entered, let_go = asyncio.Event(), asyncio.Event()

        async def view(request):
            entered.set()
            await let_go.wait()
            return HttpResponse(b"done")

        send = idempotent(scope=SCOPE, max_waiters=1, **WAIT)(view)
        owner = asyncio.ensure_future(send(post()))
        await asyncio.wait_for(entered.wait(), 30)
        waiter = asyncio.ensure_future(send(post()))
        while not len(waiters):
            await asyncio.sleep(0.01)
        refused = await send(post())
        waiter.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiter
        left = len(waiters)
        let_go.set()
        await owner
        await sync_to_async(connections.close_all)()
        return refused.status_code, left

    assert asyncio.run(main()) == (409, 0)


# --- Coming back -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("seconds", "latest"), [(1, 2), (2, 3), (7, 10), (30, 45)])
def test_callers_come_back_spread_out_within_bounds(seconds, latest):
    told = {jittered(seconds) for _draw in range(2000)}
    assert told == set(range(seconds, latest + 1))
