"""Async views whose records are in Redis: cancelled at each script, and beside a Redis that does not answer."""

from __future__ import annotations

import asyncio
import threading
from uuid import uuid4

import pytest
from django.http import HttpResponse

from django_idempotency.contrib.redis import scripts
from django_idempotency.contrib.redis.client import Connection
from django_idempotency.decorators import idempotent
from django_idempotency.policy import Lease, Policy
from django_idempotency.stores import store_for
from tests.contrib.redis.records import use
from tests.support.callers import SCOPE, is_replay, operation, post
from tests.support.loops import run

TICK = 0.01
pytestmark = pytest.mark.usefixtures("transactional_db")


def protected(runs):
    @idempotent(mode=Lease(seconds=300), store="redis", scope=SCOPE)
    async def view(request):
        runs.append(uuid4().hex)
        return HttpResponse(runs[-1], status=201)

    return view


class Stop:
    """Has the thread stand still that runs a script, before or after it, until it is let go."""

    def __init__(self, monkeypatch, script, when):
        self.script, self.when = script, when
        self.reached, self.go_on = threading.Event(), threading.Event()
        asked = Connection.run

        def run_script(redis, script, key, *values):
            self._stand_still(script, "before")
            result = asked(redis, script, key, *values)
            self._stand_still(script, "after")
            return result

        monkeypatch.setattr(Connection, "run", run_script)

    def _stand_still(self, script, when):
        if (script, when) == (self.script, self.when) and not self.reached.is_set():
            self.reached.set()
            assert self.go_on.wait(30)


async def cancelled_at(stop, request):
    task = asyncio.ensure_future(request)
    assert await asyncio.to_thread(stop.reached.wait, 30)
    for _time in range(2):
        task.cancel()
        await asyncio.sleep(0)
    stop.go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 30)


@pytest.mark.redis
@pytest.mark.parametrize("when", ["before", "after"])
def test_cancelled_at_its_claim_a_key_is_free_again(settings, redis_url, monkeypatch, when):
    use(settings, redis_url)
    stop, runs = Stop(monkeypatch, scripts.CLAIM, when), []

    async def main():
        await cancelled_at(stop, protected(runs)(post()))
        assert store_for(Policy(mode="lease", store="redis")).read(operation().id) is None
        return await protected(runs)(post())

    retried = run(main)
    assert (len(runs), retried.status_code, is_replay(retried)) == (1, 201, False)


@pytest.mark.redis
@pytest.mark.parametrize("when", ["before", "after"])
def test_cancelled_at_its_end_a_response_is_stored(settings, redis_url, monkeypatch, when):
    use(settings, redis_url)
    stop, runs = Stop(monkeypatch, scripts.END, when), []

    async def main():
        await cancelled_at(stop, protected(runs)(post()))
        return await protected(runs)(post())

    retried = run(main)
    assert (len(runs), retried.content.decode(), is_replay(retried)) == (1, runs[0], True)


@pytest.mark.redis_server
def test_a_redis_that_hangs_does_not_stop_the_event_loop(settings, node):
    use(settings, node.url, timeout=0.4)

    async def main():
        node.freeze()
        task, ticks = asyncio.ensure_future(protected([])(post())), 0
        while not task.done():
            await asyncio.sleep(TICK)
            ticks += 1
        return await task, ticks

    refused, ticks = run(main)
    assert refused.status_code == 503
    assert ticks >= 5  # of forty; a loop that stands still has one
