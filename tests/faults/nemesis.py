"""Harm from outside the service: to its connections, its workers and its database. Each
nemesis counts what it did.
"""

from __future__ import annotations

import math
import os
import random
import signal
import struct
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import cycle
from pathlib import Path
from threading import Event, Thread

import psutil
import psycopg

from tests.faults.cluster import Cluster
from tests.support.proxy import Cut, Proxy
from tests.support.redis_servers import Node
from tests.support.waiting import eventually

Nemesis = Callable[[random.Random, Event], object]

ROOT = Path(__file__).parents[2]
JANITOR = """
import django
django.setup()
from django.core.management import call_command
print("begins", flush=True)
while True:
    call_command("idempotency_reap", batch=3, verbosity=0)
    call_command("idempotency_cleanup", verbosity=0)
"""
SOME_RUNNING = """
SELECT id FROM django_idempotency_record WHERE status = 'processing' LIMIT 5
    FOR UPDATE SKIP LOCKED
"""
CUTS = {
    Cut.BEFORE_COMMIT: "cut before COMMIT",
    Cut.AFTER_COMMIT: "cut after COMMIT",
    Cut.AFTER_CLAIM: "cut after a claim",
}


class CountingProxy(Proxy):
    def __init__(self, host: str, port: str | int) -> None:
        self.made: Counter[str] = Counter()
        super().__init__(host, port)

    def takes_cut(self, message: bytes) -> Cut | None:
        cut = super().takes_cut(message)
        if cut is not None:
            self.made[CUTS[cut]] += 1
        return cut


def again_and_again(
    strike: Callable[[random.Random, Event], object], at_least: float, at_most: float
) -> Nemesis:
    """Strike, with pauses of so many seconds."""

    def harm(decide: random.Random, over: Event) -> None:
        while not over.wait(decide.uniform(at_least, at_most)):
            strike(decide, over)

    return harm


def cutting(proxy: Proxy) -> Nemesis:
    """Cut off the next transaction that commits, before or after the server heard of
    it, or claim.
    """

    def strike(decide: random.Random, over: Event) -> None:
        proxy.cut = decide.choice(list(CUTS))

    def harm(decide: random.Random, over: Event) -> None:
        again_and_again(strike, 0.1, 0.4)(decide, over)
        proxy.cut = None

    return harm


def vanishing(proxy: CountingProxy) -> Nemesis:
    """The database is out of reach for a moment."""

    def strike(decide: random.Random, over: Event) -> None:
        proxy.go_away()
        proxy.made["database out of reach"] += 1
        over.wait(decide.uniform(0.05, 0.3))
        proxy.come_back()

    return again_and_again(strike, 0.5, 1.5)


def _an_outage(decide: random.Random, lease: float) -> float:
    """Seconds: a tenth of a lease to five leases, as often short as long."""
    return lease * 10 ** decide.uniform(-1, math.log10(5))


def leaving(proxy: CountingProxy, lease: float) -> Nemesis:
    """The database is out of reach, or frozen."""

    def strike(decide: random.Random, over: Event) -> None:
        begin, end, name = decide.choice(OUTAGES)
        begin(proxy)
        proxy.made[name] += 1
        over.wait(_an_outage(decide, lease))
        end(proxy)

    return again_and_again(strike, 0.2, 0.8)


OUTAGES = (
    (Proxy.go_away, Proxy.come_back, "database out of reach"),
    (Proxy.freeze, Proxy.thaw, "database frozen"),
)


def harming_redis(node: Node, lease: float, counts: Counter[str]) -> Nemesis:
    """Redis is killed, frozen, slow or out of memory, or its scripts are gone; each as
    often as the others.
    """
    names: list[str] = []

    def strike(decide: random.Random, over: Event) -> None:
        names[:] = names or decide.sample([*REDIS_TROUBLES], len(REDIS_TROUBLES))
        name = names.pop()
        begin, end = REDIS_TROUBLES[name]
        begin(node)
        counts[name] += 1
        if end is not None:
            over.wait(_an_outage(decide, lease))
            end(node)

    return again_and_again(strike, 0.1, 0.4)


