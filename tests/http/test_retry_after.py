"""``Retry-After`` starts at a second, grows with how long the operation has been running, and stays below the lease."""

from __future__ import annotations

import asyncio

import pytest
from asgiref.sync import ThreadSensitiveContext, sync_to_async
from django.db import connection, connections
from django.http import HttpResponse

from django_idempotency import engine
from django_idempotency.decorators import idempotent
from django_idempotency.engine.waiting import waiters as counted
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


WAITERS = 20


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


async def served(view):
    """As Django's ASGI handler does: what is sync in a request has a thread of its own."""
    async with ThreadSensitiveContext():
        try:
            return await view(post())
        finally:
            await sync_to_async(connections.close_all)()


def backends():
    with connection.cursor() as cursor:
        cursor.execute("SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()")
        return cursor.fetchone()[0]


@pytest.mark.postgresql
def test_waiters_have_no_connection_each(settings):
    settings.IDEMPOTENCY = {**settings.IDEMPOTENCY, "MAX_WAITERS": WAITERS}

    async def main():
        view = Slow()
        before = await sync_to_async(backends)()
        owner = asyncio.ensure_future(served(waiting(view)))
        await asyncio.wait_for(view.entered.wait(), 30)
        waiters = [asyncio.ensure_future(served(waiting(view))) for _ in range(WAITERS)]

        async with asyncio.timeout(30):
            while len(counted) < WAITERS or await sync_to_async(backends)() > before + 4:
                await asyncio.sleep(0.05)
        assert not any(waiter.done() for waiter in waiters)
        view.let_go.set()
        answers = await asyncio.wait_for(asyncio.gather(owner, *waiters), 60)
        await sync_to_async(connections.close_all)()
        return answers, view.runs

    answers, runs = asyncio.run(main())
    assert ([answer.status_code for answer in answers], runs) == ([201] * (WAITERS + 1), 1)
    assert sum(map(is_replay, answers)) == WAITERS


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
