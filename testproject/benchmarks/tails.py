"""What the slowest requests wait for: the same load on servers that differ in one thing. It takes 15 minutes.

- In a closed loop, each client waits for its response. A slower server has as many requests in it, and all of them
  take longer. In an open loop, requests don't wait: they come at the same rate to every contender.
- With threads, a request that has its answer from the database has to get the GIL back, for which it waits up to the
  switch interval. With processes of one thread each, it does not.
- ``same_work`` keeps the processors as busy as a claim does, but does not claim.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from testproject.benchmarks import report, servers
from testproject.benchmarks.clients import Client, percentile
from testproject.benchmarks.cluster import Cluster
from testproject.benchmarks.load import drive
from testproject.benchmarks.scenarios import BASELINE
from testproject.benchmarks.servers import BODY, DIRECTORY, PATH, Server

CONTENDERS = (BASELINE, "same_work", "atomic", "lock")
CONNECTIONS = 64  # of the open loop
LIGHT, BUSY = 0.1, 0.4  # of the rate at which the unprotected view is saturated


class Setup(NamedTuple):
    workers: int
    threads: int
    switch_interval: float | None = None  # seconds


class Load(NamedTuple):
    """``rate`` is that of an open loop, as a share of what the unprotected view does with the load ``of``."""

    clients: int
    work: int = 0  # ms in each request
    rate: float | None = None
    of: str = ""


SETUPS = {
    "2 × 8 threads": Setup(2, 8),
    "2 × 8 threads, switch interval 0.5 ms": Setup(2, 8, 0.0005),
    "8 processes": Setup(8, 1),
}
LOADS = {
    "saturated": Load(16),
    "busy, open loop": Load(0, rate=BUSY, of="saturated"),
    "light, open loop": Load(0, rate=LIGHT, of="saturated"),
    "50 ms of work": Load(8, work=50),
    "50 ms of work, open loop": Load(0, work=50, rate=1, of="50 ms of work"),
}
COLUMNS = {
    "rate": ("req/s", "{:.0f}"),
    "p50": ("p50 ms", "{:.1f}"),
    "p99": ("p99 ms", "{:.1f}"),
    "p50_more": ("p50 more", "{:+.1f}"),
    "p99_more": ("p99 more", "{:+.1f}"),
    "p99_ratio": ("p99 ×", "{:.2f}"),
    "slower": ("1 ÷ rate ×", "{:.2f}"),
}

Figures = dict[str, float]
Turn = dict[str, Figures]


def main() -> None:
    from testproject.benchmarks.__main__ import alone

    parser = argparse.ArgumentParser(prog="python -m testproject.benchmarks.tails", description=__doc__)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seconds", type=int, default=3, help="of each contender's turn in a round")
    parser.add_argument("--setups", nargs="+", choices=SETUPS, default=list(SETUPS))
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    told: dict[str, Any] = {}
    with alone():
        cluster = Cluster(DIRECTORY / "postgresql")
        for name in CONTENDERS:
            servers.prepare(name, cluster, None, DIRECTORY)
        try:
            for title in options.setups:
                told[title] = dict(_with_setup(title, cluster, options.rounds, options.seconds))
        finally:
            for name in CONTENDERS:
                cluster.drop(servers.database(name))
    if options.json:
        options.json.write_text(json.dumps(told, indent=1))


def _with_setup(title: str, cluster: Cluster, rounds: int, seconds: int) -> Iterator[tuple[str, dict[str, Figures]]]:
    setup = SETUPS[title]
    rates: dict[str, float] = {}
    with ExitStack() as stack:
        running = [
            stack.enter_context(servers.running(name, cluster, None, DIRECTORY, **setup._asdict()))
            for name in CONTENDERS
        ]
        for name, load in LOADS.items():
            if load.work and setup.threads == 1:
                continue  # a worker that waits serves no other request, which would hide everything else
            rate = rates.get(load.of, 0.0) * (load.rate or 0)
            turns = list(_interleaved(running, load, rate, rounds, seconds))
            summary = {server.title: _medians(server.name, turns) for server in running}
            rates[name] = median(turn[BASELINE]["rate"] for turn in turns)
            print(f"\n{title}; {name}:\n\n{report.table(summary, COLUMNS)}", flush=True)
            yield name, {server.name: summary[server.title] for server in running}


def _interleaved(running: Sequence[Server], load: Load, rate: float, rounds: int, seconds: int) -> Iterator[Turn]:
    order = random.Random(0)
    for server in running:
        _turn(server, load, rate, 1)  # warms up
    for _ in range(rounds):
        yield {server.name: _turn(server, load, rate, seconds) for server in order.sample(running, len(running))}


def _turn(server: Server, load: Load, rate: float, seconds: int) -> Figures:
    if load.rate is None:
        seen = drive(server, plan="fresh", clients=load.clients, seconds=seconds, work=load.work)
        return {"rate": seen.rate, "p50": seen.p50, "p99": seen.p99}
    times = sorted(asyncio.run(_open_loop(server, load, rate, seconds)))
    told = {name: 1000 * percentile(times, share) for name, share in (("p50", 50), ("p99", 99))}
    return {"rate": len(times) / seconds, **told}


def _medians(name: str, turns: Sequence[Mapping[str, Figures]]) -> Figures:
    told = {figure: median(turn[name][figure] for turn in turns) for figure in ("rate", "p50", "p99")}
    for figure in ("p50", "p99"):
        told[f"{figure}_more"] = median(turn[name][figure] - turn[BASELINE][figure] for turn in turns)
    told["p99_ratio"] = median(turn[name]["p99"] / turn[BASELINE]["p99"] for turn in turns)
    told["slower"] = median(turn[BASELINE]["rate"] / turn[name]["rate"] for turn in turns)
    return told


async def _open_loop(server: Server, load: Load, rate: float, seconds: int) -> list[float]:
    """Return the seconds that each request took from when it was due: at random times, ``rate`` a second on average."""
    url = f"http://127.0.0.1:{server.port}{PATH}?work={load.work or ''}"
    free: asyncio.Queue[Client] = asyncio.Queue()  # clients take turns: the one last used would stay on one worker
    for _ in range(CONNECTIONS):
        free.put_nowait(Client(url))
    times: list[float] = []
    begun, due, gaps = time.perf_counter(), 0.0, random.Random(load.clients)
    async with asyncio.TaskGroup() as requests:
        while (due := due + gaps.expovariate(rate)) < seconds:
            await asyncio.sleep(max(0.0, begun + due - time.perf_counter()))
            requests.create_task(_request(free, begun + due, times))
    return times


async def _request(free: asyncio.Queue[Client], due: float, times: list[float]) -> None:
    client = await free.get()
    if not hasattr(client, "reader"):
        await client.connect()
    answer = await client.post(str(uuid.uuid4()), BODY)
    assert answer.status < 400, answer
    times.append(time.perf_counter() - due)
    free.put_nowait(client)


if __name__ == "__main__":
    main()
