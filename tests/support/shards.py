"""Three PostgreSQL servers of the tests' own, each with the tables. Any of them may be
killed.
"""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from django.core.management import call_command
from django.db import connection, connections

from django_idempotency.values.outcomes import Operation
from tests.faults.cluster import Cluster, room

ALIASES = ("shard1", "shard2", "shard3")
EFFECTS = "CREATE TABLE effect (reference text)"


def by_tenant(operation: Operation) -> str:
    """The shard of a tenant: ``shard2`` for the scope ``tenant:2``."""
    return f"shard{operation.scope.rpartition(':')[2]}"


@contextmanager
def running_shards() -> Iterator[dict[str, Cluster]]:
    """By alias, and in ``connections``."""
    with room() as directory:
        servers = {alias: Cluster(directory / alias, fsync="off") for alias in ALIASES}
        for alias, server in servers.items():
            connections.settings[alias] = _settings(server)
        try:
            _make_alike(*servers.values())
            for server in servers.values():
                server.start()
            yield servers
        finally:
            for alias, server in servers.items():
                server.stop()
                connections[alias].close()
                del connections[alias], connections.settings[alias]


def _settings(server: Cluster) -> dict[str, object]:
    where = {
        "HOST": "127.0.0.1",
        "PORT": server.port,
        "USER": "postgres",
        "NAME": "postgres",
        "PASSWORD": "",
    }
    return {
        **connection.settings_dict,
        **where,
        "CONN_MAX_AGE": 0,
        "ATOMIC_REQUESTS": False,
        "TEST": {},
    }


def _make_alike(first: Cluster, *others: Cluster) -> None:
    first.create()
    first.start()
    call_command("migrate", database=ALIASES[0], verbosity=0)
    first.execute(EFFECTS)
    connections[ALIASES[0]].close()
    first.stop(signal.SIGINT)
    for other in others:
        subprocess.run(["cp", "-a", first.directory, other.directory], check=True)
