"""What a million keys cost the database, what removing them costs, and what claims cost beside many in progress.

With partitions, removing means dropping one partition. The costs are counted with some ten thousand keys, without page
images, through this package's own stores and on one connection.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from statistics import median
from typing import Any

import django
from django.db import connection

from django_idempotency.policy import Atomic
from testproject.benchmarks import clock, growth, private_redis, report, servers
from testproject.benchmarks.cluster import Cluster
from testproject.benchmarks.private_redis import Redis
from testproject.benchmarks.servers import DIRECTORY

MODULE = "testproject.benchmarks.capacity"
DATABASE = servers.database("capacity")
KEYS = 20_000
TURNS = 20  # the table is vacuumed after each
KINDS = ("record", "lock", "record, by day", "lock, by day")
RETENTION, DAY = 1, 24 * 60 * 60  # seconds
IN_PROGRESS = (10, 100, 1_000, 10_000)
TRIES = 200
TABLE = growth.TABLE
COLUMNS = {
    "run_cpu": ("database s", "{:.0f}"),
    "run_client": ("application s", "{:.0f}"),
    "run_wal": ("WAL MB", "{:.0f}"),
    "run_buffers": ("buffers a key", "{:.1f}"),
    "size": ("on disk MB", "{:.0f}"),
    "vacuum_cpu": ("vacuum s", "{:.1f}"),
    "vacuum_wal": ("its WAL MB", "{:.0f}"),
    "removal_cpu": ("removal s", "{:.1f}"),
    "removal_wal": ("its WAL MB ", "{:.0f}"),
    "memory": ("in memory MB", "{:.0f}"),
}
BESIDE = {
    "locks": ("locks", "{:.0f}"),
    "record": ("claim by record ms", "{:.2f}"),
    "lock": ("by lock ms", "{:.2f}"),
    "same": ("409 for the same ms", "{:.2f}"),
    "other": ("422 for another ms", "{:.2f}"),
}


def main() -> None:
    from testproject.benchmarks.__main__ import alone

    parser = argparse.ArgumentParser(prog="python -m testproject.benchmarks.capacity", description=__doc__)
    parser.add_argument("--keys", type=int, default=KEYS)
    keys = parser.parse_args().keys
    with alone(), private_redis.running() as redis:
        cluster = Cluster(DIRECTORY / "postgresql")
        with cluster.setting(autovacuum="off", full_page_writes="off"):
            costs = {kind: _in_process(cluster, kind=kind, keys=keys) for kind in KINDS}
            beside = _in_process(cluster, kind="beside", keys=0)
        if redis:
            costs["Redis, lease mode"] = _in_redis(redis, cluster, keys)
    print("A million keys:\n\n" + report.table(costs, COLUMNS))
    print("\nClaims beside others in progress:\n\n" + report.table(beside, BESIDE, first="in progress"))


def _in_process(cluster: Cluster, **order: Any) -> Any:
    with servers.tables(cluster, DATABASE):
        return servers.figures(MODULE, order, cluster, DATABASE)


def _in_redis(redis: Redis, cluster: Cluster, keys: int) -> dict[str, float]:
    """Return what keys cost in Redis. There is no ``size``: by default, Redis writes a snapshot now and then."""
    from redis import Redis as Client

    with servers.tables(cluster, DATABASE), Client.from_url(redis.url) as client:
        before, cpu = client.info("memory")["used_memory"], redis.cpu()
        done = subprocess.run(
            [sys.executable, "-m", MODULE, json.dumps({"kind": "redis", "keys": keys})],
            cwd=servers.ROOT,
            env=servers.environ("redis_lease", cluster, redis, DATABASE),
            stdout=subprocess.PIPE,
            check=True,
            text=True,
        )
        told: dict[str, float] = json.loads(done.stdout)
        memory = (client.info("memory")["used_memory"] - before) / keys
        return told | {"memory": memory, "run_cpu": (redis.cpu() - cpu) / keys * 1e6}


# --- In a process of its own, which is a project with this package ---------------------------------------------------


def serve(order: str) -> None:
    asked = json.loads(order)
    django.setup()
    if asked["kind"] == "beside":
        told: Any = dict(_beside())
    elif asked["kind"] == "redis":
        told = _application_alone(asked["keys"])
    else:
        told = _cost(asked["kind"], asked["keys"])
    print(json.dumps(told))


def _application_alone(keys: int) -> dict[str, float]:
    run = _runner(mode="lease", store="redis", retention=DAY)
    begun = time.process_time()
    for _ in range(keys):
        run()
    return {"run_client": (time.process_time() - begun) / keys * 1e6}


def _runner(**policy: Any) -> Callable[[], object]:
    """Return a function that claims and completes a new key."""
    from django_idempotency.policy import Policy
    from django_idempotency.stores import store_for
    from django_idempotency.stores.base import TransactionalStore
    from django_idempotency.values.outcomes import StoredResponse

    store = store_for(Policy(**{"retention": RETENTION} | policy))
    response = StoredResponse(201, growth.HEADERS, growth.BODY)

    def run() -> None:
        claimed: Any = store.claim(growth.new_operation(), uuid.uuid4())
        if not isinstance(store, TransactionalStore):
            assert store.complete(claimed, response)
            return
        with store.transaction(claimed):
            locked = claimed if claimed.by_lock else store.lock(claimed)
            assert locked is not None
            assert store.complete(locked, response)

    return run


def _cost(kind: str, keys: int) -> dict[str, float]:
    claim, _, by_day = kind.partition(", ")
    if by_day:
        _divide()
    run = _runner(mode=Atomic(claim="lock" if claim == "lock" else "record"))
    for _ in range(500):
        run()
    with connection.cursor() as cursor:
        cursor.execute("SET max_parallel_maintenance_workers = 0")
    _vacuum()
    spent: dict[str, float] = {}
    empty = _size()
    for _ in range(TURNS):
        _spend(spent, "run", keys, lambda: [run() for _ in range(keys // TURNS)])
        _spend(spent, "vacuum", keys, _vacuum)
    spent["size"] = (_size() - empty) / keys
    time.sleep(RETENTION + 0.1)
    if by_day:
        _spend(spent, "removal", 1_000_000, _drop)  # for a partition, however many keys are in it
    else:
        _spend(spent, "removal", keys, _clean)
    return spent


def _spend(spent: dict[str, float], what: str, keys: int, act: Callable[[], object]) -> None:
    before, client = growth.counters("default"), time.process_time()
    act()
    client = time.process_time() - client
    after = growth.counters("default")
    per_million = {"cpu": 1e3, "wal": 1, "buffers": 1}  # ms to seconds, bytes to MB; buffers remain per key
    for figure, factor in per_million.items():
        name = f"{what}_{figure}"
        spent[name] = spent.get(name, 0.0) + (after[figure] - before[figure]) / keys * factor
    spent[f"{what}_client"] = spent.get(f"{what}_client", 0.0) + client / keys * 1e6


def _vacuum() -> None:
    with connection.cursor() as cursor:
        cursor.execute(f"VACUUM {TABLE}")


def _size() -> int:
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT coalesce(sum(pg_total_relation_size(relid)), pg_total_relation_size(%s)) "
            "FROM pg_partition_tree(%s)",
            [TABLE, TABLE],
        )
        return int(cursor.fetchone()[0])


def _clean() -> None:
    from django_idempotency.maintenance.cleaner import cleanup

    assert cleanup(pause=0).rows
    _vacuum()


def _divide() -> None:
    from django_idempotency.contrib.partitions.conversion import enable
    from django_idempotency.contrib.partitions.upkeep import ensure

    enable(using="default")
    ensure(using="default")


def _drop() -> None:
    """Drop a partition, with the clock set days ahead."""
    from django_idempotency.contrib.partitions.upkeep import drop

    with connection.cursor() as cursor:
        clock.install(cursor)
        clock.put(cursor, minutes=4 * 24 * 60)
        assert drop(using="default").dropped
        clock.remove(cursor)


# --- Beside others in progress ---------------------------------------------------------------------------------------

HOLD = "SELECT pg_advisory_xact_lock((18756::bigint << 48) + %s + i) FROM generate_series(1, %s) AS i"


def _beside() -> Iterator[tuple[str, dict[str, float]]]:
    """Time claims while one session holds the locks of so many in progress, two each."""
    from django.db import connections, transaction

    connections.databases["others"] = connections.databases["default"]
    for number in (0, *IN_PROGRESS):
        with transaction.atomic(using="others"), connections["others"].cursor() as cursor:
            cursor.execute(HOLD, [number, 2 * number])
            cursor.execute("SELECT count(*) FROM pg_locks")
            yield f"{number:,}", {"locks": cursor.fetchone()[0], **_timed()}


def _timed() -> dict[str, float]:
    runs = {name: _runner(mode=Atomic(claim=name)) for name in ("record", "lock")}
    return {**{name: _median(run) for name, run in runs.items()}, **_refused()}


def _median(run: Callable[[], object]) -> float:
    times = []
    for _ in range(TRIES):
        begun = time.perf_counter()
        run()
        times.append((time.perf_counter() - begun) * 1000)
    return median(times)


def _refused() -> Mapping[str, float]:
    """Return what the same request, and another one with the key, take while the first is in progress."""
    from dataclasses import replace

    from django.db import connections

    from django_idempotency.policy import Policy
    from django_idempotency.stores import store_for
    from django_idempotency.stores.base import Owned, TransactionalStore
    from django_idempotency.values.outcomes import Claimed

    connections.databases["owner"] = connections.databases["default"]
    operation = growth.new_operation()
    owner, store = (
        store_for(Policy(mode=Atomic(claim="lock"), using="owner")),
        store_for(Policy(mode=Atomic(claim="lock"))),
    )
    claimed = owner.claim(operation, uuid.uuid4())
    assert isinstance(claimed, Claimed)
    assert isinstance(owner, TransactionalStore)
    other = replace(operation, fingerprint=os.urandom(32))
    with owner.transaction(claimed):
        assert store.claim(operation, uuid.uuid4()) == Owned(same=True)
        assert store.claim(other, uuid.uuid4()) == Owned(same=False)
        return {
            "same": _median(lambda: store.claim(operation, uuid.uuid4())),
            "other": _median(lambda: store.claim(other, uuid.uuid4())),
        }


if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1].startswith("{"):
        serve(sys.argv[1])
    else:
        main()
