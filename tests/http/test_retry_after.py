"""``Retry-After`` starts at a second, grows with how long the operation has been running, and stays below the lease."""

from __future__ import annotations

import asyncio

import pytest
from asgiref.sync import sync_to_async
from django.db import connections
from django.http import HttpResponse

from django_idempotency import engine
from django_idempotency.decorators import idempotent
from django_idempotency.policy import Lease, Policy
from tests.support.callers import SCOPE, Gate, entry_point, is_replay, operation, post, shift
from tests.support.loops import waiting_for_an_owner

pytestmark = pytest.mark.usefixtures("payer")


def retry_after(**policy):
    return int(entry_point(lambda request: HttpResponse(), **policy)().headers["Retry-After"])


def test_retry_after_grows_with_the_running_time_and_is_capped():
    with Gate().running(mode=Lease(seconds=60)):
        told = []
        for seconds in (0, 1, 4, 9, 16, 30, 59, 600):
            shift(locked_at=-seconds, locked_until=60)
            told.append(engine.claim(operation(), Policy(mode=Lease(seconds=60))).retry_after)
    assert told == sorted(told), "before it is spread out"
    assert (told[0], told[1]) == (1, 1)
    assert 2 <= told[3] <= 9, "never longer than it has run so far"
    assert max(told) == told[-1] <= 60 / 4


class Slow:
    """An async view that stays until it is let go."""

    def __init__(self):
        self.entered, self.let_go, self.runs = asyncio.Event(), asyncio.Event(), 0

    async def __call__(self, request):
        self.runs += 1
        self.entered.set()
        await self.let_go.wait()
        return HttpResponse(b"done", status=201)


def waiting(view):
    async def answer(request):
        return await view(request)

    return idempotent(scope=SCOPE, mode="lease", wait=60)(answer)


def test_a_waiter_in_a_shared_thread_does_not_block_the_owner(monkeypatch):
    waits = waiting_for_an_owner(monkeypatch)

    async def main():
        view = Slow()
        owner = asyncio.ensure_future(waiting(view)(post()))
        await asyncio.wait_for(view.entered.wait(), 30)
        waiter = asyncio.ensure_future(waiting(view)(post()))
        await asyncio.wait_for(waits.wait(), 30)
        view.let_go.set()
        answers = await asyncio.wait_for(asyncio.gather(owner, waiter), 20)
        await sync_to_async(connections.close_all)()
        return answers

    first, second = asyncio.run(main())
    assert (first.status_code, second.content, is_replay(second)) == (201, first.content, True)
