"""Partitions: what a claim costs in them, and how long claims wait while a day of them is dropped."""

from __future__ import annotations

import json
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, NamedTuple

import django
from django.db import connections

from testproject.benchmarks import clock, growth, paced, servers
from testproject.benchmarks.cluster import Cluster

TABLES = ("plain", "by day")
RATE = 500  # keys a second
QUIET = 10  # seconds before the drop
AROUND = 0.5  # seconds before and after the drop that count as part of it
AGE = 3  # days
COPY = "as_large"
SETTLING = 40  # seconds, because some file systems take ten times as long to remove what was just written


def measure(cluster: Cluster, *, rows: int, rounds: int) -> dict[str, Any]:
    """``rows`` is the size of the day that is dropped."""
    with servers.tables(cluster, *map(_database, TABLES)):
        order = {"rows": rows, "rounds": rounds}
        figures: dict[str, Any] = servers.figures(__name__, order, cluster, _database("plain"))
        return figures


def _database(name: str) -> str:
    return servers.database("retention_" + name.replace(" ", "_"))


# --- In a process of its own, which is a project with this package ---------------------------------------------------


def main(order: str) -> None:
    asked = json.loads(order)
    django.setup()
    for name in TABLES:
        connections.databases[name] = {**connections.databases["default"], "NAME": _database(name)}
    growth.fill("plain", growth.SMALL, 0)
    divide("by day", asked["rows"])
    claims = compare(asked["rounds"])
    print(json.dumps({"rows": asked["rows"], "claims": claims, "drop": drop("by day")}))


def divide(name: str, rows: int) -> None:
    """Create a partition with ``rows`` to drop, and those that exist by today; the one that is written is new."""
    from django_idempotency.contrib.partitions.conversion import enable
    from django_idempotency.contrib.partitions.upkeep import ensure

    completed = growth.run_one(name)[0]
    with growth.filling(name) as cursor:
        old = {column: f"{column} - interval '{AGE} days'" for column in ("created_at", "expires_at", "purge_at")}
        growth.copy(cursor, completed, rows, **old)
        cursor.execute(f"DELETE FROM {growth.TABLE} WHERE id = %s", [completed])
    with connections[name].cursor() as cursor:
        clock.install(cursor)
        clock.put(cursor, minutes=-AGE * 24 * 60)
        enable(using=name)
        clock.remove(cursor)
    ensure(using=name)


def compare(rounds: int) -> dict[str, Any]:
    """Return what a claim takes in each of the tables, in turns, and how many partitions it looks into."""
    for name in TABLES:
        _turn(name)  # warms up
    turns = [{name: _turn(name) for name in TABLES} for _ in range(rounds)]
    told: dict[str, Any] = {}
    for name in TABLES:
        told[name] = growth.medians([turn[name] for turn in turns], [turn["plain"] for turn in turns])
        # A turn is short, and processor time is counted in steps of 10 ms.
        told[name]["cpu_ratio"] = sum(turn[name]["cpu"] for turn in turns) / sum(turn["plain"]["cpu"] for turn in turns)
        told[name]["partitions"] = _partitions(name)
    return told


def _turn(name: str) -> dict[str, float]:
    store, policy = growth.store_of(name)
    operations = [growth.new_operation() for _ in range(growth.KEYS)]
    before, times, claims = growth.counters(name), [], []
    for operation in operations:
        begun = time.perf_counter()
        claims.append(store.claim(operation, uuid.uuid4()))
        times.append(time.perf_counter() - begun)
    spent = {figure: (after - before[figure]) / growth.KEYS for figure, after in growth.counters(name).items()}
    for claimed in claims:
        growth.complete(claimed, store, policy)
    return {"claim": median(times) * 1e6, **spent}


def _partitions(name: str) -> int:
    with connections[name].cursor() as cursor:
        cursor.execute("SELECT count(*) FROM pg_inherits WHERE inhparent = %s::regclass", [growth.TABLE])
        return int(cursor.fetchone()[0])


def drop(name: str) -> dict[str, Any]:
    """Return what dropping the oldest partition takes beside claims, and the slowest claim of those due meanwhile.

    Also return what a plain DROP TABLE of an equally large table takes beside the same load.
    """
    from django_idempotency.contrib.partitions.upkeep import drop

    _copy_oldest(name)
    with paced.load(name, rate=RATE) as load:
        time.sleep(2)
        plain = _drop_copy(name)
        time.sleep(5)
        begun = time.monotonic()
        time.sleep(QUIET)
        sent: list[Sent] = []
        with connections[name].execute_wrapper(_timing(sent)):
            drops = time.monotonic()
            dropped = next(step.dropped for step in drop.in_steps(using=name) if step.dropped)
            done = time.monotonic()
        time.sleep(2)
    windows = {"before": (begun, drops - AROUND), "while it is dropped": (drops - AROUND, done + AROUND)}
    return {
        "partition": dropped[0],
        "ms": (done - drops) * 1000,
        "plain": plain,
        "steps": {title: {"ms": seconds * 1000} for title, seconds in _steps(drops, sent, done).items()},
        "claims": {title: paced.percentiles(load.within([window])) for title, window in windows.items()},
    }


def _copy_oldest(name: str) -> None:
    """Copy the oldest partition, and wait: both are on disk for a while before timing, like a day that is long past."""
    from django_idempotency.contrib.partitions.catalog import read_layout

    oldest = read_layout(using=name).partitions[0].name
    with connections[name].cursor() as cursor:
        cursor.execute(f"CREATE TABLE {COPY} (LIKE {oldest} INCLUDING ALL)")
        cursor.execute(f"INSERT INTO {COPY} SELECT * FROM {oldest}")
        cursor.execute(f"VACUUM ANALYZE {COPY}")
        cursor.execute("CHECKPOINT")
    time.sleep(SETTLING)


def _drop_copy(name: str) -> dict[str, float]:
    with connections[name].cursor() as cursor:
        cursor.execute(f"SELECT pg_total_relation_size('{COPY}')")
        (size,) = cursor.fetchone()
        begun = time.monotonic()
        cursor.execute(f"DROP TABLE {COPY}")
        return {"ms": (time.monotonic() - begun) * 1000, "bytes": size}


class Sent(NamedTuple):
    """A statement, and when it was sent and answered."""

    sql: str
    begun: float
    ended: float


def _timing(sent: list[Sent]) -> Callable[..., Any]:
    def wrapper(execute: Any, sql: str, *details: Any) -> Any:
        begun = time.monotonic()
        result = execute(sql, *details)
        sent.append(Sent(sql, begun, time.monotonic()))
        return result

    return wrapper


def _steps(drops: float, sent: Sequence[Sent], done: float) -> dict[str, float]:
    locks, closes, detaches = (_first(sent, words) for words in ("LOCK TABLE", "ADD CONSTRAINT", "DETACH"))
    committed = sent[sent.index(closes) + 1].begun  # the commit is no statement, so it lies between two
    return {
        "looking": locks.begun - drops,
        "emptying and closing it, under its lock": closes.ended - locks.begun,
        "committing that, and removing the files": committed - closes.ended,
        "detaching it": detaches.ended - committed,
        "dropping it": done - detaches.ended,
    }


def _first(sent: Sequence[Sent], words: str) -> Sent:
    return next(statement for statement in sent if words in statement.sql)


if __name__ == "__main__":
    main(sys.argv[1])