def _slow(node: Node) -> None:
    node.client.execute_command("CLIENT", "PAUSE", 250, "ALL")


def _remember(node: Node, limit: str) -> None:
    node.client.config_set("maxmemory", limit)


# What begins each trouble, and what ends it, unless it is over at once.
REDIS_TROUBLES: dict[
    str, tuple[Callable[[Node], object], Callable[[Node], object] | None]
] = {
    "Redis SIGKILL": (Node.kill, Node.start),
    "Redis frozen": (Node.freeze, Node.thaw),
    "Redis slow": (_slow, None),
    "Redis out of memory": (
        lambda node: _remember(node, "1"),
        lambda node: _remember(node, "0"),
    ),
    "scripts flushed": (lambda node: node.client.script_flush(), None),
}


def crashing(cluster: Cluster, counts: Counter[str]) -> Nemesis:
    """All of PostgreSQL is killed, or shut down at once, and started again."""
    return again_and_again(_crash_of(cluster, counts), 0.3, 0.8)


def restarting(cluster: Cluster, counts: Counter[str]) -> Nemesis:
    """The same, with time in between for operations that take several attempts."""
    return again_and_again(_crash_of(cluster, counts), 5, 10)


def _crash_of(cluster: Cluster, counts: Counter[str]) -> Nemesis:
    ways = cycle(
        (
            ("PostgreSQL SIGKILL", cluster.kill),
            ("PostgreSQL immediate shutdown", cluster.stop),
        )
    )

    def strike(decide: random.Random, over: Event) -> None:
        how, crash = next(ways)
        crash()
        counts[how] += 1
        cluster.start()

    return strike


def locking(url: str, counts: Counter[str]) -> Nemesis:
    """Somebody else has the records of running operations locked for a while."""

    def harm(decide: random.Random, over: Event) -> None:
        with psycopg.connect(url) as connection:
            while not over.wait(decide.uniform(0.02, 0.1)):
                counts["foreign row lock"] += connection.execute(SOME_RUNNING).rowcount
                over.wait(decide.uniform(0.05, 0.3))
                connection.rollback()

    return harm


def cleaning_up(url: str, counts: Counter[str]) -> Nemesis:
    """The reaper and the cleanup run without pause, and are killed in the midst of
    it.
    """
    given = {"DATABASE_URL": url, "DJANGO_SETTINGS_MODULE": "testproject.settings"}

    def harm(decide: random.Random, over: Event) -> None:
        while not over.is_set():
            with subprocess.Popen(
                [sys.executable, "-c", JANITOR],
                cwd=ROOT,
                env=os.environ | given,
                stdout=subprocess.PIPE,
            ) as janitor:
                assert janitor.stdout is not None
                janitor.stdout.readline()
                over.wait(decide.uniform(0.2, 2))
                janitor.kill()
                counts["maintenance killed"] += 1

    return harm


def attach(standby: Cluster, primary: Cluster) -> None:
    """Have the primary wait for this standby, at every COMMIT that waits for the
    disk.
    """
    standby.copy(primary)
    standby.start()
    _wait_for_standbys(primary, "'*'")
    eventually(lambda: _is_synchronous(primary), within=60)


def _wait_for_standbys(primary: Cluster, names: str) -> None:
    primary.execute(f"ALTER SYSTEM SET synchronous_standby_names = {names}")
    primary.execute("SELECT pg_reload_conf()")


def failing_over(primary: Cluster, standby: Cluster, proxy: CountingProxy) -> Nemesis:
    """The primary is killed, its synchronous standby promoted, and a new standby made
    of what was the primary.
    """

    active, other = primary, standby

    def strike(decide: random.Random, over: Event) -> None:
        nonlocal active, other
        active.kill()
        other.promote()
        _wait_for_standbys(other, "DEFAULT")
        proxy.upstream = ("127.0.0.1", other.port)
        proxy.made["failover"] += 1
        active, other = other, active
        attach(other, active)

    return again_and_again(strike, 0.3, 1)


