"""Redis servers, Valkey servers and clusters of the tests' own, on free ports, in
directories of their own.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import redis

from tests.support.private_servers import PrivateServer, free_port, take_port
from tests.support.waiting import eventually

# a path, to test another version, or Valkey
REDIS = os.environ.get("REDIS_SERVER", "redis-server")
BUS = 10_000  # a node's cluster bus is at its port plus this number
# seconds after which the others take a node of a cluster for dead: while it is made, or
# to see it happen; and otherwise, however long a busy machine lets one stand still
SOON, HARDLY_EVER = 1.5, 600


class Node(PrivateServer):
    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def client(self) -> redis.Redis:
        return redis.Redis(port=self.port, socket_timeout=60)

    def answers(self) -> bool:
        try:
            with redis.Redis(port=self.port, socket_timeout=1) as client:
                return bool(client.ping())
        except redis.RedisError:
            return False


@contextmanager
def running_node(
    directory: Path, *options: str, program: str = REDIS
) -> Iterator[Node]:
    port = _free_port()
    home = directory / str(port)
    home.mkdir()
    fixed = (
        "--port",
        str(port),
        "--bind",
        "127.0.0.1",
        "--dir",
        str(home),
        "--save",
        "",
        "--loglevel",
        "warning",
    )
    node = Node((program, *fixed, *options), port)
    with node.running():
        yield node


def _free_port() -> int:
    """One with room for the cluster bus above it."""
    return next(
        port
        for port in iter(free_port, None)
        if port + BUS < 32_768 and take_port(port + BUS)
    )


@dataclass
class Cluster:
    nodes: list[Node] = field(default_factory=list)

    @property
    def url(self) -> str:
        return next(node.url for node in self.nodes if node.runs)

    def master_of(self, key: str) -> Node:
        with self.client() as asking:
            return self._node(asking.get_node_from_key(key).port)

    def replica_of(self, master: Node) -> Node:
        return next(
            node
            for node in self.nodes
            if node.client.info("replication").get("master_port") == master.port
        )

    def _node(self, port: int | None) -> Node:
        return next(node for node in self.nodes if node.port == port)

    def client(self) -> Any:
        alive = next(node for node in self.nodes if node.runs)
        return redis.RedisCluster(host="127.0.0.1", port=alive.port, socket_timeout=60)

    def take_for_dead_after(self, seconds: float) -> None:
        for node in self.nodes:
            if node.runs:
                node.client.config_set("cluster-node-timeout", round(seconds * 1000))

    def is_whole(self) -> bool:
        return all(
            node.client.cluster("info").get("cluster_state") == "ok"
            for node in self.nodes
            if node.runs
        )

    def has_replicas(self) -> bool:
        infos = [node.client.info("replication") for node in self.nodes]
        masters = [info for info in infos if info["role"] == "master"]
        linked = [info for info in infos if info.get("master_link_status") == "up"]
        return len(masters) == 3 and len(linked) == len(self.nodes) - 3


@contextmanager
def running_cluster(
    directory: Path, *options: str, replicas: int = 1
) -> Iterator[Cluster]:
    """Three masters, each with ``replicas``."""
    timeouts = (
        "--cluster-node-timeout",
        str(round(SOON * 1000)),
        # a replica takes over, however late it was
        "--cluster-replica-validity-factor",
        "0",
        "--repl-diskless-sync-delay",
        "0",
    )
    with ExitStack() as stack:
        nodes = [
            stack.enter_context(
                running_node(directory, "--cluster-enabled", "yes", *timeouts, *options)
            )
            for _ in range(3 + 3 * replicas)
        ]
        addresses = [f"127.0.0.1:{node.port}" for node in nodes]
        create = (
            "redis-cli",
            "--cluster",
            "create",
            *addresses,
            "--cluster-replicas",
            str(replicas),
            "--cluster-yes",
        )
        subprocess.run(create, check=True, capture_output=True, timeout=120)
        cluster = Cluster(nodes)
        eventually(
            lambda: cluster.is_whole() and cluster.has_replicas(), within=120, every=0.2
        )
        cluster.take_for_dead_after(HARDLY_EVER)
        yield cluster
