"""An async caller that hangs up: what was reached stands, and no claim is left with
nobody behind it.
"""

from __future__ import annotations

import asyncio
import threading
from uuid import uuid4

import pytest
from asgiref.sync import sync_to_async
from django.http import HttpResponse

from django_idempotency import engine
from django_idempotency.engine.waiting import waiters
from django_idempotency.http.placement import idempotent
from django_idempotency.models import IdempotencyRecord
from django_idempotency.stores import store_for
from django_idempotency.values.policy import Body, Lease, Policy
from django_idempotency.values.scopes import BuiltInScope
from tests.support.callers import SCOPE, is_replay, operation, post, record
from tests.support.loops import run, waiting_for_an_owner

pytestmark = pytest.mark.usefixtures("payer")


class Stop:
    """A place in a thread where the code stands still until the event loop lets it go
    on.
    """

    def __init__(self, result=None):
        self.reached, self.go_on, self.result = (
            threading.Event(),
            threading.Event(),
            result,
        )

    def __call__(self, argument):
        self.reached.set()
        assert self.go_on.wait(60)
        return argument if self.result is None else self.result


async def until(event):
    for _ in range(6000):
        if event.is_set():
            return
        await asyncio.sleep(0.01)
    raise TimeoutError


class View:
    def __init__(self):
        self.runs = 0

    async def __call__(self, request):
        self.runs += 1
        return HttpResponse(uuid4().hex, status=201)


def protected(view, **policy):
    async def answer(request):
        return await view(request)

    return idempotent(**{"scope": SCOPE, "mode": "lease", "retention": 600} | policy)(
        answer
    )


async def cancelled_at(stop, call, times=1):
    """Start the call, cancel it where it stands, as often as said, and let it go on."""
    task = asyncio.ensure_future(call)
    await until(stop.reached)
    for _ in range(times):
        task.cancel()
        for _turn in range(10):
            await asyncio.sleep(0)  # the loop hands the cancellation on
    stop.go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 60)


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("on_crash", ["retry", "hold"])
def test_after_the_view_returned_its_response_is_stored_and_replayed(on_crash, times):
    view, stop = View(), Stop()

    async def main():
        await cancelled_at(
            stop,
            protected(view, body=Body(redact=stop), mode=Lease(on_crash=on_crash))(
                post()
            ),
            times,
        )
        return await protected(view)(post())

    retried = run(main)
    assert (view.runs, retried.status_code, is_replay(retried)) == (1, 201, True)
    assert record().status == "completed"


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("on_crash", ["retry", "hold"])
def test_during_the_claim_the_key_is_free_again(on_crash, times):
    view, stop = View(), Stop(BuiltInScope(SCOPE))

    async def main():
        await cancelled_at(
            stop,
            protected(view, scope=stop, mode=Lease(on_crash=on_crash))(post()),
            times,
        )
        assert not await IdempotencyRecord.objects.aexists()
        return await protected(view, mode=Lease(on_crash=on_crash))(post())

    retried = run(main)
    assert (view.runs, retried.status_code, is_replay(retried)) == (1, 201, False)


def test_a_caller_cancelled_before_it_waits_is_not_counted():
    engine.claim(operation(), Policy(mode="lease"))
    view, stop = View(), Stop(BuiltInScope(SCOPE))
    run(lambda: cancelled_at(stop, protected(view, scope=stop, wait=10)(post())))
    assert (view.runs, waiters.waiting) == (0, 0)


def test_cancelling_a_retrys_claim_keeps_its_attempts():
    """They may have had effects: their record is no orphan to be deleted."""
    view, stop = View(), Stop(BuiltInScope(SCOPE))

    async def fails(request):
        raise LookupError

    async def twice():
        with pytest.raises(LookupError):
            await protected(fails)(post())
        await cancelled_at(stop, protected(view, scope=stop)(post()))

    run(twice)
    left = record()
    assert (view.runs, left.status, left.attempts) == (0, "failed", 2)


def test_a_waiter_that_is_cancelled_as_it_gets_the_key_gives_it_back(monkeypatch):
    policy = Policy(mode="lease")
    owner, view, stop = engine.claim(operation(), policy), View(), Stop()
    waits, begin_again = waiting_for_an_owner(monkeypatch), engine.begin_again

    def begin_and_stop(pending):
        begun = begin_again(pending)
        return stop(begun) if isinstance(begun, engine.Run) else begun

    async def main():
        monkeypatch.setattr(engine, "begin_again", begin_and_stop)
        waiter = protected(view, wait=60)(post())
        waiting = asyncio.ensure_future(cancelled_at(stop, waiter))
        await asyncio.wait_for(waits.wait(), 60)
        await sync_to_async(store_for(policy).release)(owner)
        await waiting

    run(main)
    assert (view.runs, waiters.waiting, record()) == (0, 0, None)


def test_during_the_view_it_counts_as_a_crash():
    entered = asyncio.Event()

    async def slow(request):
        entered.set()
        await asyncio.Event().wait()

    async def main():
        task = asyncio.ensure_future(
            protected(slow, mode=Lease(on_crash="hold"))(post())
        )
        await asyncio.wait_for(entered.wait(), 60)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(main)
    assert (record().status, record().on_hold) == ("failed", True)


def test_a_caller_that_waits_and_hangs_up_leaves_the_owner_and_other_waiters_alone(
    monkeypatch,
):
    waits = waiting_for_an_owner(monkeypatch)
    view, entered, let_go = View(), asyncio.Event(), asyncio.Event()

    async def slow(request):
        entered.set()
        await let_go.wait()
        return await view(request)

    async def main():
        owner = asyncio.ensure_future(protected(slow)(post()))
        await asyncio.wait_for(entered.wait(), 60)
        waiter, other = (
            asyncio.ensure_future(protected(view, wait=60)(post())) for _ in range(2)
        )
        await asyncio.wait_for(waits.wait(), 60)
        waiter.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiter
        while waiters.waiting != 1:
            await asyncio.sleep(0.01)
        let_go.set()
        return await asyncio.wait_for(asyncio.gather(owner, other), 60)

    first, second = run(main)
    assert (first.status_code, second.content, is_replay(second), waiters.waiting) == (
        201,
        first.content,
        True,
        0,
    )
    assert (view.runs, record().status) == (1, "completed")
