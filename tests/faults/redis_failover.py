"""A Redis with a replica, which is promoted again and again."""

from __future__ import annotations

import random
from collections import Counter
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from threading import Event

from tests.faults.nemesis import Nemesis, again_and_again
from tests.support.redis_servers import Node, running_node
from tests.support.waiting import eventually

SOCKET = "active.sock"  # leads to whichever is the master
FAILOVER = "Redis failover"
AT_ONCE = ("--repl-diskless-sync-delay", "0")


def beside(directory: Path, durability: str) -> dict[str, str]:
    """The environment of a service whose records are there."""
    return {
        "STORE": "redis",
        "REDIS_URL": f"unix://{directory / SOCKET}",
        "REDIS_DURABILITY": durability,
    }


def promoting(directory: Path, stack: ExitStack, counts: Counter[str]) -> Nemesis:
    """The replica is promoted while the master still takes writes for a moment, and
    then the master is killed.

    So what was written in that moment is on the master alone, as if the link between
    the two had been lost.
    """
    active, other = (_node(directory, name, stack) for name in ("a.sock", "b.sock"))
    _follow(other, active)
    _lead_to(active, directory)

    def strike(decide: random.Random, over: Event) -> None:
        nonlocal active, other
        other.client.replicaof("NO", "ONE")
        over.wait(decide.uniform(0.05, 0.3))
        active.kill()
        active, other = other, active
        _lead_to(active, directory)
        counts[FAILOVER] += 1
        other.start()
        _follow(other, active)

    return again_and_again(strike, 0.5, 1.5)


def _node(directory: Path, socket: str, stack: ExitStack) -> Node:
    return stack.enter_context(
        running_node(directory, *AT_ONCE, "--unixsocket", str(directory / socket))
    )


def _follow(replica: Node, master: Node) -> None:
    replica.client.replicaof("127.0.0.1", str(master.port))
    eventually(lambda: replica.client.info("replication")["master_link_status"] == "up")


def _lead_to(node: Node, directory: Path) -> None:
    new = directory / f"{SOCKET}.new"
    new.symlink_to(node.command[node.command.index("--unixsocket") + 1])
    new.replace(directory / SOCKET)


asynchronous, replicated = (
    partial(beside, durability="none"),
    partial(beside, durability="replicas"),
)
