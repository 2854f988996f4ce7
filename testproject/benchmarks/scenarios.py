"""What the contenders have to do, side by side, in interleaved rounds."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from testproject.benchmarks.cluster import Cluster
from testproject.benchmarks.load import Load, drive
from testproject.benchmarks.private_redis import Redis
from testproject.benchmarks.servers import Server

BASELINE = "unprotected"


@dataclass(frozen=True)
class Scenario:
    """``plan`` is one of those in ``keys.lua``, ``work`` the milliseconds of work in
    each request that runs.
    """

    name: str
    title: str
    clients: int
    plan: str = "fresh"
    work: int = 0


SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        Scenario("a", "50 ms of work, 8 clients", clients=8, work=50),
        Scenario("a50", "50 ms of work, 50 clients", clients=50, work=50),
        Scenario("b", "trivial view, saturated", clients=16),
        Scenario("c", "replays only", clients=16, plan="replays"),
        Scenario("e", "90 % first requests, 10 % duplicates", clients=16, plan="mixed"),
    )
}


@dataclass(frozen=True)
class Slice:
    """One contender's turn. Processor times are ms per request that was not refused,
    ``None`` if unknown.
    """

    load: Load
    server_cpu: float
    database_cpu: float | None
    wal_bytes: float

    @property
    def cpu(self) -> float:
        """The time of both, which limits the rate once the machine is saturated,
        whatever else it does.
        """
        return self.server_cpu + (self.database_cpu or 0)

    def figures(self) -> dict[str, float | None]:
        return {
            "rate": self.load.rate,
            "p50": self.load.p50,
            "p99": self.load.p99,
            "server_cpu": self.server_cpu,
            "database_cpu": self.database_cpu,
            "cpu": self.cpu,
            "wal_bytes": self.wal_bytes,
            "refused": 100 * self.load.refused / max(1, self.load.requests),
            "errors": self.load.errors,
        }


def interleaved(
    servers: Sequence[Server],
    scenario: Scenario,
    cluster: Cluster,
    redis: Redis | None,
    *,
    rounds: int,
    seconds: int,
) -> Iterator[dict[str, Slice]]:
    """Yield rounds in which each has one turn, in a new random order, so that other
    load affects all alike.
    """
    order = random.Random(scenario.name)
    for server in servers:
        # warms up, and makes the first requests of replays
        take_turn(server, scenario, cluster, redis, seconds=1)
    for _ in range(rounds):
        turns = {
            server.name: take_turn(server, scenario, cluster, redis, seconds=seconds)
            for server in order.sample(list(servers), len(servers))
        }
        yield {server.name: turns[server.name] for server in servers}


def take_turn(
    server: Server,
    scenario: Scenario,
    cluster: Cluster,
    redis: Redis | None,
    *,
    seconds: int,
) -> Slice:
    before = server.cpu(), _database_cpu(cluster, redis), cluster.wal_position()
    load = drive(
        server,
        plan=scenario.plan,
        clients=scenario.clients,
        seconds=seconds,
        work=scenario.work,
        run="c0ffee00" if scenario.plan == "replays" else "",
    )
    after = server.cpu(), _database_cpu(cluster, redis), cluster.wal_position()
    requests = max(1, load.requests - load.refused)
    database = (
        None
        if before[1] is None or after[1] is None
        else (after[1] - before[1]) * 1000 / requests
    )
    return Slice(
        load,
        (after[0] - before[0]) * 1000 / requests,
        database,
        (after[2] - before[2]) / requests,
    )


def _database_cpu(cluster: Cluster, redis: Redis | None) -> float | None:
    used = cluster.cpu()
    return None if used is None else used + (redis.cpu() if redis else 0)


def summary(rounds: Sequence[dict[str, Slice]]) -> dict[str, dict[str, Any]]:
    """Return medians of the rounds, by contender. Ratios and differences are taken
    within a round first.
    """
    return {
        name: _medians([(turns[name], turns.get(BASELINE)) for turns in rounds])
        for name in rounds[0]
    }


def _medians(turns: Sequence[tuple[Slice, Slice | None]]) -> dict[str, Any]:
    figures = [turn.figures() for turn, _ in turns]
    told = {
        name: median(numbers)
        for name in figures[0]
        if (
            numbers := [
                number for figure in figures if (number := figure[name]) is not None
            ]
        )
    }
    against = [(turn, baseline) for turn, baseline in turns if baseline]
    return {
        **told,
        **(_against(against) if against else {}),
        "rounds": [asdict(turn) for turn, _ in turns],
    }


def _against(turns: Sequence[tuple[Slice, Slice]]) -> dict[str, float]:
    ratios = [turn.load.rate / baseline.load.rate for turn, baseline in turns]
    return {
        "ratio": median(ratios),
        "ratio_low": min(ratios),
        "ratio_high": max(ratios),
        "cpu_ratio": median(baseline.cpu / turn.cpu for turn, baseline in turns),
        "p99_more": median(
            turn.load.p99 - baseline.load.p99 for turn, baseline in turns
        ),
    }


def executed_again(server: Server, cluster: Cluster) -> int:
    """Return how many effects there are beyond one for each key."""
    return int(
        cluster.ask(
            "SELECT count(*) - count(DISTINCT key) FROM effect", server.database
        )[0]
    )
