"""The Redis store's scripts for async views: run in the request's thread, as the store does, or by an asyncio client.

    python -m testproject.benchmarks.event_loops --clients 16

Each request claims and completes a record. Its sync work (the fingerprint, the user, signals, redaction) is left out,
but not the thread that it takes: Django's handler has one for each request. ``both`` runs the scripts by the asyncio
client, and the sync work before each of them in the thread. ``asyncio alone`` is as if there were no sync work.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
import uuid
from collections.abc import Awaitable, Callable
from statistics import median
from typing import Any

import django
import redis
import redis.asyncio
from asgiref.sync import ThreadSensitiveContext, sync_to_async

from testproject.benchmarks import private_redis

REQUESTS = 500
Request = Callable[[], Awaitable[object]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=9)
    asked = parser.parse_args()
    django.setup()
    with private_redis.running() as server:
        assert server, "there is no redis-server"
        print(json.dumps(asyncio.run(_measure(server.url, asked.clients, asked.rounds))), flush=True)


async def _measure(url: str, clients: int, rounds: int) -> dict[str, Any]:
    """Return each way's rate and processor time relative to those of the threads: medians of the rounds, and ranges."""
    ways = _ways(redis.Redis.from_url(url), redis.asyncio.Redis.from_url(url))
    taken: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    for number in range(rounds + 1):
        for way, request in ways.items():
            figures = await _taken(request, clients)
            if number:  # the first round warms up
                taken[way].append(figures)
    return {
        way: {
            name: _spread([threads[place] / own[place] for own, threads in zip(figures, taken["threads"], strict=True)])
            for place, name in enumerate(("rate", "processor"))
        }
        for way, figures in taken.items()
    }


def _ways(client: Any, aclient: Any) -> dict[str, Request]:
    from django_idempotency.stores import redis_scripts as scripts

    for script in (scripts.CLAIM, scripts.END):
        client.script_load(script.source)

    def calls() -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        key, token = f"bench:{uuid.uuid4().hex}", uuid.uuid4().hex
        claim = (token, "scope", "key", "POST", "/", bytes(32), "lease", 0, 30_000_000, 86_400_000_000, 60_000)
        end = (token, "completed", "", 0, 86_400_000_000, 60_000, 201, "[]", b"x" * 200, 1)
        return (scripts.CLAIM.sha, 1, key, *claim), (scripts.END.sha, 1, key, *end)

    async def threads() -> None:
        for call in calls():
            await sync_to_async(client.evalsha)(*call)

    async def both() -> None:
        for call in calls():
            await sync_to_async(_nothing)()
            await aclient.evalsha(*call)

    async def asyncio_alone() -> None:
        for call in calls():
            await aclient.evalsha(*call)

    return {way.__name__.replace("_", " "): _as_in_djangos_handler(way) for way in (threads, both, asyncio_alone)}


def _as_in_djangos_handler(way: Request) -> Request:
    async def request() -> None:
        async with ThreadSensitiveContext():
            await sync_to_async(_nothing)()  # stands for the receivers of request_started
            await way()

    return request


def _nothing() -> None:
    """Stands for sync work."""


async def _taken(request: Request, clients: int) -> tuple[float, float]:
    """Return the seconds on the clock, and of processor time."""
    left = iter(range(REQUESTS))

    async def client() -> None:
        for _number in left:
            await request()

    begun, processor = time.perf_counter(), time.process_time()
    await asyncio.gather(*(client() for _number in range(clients)))
    return time.perf_counter() - begun, time.process_time() - processor


def _spread(parts: list[float]) -> dict[str, float]:
    return {"median": round(median(parts), 2), "lowest": round(min(parts), 2), "highest": round(max(parts), 2)}


if __name__ == "__main__":
    main()