def _is_synchronous(primary: Cluster) -> bool:
    return primary.execute(
        "SELECT count(*) FROM pg_stat_replication WHERE sync_state = 'sync'"
    ) == (1,)


def filling(disk: Path, cluster: Cluster, counts: Counter[str]) -> Nemesis:
    """Nothing is left of the disk for a while; a server that gave up is started when
    there is room again.
    """
    ballast = disk / "ballast"

    def strike(decide: random.Random, over: Event) -> None:
        with suppress(OSError), ballast.open("wb", buffering=0) as file:
            while file.write(bytes(65536)):
                pass
        counts["disk filled"] += 1
        over.wait(decide.uniform(0.3, 1))
        ballast.unlink()
        if not cluster.runs:
            counts["PANIC"] += 1
            cluster.start()

    return again_and_again(strike, 0.2, 0.8)


HOUR = 3600


def jumping_clock(directory: Path) -> dict[str, str]:
    """The environment of processes whose clock is off by what the file ``clock`` in
    ``directory`` says.
    """
    library, offset = directory / "clock.so", directory / "clock"
    source = Path(__file__).with_name("clock.c")
    subprocess.run(
        ["gcc", "-O2", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"],
        check=True,
    )
    _set_clock(offset, 0)
    return {"LD_PRELOAD": str(library), "CLOCK_OFFSET": str(offset)}


def _set_clock(offset: Path, seconds: int) -> None:
    # in place: it is mapped
    with offset.open("r+b" if offset.exists() else "wb") as file:
        file.write(struct.pack("q", seconds))


def jumping(offset: Path, counts: Counter[str]) -> Nemesis:
    """The application's clock jumps by an hour or two, forth and back."""

    def strike(decide: random.Random, over: Event) -> None:
        _set_clock(offset, decide.choice((HOUR, -HOUR, 0)))
        counts["clock jumped"] += 1

    return again_and_again(strike, 0.1, 0.5)


def together(*all_of: Nemesis) -> Nemesis:
    def harm(decide: random.Random, over: Event) -> None:
        seeds = [random.Random(decide.random()) for _one in all_of]
        with ThreadPoolExecutor(len(all_of)) as pool:
            for done in [
                pool.submit(one, seed, over)
                for one, seed in zip(all_of, seeds, strict=True)
            ]:
                done.result()

    return harm


@contextmanager
def reviving(gunicorn: int, *, after: float) -> Iterator[Counter[str]]:
    """Workers that stopped themselves go on ``after`` so many seconds: longer than
    their leases.
    """
    over, counts = Event(), Counter[str]()
    reviver = Thread(target=_revive, args=(gunicorn, after, over, counts))
    reviver.start()
    try:
        yield counts
    finally:
        over.set()
        reviver.join()


def _revive(gunicorn: int, after: float, over: Event, counts: Counter[str]) -> None:
    since: dict[int, float] = {}
    known: set[int] = set()
    while not over.wait(0.1):
        workers = _workers(gunicorn)
        counts["worker restarted"] += len(workers.keys() - known) if known else 0
        known |= workers.keys()
        stopped = {
            pid for pid, status in workers.items() if status == psutil.STATUS_STOPPED
        }
        since = {pid: since.get(pid, time.monotonic()) for pid in stopped}
        for pid, began in since.items():
            if time.monotonic() - began > after:
                _go_on(pid, counts)
    for pid in since:
        _go_on(pid, counts)


def _workers(gunicorn: int) -> dict[int, str]:
    found = {}
    for worker in psutil.Process(gunicorn).children():
        with suppress(psutil.NoSuchProcess):
            found[worker.pid] = worker.status()
    return found


def _go_on(pid: int, counts: Counter[str]) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)
        counts["worker continued"] += 1
