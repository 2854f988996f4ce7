"""What one request costs in things that can be counted, so don't vary: one client, one
worker, one thread.
"""

from __future__ import annotations

import re
import time
import uuid
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from http.client import HTTPConnection
from pathlib import Path

from testproject.benchmarks import servers
from testproject.benchmarks.cluster import Cluster, Counters
from testproject.benchmarks.private_redis import Redis
from testproject.benchmarks.servers import Server

WARM_UP = 20
REQUESTS = 200
# more: a session that the background opens meanwhile reads 440 buffers of catalogs
REPLAYS = 500
# written by a thread of its own, every few seconds
BACKGROUND = ("django_idempotency_counter", "SET replays = ")
# seconds: an idle session reports its counts, but only once within a second
REPORTS_EVERY = 1.1


@dataclass(frozen=True)
class Counts:
    """Counts of one request. ``statements`` and ``sent``, their texts, are known on a
    private cluster only.
    """

    statements: float | None
    synchronous_commits: float
    wal_bytes: float
    buffers: float
    sent: list[str]


def count(
    name: str, cluster: Cluster, redis: Redis | None, directory: Path
) -> dict[str, Counts]:
    """Count for first requests and for replays, without full page images, which depend
    on checkpoints alone.
    """
    with (
        cluster.setting(autovacuum="off", full_page_writes="off", log_statement="all"),
        servers.running(
            name, cluster, redis, directory, workers=1, threads=1
        ) as server,
    ):
        return {
            "a first request": _count(
                server, cluster, lambda: str(uuid.uuid4()), REQUESTS
            ),
            "a replay": _count(server, cluster, partial(str, uuid.uuid4()), REPLAYS),
        }


def _count(
    server: Server, cluster: Cluster, key: Callable[[], str], requests: int
) -> Counts:
    with closing(HTTPConnection("127.0.0.1", server.port)) as connection:
        for _ in range(WARM_UP):
            server.post(key(), connection)
        before, since = _counters(server, cluster, connection, key), cluster.log_size()
        for _ in range(requests - 1):
            server.post(key(), connection)
        spent = _counters(server, cluster, connection, key) - before
    logged = _of_requests(cluster.logged(server.database, since))
    return Counts(
        len(logged) / requests if cluster.is_private else None,
        spent.fsyncs / requests,
        spent.wal_bytes / requests,
        spent.buffers / requests,
        [
            f"{times / requests:g} × {text}"
            for text, times in Counter(map(_shape, logged)).most_common(12)
        ],
    )


def _of_requests(logged: list[tuple[str, str]]) -> list[str]:
    """Return the statements without those of the thread that writes the counts, whose
    number depends on the time.
    """
    background = {
        session
        for session, statement in logged
        if any(written in statement for written in BACKGROUND)
    }
    return [statement for session, statement in logged if session not in background]


def _counters(
    server: Server, cluster: Cluster, connection: HTTPConnection, key: Callable[[], str]
) -> Counters:
    """Return the counters after one more request, after which the sessions report what
    they have counted.
    """
    time.sleep(REPORTS_EVERY)
    server.post(key(), connection)
    return cluster.counters(server.database)


def _shape(statement: str) -> str:
    """Return a statement without its values, so that the same statement has the same
    text.
    """
    return re.sub(r"'[^']*'(::\w+)?|\b\d+\b", "?", " ".join(statement.split()))[:110]
