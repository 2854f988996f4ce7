"""Harm from outside the service: to its wires, its workers and its database. Each counts what it did."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import Event, Thread

import psutil
import psycopg

from tests.faults.cluster import Cluster
from tests.proxy import Cut, Proxy

Nemesis = Callable[[random.Random, Event], object]

CUTS = {Cut.BEFORE_COMMIT: "cut before COMMIT", Cut.AFTER_COMMIT: "cut after COMMIT"}


class CountingProxy(Proxy):
    def __init__(self, host: str, port: str | int) -> None:
        self.made: Counter[str] = Counter()
        super().__init__(host, port)

    def takes_cut(self, message: bytes) -> Cut | None:
        cut = super().takes_cut(message)
        if cut is not None:
            self.made[CUTS[cut]] += 1
        return cut


def cutting(proxy: Proxy) -> Nemesis:
    """Cut off the next transaction that commits, before or after the server heard of it, again and again."""

    def harm(decide: random.Random, over: Event) -> None:
        while not over.wait(decide.uniform(0.1, 0.4)):
            proxy.cut = decide.choice(list(Cut))
        proxy.cut = None

    return harm


def vanishing(proxy: CountingProxy) -> Nemesis:
    """The database is out of reach for a moment, again and again."""

    def harm(decide: random.Random, over: Event) -> None:
        while not over.wait(decide.uniform(0.5, 1.5)):
            proxy.go_away()
            proxy.made["database out of reach"] += 1
            over.wait(decide.uniform(0.05, 0.3))
            proxy.come_back()

    return harm


def crashing(cluster: Cluster, tally: Counter[str], *, pause: tuple[float, float] = (0.8, 1.6)) -> Nemesis:
    """All of PostgreSQL is killed, or shut down at once, and started again."""

    def harm(decide: random.Random, over: Event) -> None:
        while not over.wait(decide.uniform(*pause)):
            how = decide.choice(("PostgreSQL SIGKILL", "PostgreSQL immediate shutdown"))
            (cluster.kill if how == "PostgreSQL SIGKILL" else cluster.shut_down)()
            tally[how] += 1
            cluster.start()

    return harm


def locking(url: str, tally: Counter[str]) -> Nemesis:
    """Somebody else has the records of running operations locked for a while."""

    def harm(decide: random.Random, over: Event) -> None:
        with psycopg.connect(url) as connection:
            while not over.wait(decide.uniform(0.02, 0.1)):
                rows = connection.execute(
                    "SELECT id FROM django_idempotency_record WHERE status = 'processing' LIMIT 5 FOR UPDATE SKIP LOCKED"
                ).fetchall()
                tally["foreign row lock"] += len(rows)
                over.wait(decide.uniform(0.05, 0.3))
                connection.rollback()

    return harm


def together(*all_of: Nemesis) -> Nemesis:
    def harm(decide: random.Random, over: Event) -> None:
        threads = [
            Thread(target=one, args=(random.Random(decide.random()), over), name=f"nemesis-{number}")
            for number, one in enumerate(all_of)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    return harm


@contextmanager
def reviving(gunicorn: int, *, after: float) -> Iterator[Counter[str]]:
    """Workers that stopped themselves go on ``after`` so many seconds: longer than their leases."""
    over, tally = Event(), Counter[str]()
    reviver = Thread(target=_revive, args=(gunicorn, after, over, tally))
    reviver.start()
    try:
        yield tally
    finally:
        over.set()
        reviver.join()


def _revive(gunicorn: int, after: float, over: Event, tally: Counter[str]) -> None:
    since: dict[int, float] = {}
    known: set[int] = set()
    while not over.wait(0.1):
        workers = _workers(gunicorn)
        tally["worker restarted"] += len(workers.keys() - known) if known else 0
        known |= workers.keys()
        stopped = {pid for pid, status in workers.items() if status == psutil.STATUS_STOPPED}
        since = {pid: since.get(pid, time.monotonic()) for pid in stopped}
        for pid, began in since.items():
            if time.monotonic() - began > after:
                _go_on(pid, tally)
    for pid in since:
        _go_on(pid, tally)


def _workers(gunicorn: int) -> dict[int, str]:
    found = {}
    for worker in psutil.Process(gunicorn).children():
        with suppress(psutil.NoSuchProcess):
            found[worker.pid] = worker.status()
    return found


def _go_on(pid: int, tally: Counter[str]) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)
        tally["worker continued"] += 1
