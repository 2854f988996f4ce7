"""What one request costs in things that can be counted, and so don't wobble: one client, one worker, one thread."""

from __future__ import annotations

import re
import time
import uuid
from collections import Counter
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path

from testproject.benchmarks import servers
from testproject.benchmarks.cluster import Cluster
from testproject.benchmarks.private_redis import Redis

WARM_UP = 20
REQUESTS = 200
REPORTS_EVERY = 1.1  # seconds: a session tells what it has counted when it is idle, but not within a second again


@dataclass(frozen=True)
class Counts:
    """Of one request. ``statements`` and ``sent``, the texts, are of a private cluster only."""

    statements: float | None
    synchronous_commits: float
    wal_bytes: float
    buffers: float
    sent: list[str]


def count(name: str, cluster: Cluster, redis: Redis | None, directory: Path, *, replays: bool = False) -> Counts:
    """Of first requests, or of replays. WAL is counted without full page images: those depend on checkpoints alone."""
    cluster.set(autovacuum="off", full_page_writes="off", log_statement="all")
    try:
        with servers.running(name, cluster, redis, directory, workers=1, threads=1) as server:
            connection = HTTPConnection("127.0.0.1", server.port)
            key = str(uuid.uuid4())
            keys = [key if replays else str(uuid.uuid4()) for _ in range(WARM_UP + REQUESTS)]
            for key in keys[: WARM_UP - 1]:
                server.post(key, connection)
            time.sleep(REPORTS_EVERY)
            server.post(keys[WARM_UP - 1], connection)
            before, since = cluster.counters(server.database), cluster.log_size()
            for key in keys[WARM_UP:]:
                server.post(key, connection)
            logged = cluster.logged(server.database, since)
    finally:
        cluster.set(autovacuum="on", full_page_writes="on", log_statement="none")
    spent = cluster.counters(server.database) - before
    return Counts(
        len(logged) / REQUESTS if cluster.is_private else None,
        spent.fsyncs / REQUESTS,
        spent.wal_bytes / REQUESTS,
        spent.buffers / REQUESTS,
        [f"{times / REQUESTS:g} × {text}" for text, times in Counter(map(_shape, logged)).most_common(12)],
    )


def _shape(statement: str) -> str:
    """Without its values, so that the same statement is the same text."""
    return re.sub(r"'[^']*'(::\w+)?|\b\d+\b", "?", " ".join(statement.split()))[:110]
