"""What a key costs as the table grows: at 10,000 rows, at 10,000,000, beside 100,000 stuck ones, and in WAL.

It runs through this package's own store, on one connection, because the cost is the database's.
"""

from __future__ import annotations

import json
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any

import django
from django.db import connections, transaction

from testproject.benchmarks import processes, servers
from testproject.benchmarks.cluster import Cluster

STUCK = 100_000
SMALL = 10_000
KEYS = 500  # per turn of a table in a round
BODY = b"x" * 200
HEADERS = (("Content-Type", "application/json"), ("Vary", "Accept"), ("Allow", "POST, OPTIONS"))
TABLE = "django_idempotency_record"
CHECKPOINT_KEYS = (500, 1000, 2000, 5000, 10_000, 20_000)


def growth(cluster: Cluster, *, rows: int, rounds: int, distance: int) -> dict[str, Any]:
    """``rows`` is the size of the large table, ``distance`` the number of keys from one checkpoint to the next."""
    sizes = {"small": (SMALL, 0), "large": (rows, 0), "stuck": (SMALL, STUCK)}
    sizes |= {"tenth": (rows // 10, 0), "hundredth": (rows // 100, 0), "hour": (rows // 24, 0)}
    order = {"sizes": sizes, "rounds": rounds, "distance": distance, "private": cluster.is_private}
    # WAL is the whole cluster's, so nothing else may write.
    with cluster.setting(autovacuum="off"), servers.tables(cluster, *map(_database, sizes)):
        figures: dict[str, Any] = servers.figures(__name__, order, cluster, _database("small"))
    cluster.ask("CHECKPOINT")
    return figures


def _database(name: str) -> str:
    return servers.database(f"growth_{name}")


# --- In a process of its own, which is a project with this package ---------------------------------------------------


def main(order: str) -> None:
    asked = json.loads(order)
    django.setup()
    for name in asked["sizes"]:
        connections.databases[name] = {**connections.databases["default"], "NAME": _database(name)}
    for name, (rows, stuck) in asked["sizes"].items():
        fill(name, rows, stuck)
    compared = [name for name in ("small", "large", "stuck") if name in asked["sizes"]]
    costs = compare(compared, asked["rounds"])
    wal = {name: across_checkpoint(name, asked["distance"]) for name in asked["sizes"] if name != "stuck"}
    if asked["private"]:
        wal |= compressed("large", asked["distance"])
    print(json.dumps({"rows": asked["sizes"], "costs": costs, "wal": wal}))


def fill(name: str, rows: int, stuck: int) -> None:
    """Fill a table with copies, under other keys, of a record that was completed and of one that was not."""
    completed, claimed = run_one(name)[0], claim_one(name)
    with filling(name) as cursor:
        copy(cursor, completed, rows)
        copy(cursor, claimed, stuck)


@contextmanager
def filling(name: str) -> Iterator[Any]:
    """Do ``refilling`` for the database with the alias ``name``; yield the cursor to fill it with."""
    with connections[name].cursor() as cursor, refilling(cursor):
        yield cursor


@contextmanager
def refilling(cursor: Any) -> Iterator[None]:
    """Drop the table's indexes for the block. Afterwards it has them again, as if all of it had grown slowly."""
    cursor.execute("SET maintenance_work_mem = '512MB'")
    cursor.execute("SELECT indexname, indexdef FROM pg_indexes WHERE tablename = %s", [TABLE])
    indexes = {index: definition for index, definition in cursor.fetchall() if not index.endswith("_pkey")}
    _drop_indexes(cursor, indexes)
    yield
    # Two thirds full, as keys that arrive in no order leave it.
    cursor.execute(f"ALTER TABLE {TABLE} ADD PRIMARY KEY (id) WITH (fillfactor = 70)")
    for definition in indexes.values():
        cursor.execute(definition)
    cursor.execute(f"VACUUM (ANALYZE, FREEZE) {TABLE}")
    cursor.execute("CHECKPOINT")


def _drop_indexes(cursor: Any, indexes: Mapping[str, str]) -> None:
    for index in indexes:
        cursor.execute(f"DROP INDEX {index}")
    cursor.execute(f"ALTER TABLE {TABLE} DROP CONSTRAINT {TABLE}_pkey")


def copy(cursor: Any, id: uuid.UUID, times: int, **different: str) -> None:
    """Make ``times`` copies, whose lease and retention end at different times within a day. ``different`` has other
    values for columns, in which ``i`` is the number of the copy."""
    cursor.execute("SELECT column_name FROM information_schema.columns WHERE table_name = %s", [TABLE])
    columns = [column for (column,) in cursor.fetchall()]
    ahead = "+ i %% 86400 * interval '1 second'"
    changed = {"id": "gen_random_uuid()", "purge_at": f"purge_at {ahead}", "locked_until": f"locked_until {ahead}"}
    values = ", ".join((changed | different).get(column, column) for column in columns)
    cursor.execute(
        f"INSERT INTO {TABLE} ({', '.join(columns)}) "
        f"SELECT {values} FROM {TABLE}, generate_series(1, %s) AS i WHERE id = %s",
        [times, id],
    )


def claim_one(name: str) -> uuid.UUID:
    operation, store, _policy = new_operation(), *store_of(name)
    store.claim(operation, uuid.uuid4())
    return _id(operation)


def run_one(name: str) -> tuple[uuid.UUID, float]:
    """Do a whole request's work on a record; return its id, and how many seconds the claim took."""
    operation, store, _policy = new_operation(), *store_of(name)
    begun = time.perf_counter()
    claimed = store.claim(operation, uuid.uuid4())
    took = time.perf_counter() - begun
    complete(claimed, store, store.policy)
    return _id(operation), took


def complete(claimed: Any, store: Any, policy: Any) -> None:
    from django_idempotency.values.outcomes import StoredResponse

    with transaction.atomic(using=policy.using):
        assert store.lock(claimed)
        assert store.complete(claimed, StoredResponse(201, HEADERS, BODY))


def new_operation() -> Any:
    from django_idempotency.values.outcomes import Operation

    key = str(uuid.uuid4())
    return Operation(key=key, scope="user:1", fingerprint=uuid.uuid4().bytes * 2, method="POST", path="/effects/")


def store_of(name: str) -> tuple[Any, Any]:
    from django_idempotency.policy import Policy
    from django_idempotency.stores import store_for

    policy = Policy(using=name)
    return store_for(policy), policy


def _id(operation: Any) -> uuid.UUID:
    id: uuid.UUID = operation.id
    return id


def compare(names: Sequence[str], rounds: int) -> dict[str, dict[str, float]]:
    for name in names:
        read_keys(name)
        _turn(name)  # warms up
    turns = [{name: _turn(name) for name in names} for _ in range(rounds)]
    return {name: medians([turn[name] for turn in turns], [turn[names[0]] for turn in turns]) for name in names}


def read_keys(name: str) -> None:
    """Read all pages of the primary key into memory, where they would be had the table grown in use."""
    with connections[name].cursor() as cursor:
        cursor.execute("SET enable_seqscan = off; SET enable_sort = off; SET enable_bitmapscan = off")
        cursor.execute(f"SELECT id FROM {TABLE} ORDER BY id OFFSET (SELECT count(*) FROM {TABLE})")
        cursor.execute("RESET enable_seqscan; RESET enable_sort; RESET enable_bitmapscan")


def _turn(name: str) -> dict[str, float]:
    before = counters(name)
    claims = [run_one(name)[1] for _ in range(KEYS)]
    spent = {figure: (after - before[figure]) / KEYS for figure, after in counters(name).items()}
    return {"claim": median(claims) * 1e6, **spent}


def counters(name: str) -> dict[str, float]:
    with connections[name].cursor() as cursor:
        cursor.execute("SELECT pg_stat_force_next_flush()")
        cursor.execute(
            "SELECT pg_backend_pid(), pg_current_wal_insert_lsn() - '0/0', wal_fpi, blks_hit + blks_read, blks_read "
            "FROM pg_stat_wal, pg_stat_database WHERE datname = current_database()"
        )
        pid, wal, images, buffers, read = cursor.fetchone()
    cpu = processes.seconds([pid]) * 1000
    return {"cpu": cpu, "wal": float(wal), "images": float(images), "buffers": float(buffers), "read": float(read)}


def medians(turns: Sequence[Mapping[str, float]], baseline: Sequence[Mapping[str, float]]) -> dict[str, float]:
    pairs = list(zip(turns, baseline, strict=True))
    return {
        **{figure: median(turn[figure] for turn in turns) for figure in turns[0]},
        "claim_ratio": median(turn["claim"] / base["claim"] for turn, base in pairs),
        "cpu_ratio": median(turn["cpu"] / base["cpu"] for turn, base in pairs),
    }


def across_checkpoint(name: str, distance: int) -> list[dict[str, float]]:
    """Return WAL bytes and full page images a key, by how many keys have come since the checkpoint."""
    with connections[name].cursor() as cursor:
        cursor.execute("SET synchronous_commit = off")
        cursor.execute("CHECKPOINT")
    return list(_curve(name, distance))


def _curve(name: str, distance: int) -> Iterator[dict[str, float]]:
    begun, done = counters(name), 0
    for keys in (keys for keys in CHECKPOINT_KEYS if keys <= distance):
        while done < keys:
            run_one(name)
            done += 1
        now = counters(name)
        yield {
            "keys": keys,
            "wal": (now["wal"] - begun["wal"]) / keys,
            "images": (now["images"] - begun["images"]) / keys,
        }


def compressed(name: str, distance: int) -> dict[str, Any]:
    curves = {}
    with connections[name].cursor() as cursor:
        cursor.execute("SELECT unnest(enumvals) FROM pg_settings WHERE name = 'wal_compression'")
        ways = [way for (way,) in cursor.fetchall() if way in ("pglz", "lz4", "zstd")]
        for way in ways:
            cursor.execute(f"SET wal_compression = {way}")
            curves[f"{name}, {way}"] = across_checkpoint(name, distance)
        cursor.execute("RESET wal_compression")
    return curves


if __name__ == "__main__":
    main(sys.argv[1])
