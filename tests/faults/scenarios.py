"""What is done to the service, scenario by scenario."""

from __future__ import annotations

import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

from tests.faults.chains import CHARGES, Chain, ToldCharges, chain
from tests.faults.cluster import Cluster, room, running_cluster, small_disk
from tests.faults.messages import Consumers, Messages
from tests.faults.nemesis import (
    REDIS_TROUBLES,
    CountingProxy,
    Nemesis,
    attach,
    cleaning_up,
    crashing,
    cutting,
    failing_over,
    filling,
    harming_redis,
    jumping,
    jumping_clock,
    leaving,
    locking,
    restarting,
    reviving,
    together,
    vanishing,
)
from tests.faults.payments import (
    ATOMIC,
    IN_STEPS,
    LEASED,
    ONE_AT_MOST_ONCE,
    REPEATABLE,
    Choose,
    Ledger,
    Payments,
    bites,
)
from tests.faults.redis_failover import FAILOVER as REDIS_FAILOVER
from tests.faults.redis_failover import asynchronous, promoting, replicated
from tests.faults.runs import Runs
from tests.faults.trials import LOST, Verdict, Violation, exercise, without_losses
from tests.faults.troubles import INSIDE, MATRIX, anywhere, in_calls, one_of
from tests.support.private_servers import nats_program
from tests.support.redis_servers import REDIS as REDIS_SERVER
from tests.support.redis_servers import running_node
from tests.support.servers import Server, prepare_database, running_server

LEASE = 1.0
PAST_THE_LEASE = 2.2
WORKERS = 4
CLIENTS = 16
ROUND = 2_500  # operations


@dataclass(frozen=True)
class Place:
    """The service with its database behind a proxy."""

    cluster: Cluster
    proxy: CountingProxy
    served: Server | Consumers
    directory: Path
    log: Path
    counts: Counter[str]
    stack: ExitStack
    chain: Chain | None = None


@dataclass(frozen=True)
class Scenario:
    """``must_bite``: the faults that it is for. ``must_show``: what they lead to.
    ``share``: of all operations.

    ``may_lose``: its store may lose records that it has acknowledged. What comes of
    that is counted, but not judged.
    """

    name: str
    choose: Choose
    must_bite: Sequence[str]
    share: float
    must_show: Sequence[str] = ()
    nemesis: Callable[[Place], Nemesis] | None = None
    entry_points: Sequence[str] = (*ATOMIC, *REPEATABLE)
    environment: Mapping[str, str] = field(default_factory=dict)
    connection: Mapping[str, str] = field(default_factory=dict)
    prepare: Callable[[Path], Mapping[str, str]] = lambda directory: {}
    by_message: bool = False
    outside: bool = False  # its effects are outside the database
    may_lose: bool = False
    # a charge has taken effect once a broker has told a consumer of it
    told: bool = False
    clients: int = CLIENTS
    own_cluster: bool = False
    own_disk: int = 0  # megabytes


@dataclass(frozen=True)
class Outcome:
    scenario: Scenario
    verdicts: list[Verdict]
    hits: Counter[tuple[str, str]]
    bitten: Counter[str]

    @property
    def violations(self) -> list[Violation]:
        return [
            violation for verdict in self.verdicts for violation in verdict.violations
        ]

    @property
    def counts(self) -> Counter[str]:
        return sum((verdict.counts for verdict in self.verdicts), Counter())

    def toothless(self, least: int) -> list[str]:
        """What did not bite as often as it takes."""
        return [
            name
            for name in (*self.scenario.must_bite, *self.scenario.must_show)
            if self.bitten[name] < least
        ]


def run(
    scenario: Scenario,
    cluster: Cluster,
    directory: Path,
    *,
    operations: int,
    seed: int,
    drain: float = 240,
    least: int = 0,
    patience: float = 0,
) -> Outcome:
    """Play it on a prepared database; longer, for ``patience`` seconds in all, until
    everything bit ``least`` times.

    In rounds, after each of which the verdict decides whether to go on.
    """
    verdicts: list[Verdict] = []
    begun = time.monotonic()
    with standing(scenario, cluster, directory) as place:
        nemesis = scenario.nemesis(place) if scenario.nemesis else None
        while True:
            left = operations - ROUND * len(verdicts)
            size = min(left if left > 0 else operations, ROUND)
            verdicts.append(
                _round(
                    scenario, place, nemesis, size, seed + 1000 * len(verdicts), drain
                )
            )
            outcome = Outcome(scenario, verdicts, *_bites(place))
            bitten = not outcome.toothless(least) or time.monotonic() - begun > patience
            if outcome.violations or (bitten and left <= ROUND):
                return outcome


def _round(
    scenario: Scenario,
    place: Place,
    nemesis: Nemesis | None,
    operations: int,
    seed: int,
    drain: float,
) -> Verdict:
    with closing(Ledger(place.cluster.url(port=place.proxy.port))) as ledger:
        driver: Payments | Messages | Runs
        if isinstance(place.served, Consumers):
            driver = Messages(place.served, ledger, scenario.choose, seed)
        elif place.chain:
            given = (place.served, ledger, CHARGES, scenario.choose, seed, place.counts)
            driver = ToldCharges(*given, chain=place.chain)
        elif scenario.outside:
            driver = Runs(place.served, place.directory / "runs.jsonl", seed)
        else:
            driver = Payments(
                place.served,
                ledger,
                scenario.entry_points,
                scenario.choose,
                seed,
                place.counts,
            )
        verdict = exercise(
            driver.send,
            driver.effects,
            clients=scenario.clients,
            keys=max(1, operations // 4),
            operations=operations,
            seed=seed,
            nemesis=nemesis,
            drain=drain,
            settle=PAST_THE_LEASE + LEASE if "stop" in scenario.must_bite else 0,
        )
    unstated = driver.violations if isinstance(driver, Runs) else ()
    verdict = replace(verdict, violations=(*verdict.violations, *unstated))
    return without_losses(verdict, place.counts) if scenario.may_lose else verdict


def _bites(place: Place) -> tuple[Counter[tuple[str, str]], Counter[str]]:
    hits, errors = bites(place.log)
    bitten = errors + place.proxy.made + place.counts
    for (action, _point), count in hits.items():
        bitten[action] += count
    return hits, bitten


@contextmanager
def standing(scenario: Scenario, cluster: Cluster, directory: Path) -> Iterator[Place]:
    proxy = CountingProxy("127.0.0.1", cluster.port)
    log = directory / f"{scenario.name.replace(' ', '-')}.jsonl"
    query = "".join(
        f"&{name}={quote(value)}" for name, value in scenario.connection.items()
    )
    environment = {
        "DJANGO_SETTINGS_MODULE": "tests.faults.settings",
        "FAULTS_LOG": str(log),
        "LEASE": str(LEASE),
        "RUNS_LOG": str(directory / "runs.jsonl"),
        "CONN_MAX_AGE": "60",
        **scenario.environment,
        **scenario.prepare(directory),
    }
    url = cluster.url(port=proxy.port) + query
    try:
        with (
            _served(scenario, url, directory, environment) as served,
            reviving(served.pid, after=PAST_THE_LEASE) as counts,
            ExitStack() as stack,
        ):
            followed = (
                stack.enter_context(chain(cluster.url(), directory))
                if scenario.told
                else None
            )
            yield Place(cluster, proxy, served, directory, log, counts, stack, followed)
    finally:
        proxy.listener.close()
        proxy.go_away()


@contextmanager
def _served(
    scenario: Scenario, url: str, directory: Path, environment: dict[str, str]
) -> Iterator[Server | Consumers]:
    if not scenario.by_message:
        with running_server(url, directory, workers=WORKERS, **environment) as server:
            yield server
    else:
        with closing(Consumers({"DATABASE_URL": url, **environment})) as consumers:
            yield consumers


def _options(**settings: str) -> dict[str, str]:
    return {
        "options": " ".join(f"-c {name}={value}" for name, value in settings.items())
    }


CRASHES = Scenario(
    "crashes at every point",
    anywhere(0.4),
    (*MATRIX, "cut before COMMIT", "cut after COMMIT", "maintenance killed"),
    must_show=("worker restarted", "worker continued", "connection terminated"),
    share=0.3,
    nemesis=lambda place: together(
        cutting(place.proxy), cleaning_up(place.cluster.url(), place.counts)
    ),
)
BY_LOCK, MIXED = {"CLAIM": "lock"}, {"CLAIM": "mixed"}
CRASHES_BY_LOCK = replace(
    CRASHES,
    name="crashes, claims by lock",
    choose=anywhere(0.5),
    must_bite=(
        "kill",
        "raise",
        "terminate",
        "cut",
        "cut before COMMIT",
        "cut after COMMIT",
    ),
    must_show=("worker restarted",),
    share=0.1,
    entry_points=ATOMIC,
    environment=BY_LOCK,
)
CRASHES_MIXED = replace(
    CRASHES_BY_LOCK, name="crashes, claims of both kinds", environment=MIXED
)
ZOMBIES = Scenario(
    "zombies",
    one_of(
        0.15,
        {
            "at": ("claim.after", "effect.before", "effect.after", "complete.before"),
            "do": "stop",
        },
    ),
    ("stop",),
    must_show=("worker continued",),
    share=0.05,
    entry_points=LEASED,
)
WIRES = Scenario(
    "short connections",
    anywhere(0.2, {"terminate": 3, "cut": 3, "raise": 1}),
    ("terminate", "cut", "database out of reach"),
    share=0.07,
    nemesis=lambda place: together(cutting(place.proxy), vanishing(place.proxy)),
    environment={"CONN_MAX_AGE": "0", **MIXED},
)
TIMEOUTS = Scenario(
    "timeouts and deadlocks",
    one_of(
        0.5,
        {"at": INSIDE, "do": "sleep", "ms": 400},
        {"at": INSIDE, "do": "query", "ms": 400},
        {"at": INSIDE, "do": "lock", "locks": [7, 8], "ms": 80},
        {"at": INSIDE, "do": "lock", "locks": [8, 7], "ms": 80},
    ),
    (
        "idle_in_transaction_session_timeout",
        "statement_timeout",
        "lock_timeout",
        "deadlock",
        "foreign row lock",
    ),
    share=0.1,
    nemesis=lambda place: locking(place.cluster.url(), place.counts),
    connection=_options(
        statement_timeout="300",
        lock_timeout="150",
        deadlock_timeout="30",
        idle_in_transaction_session_timeout="250",
    ),
)
SERIALIZABLE = Scenario(
    "serializable",
    one_of(0.4, {"at": INSIDE, "do": "survey", "ms": 20}),
    ("serialization failure",),
    share=0.07,
    connection={"isolation_level": "4"},
)
REPEATABLE_READ = Scenario(
    "repeatable read",
    one_of(0.4, {"at": INSIDE, "do": "update", "ms": 20}),
    ("serialization failure",),
    share=0.07,
    environment=MIXED,
    connection={"isolation_level": "3"},
)
CRASHES_OF_THE_DATABASE: tuple[dict[str, Any], ...] = (
    {
        "at": (
            "claim.after",
            "lock.before",
            "lock.after",
            "effect.after",
            "complete.after",
        ),
        "do": "crash",
    },
    {"at": ("commit.before", "commit.after", "respond"), "do": "crash"},
)
DATABASE_CRASHES = Scenario(
    "the database crashes",
    one_of(0.06, *CRASHES_OF_THE_DATABASE),
    ("crash", "PostgreSQL SIGKILL", "PostgreSQL immediate shutdown"),
    share=0.1,
    nemesis=lambda place: crashing(place.cluster, place.counts),
    environment={"FAULTS_MAY_CRASH_DATABASE": "1"},
)


def _failing_over(place: Place) -> Nemesis:
    standby = Cluster(place.directory / "standby")
    place.stack.callback(standby.stop)
    attach(standby, place.cluster)
    return failing_over(place.cluster, standby, place.proxy)


FAILOVER = Scenario(
    "failover",
    one_of(0),
    ("failover",),
    share=0.15,
    nemesis=_failing_over,
    own_cluster=True,
)
DISK_FULL = Scenario(
    "disk full",
    one_of(0),
    ("disk filled",),
    must_show=("disk full",),
    share=0.07,
    nemesis=lambda place: filling(
        place.cluster.directory.parent, place.cluster, place.counts
    ),
    own_disk=100,
)
CLOCK = Scenario(
    "clock jumps",
    anywhere(0.1, {"raise": 2, "terminate": 1}),
    ("clock jumped",),
    must_show=("response an hour off",),
    share=0.05,
    nemesis=lambda place: jumping(place.directory / "clock", place.counts),
    prepare=jumping_clock,
)
CONSUMERS = Scenario(
    "consumers",
    anywhere(0.3),
    (*MATRIX, "cut before COMMIT", "cut after COMMIT"),
    share=0.1,
    nemesis=lambda place: cutting(place.proxy),
    by_message=True,
    clients=6,
)
OUTAGES = Scenario(
    "outages in lease mode",
    one_of(0),
    ("database out of reach", "database frozen"),
    share=0.1,
    nemesis=lambda place: leaving(place.proxy, LEASE),
    outside=True,
    clients=48,
)


SOCKET = "redis.sock"


def _beside_redis(directory: Path) -> dict[str, str]:
    return {"STORE": "redis", "REDIS_URL": f"unix://{directory / SOCKET}"}


def _harming_redis(place: Place) -> Nemesis:
    """Each write is on the disk before it is acknowledged, or a Redis that is killed
    would forget claims.
    """
    kept = ("--appendonly", "yes", "--appendfsync", "always")
    node = running_node(
        place.directory, *kept, "--unixsocket", str(place.directory / SOCKET)
    )
    return harming_redis(place.stack.enter_context(node), LEASE, place.counts)


REDIS = Scenario(
    "outages of Redis",
    one_of(0),
    (*REDIS_TROUBLES,),
    share=0.1,
    nemesis=_harming_redis,
    prepare=_beside_redis,
    outside=True,
    clients=48,
)


REPLICATED_REDIS = Scenario(
    "failover of Redis, replicated",
    one_of(0),
    (REDIS_FAILOVER,),
    share=0.1,
    nemesis=lambda place: promoting(place.directory, place.stack, place.counts),
    prepare=replicated,
    outside=True,
    clients=48,
)
ASYNCHRONOUS_REDIS = replace(
    REPLICATED_REDIS,
    name="failover of Redis, async",
    must_show=(LOST,),
    prepare=asynchronous,
    may_lose=True,
)
REDISES = (REDIS, REPLICATED_REDIS, ASYNCHRONOUS_REDIS)


def _harming_chain(place: Place) -> Nemesis:
    assert place.chain is not None
    return together(cutting(place.proxy), partial(place.chain.harm, place.counts))


CHAINS = Scenario(
    "chains",
    anywhere(0.1),
    (
        "relay or consumer killed",
        "broker killed",
        "cut before COMMIT",
        "cut after COMMIT",
    ),
    share=0.2,
    nemesis=_harming_chain,
    entry_points=CHARGES,
    told=True,
)
STEPS = Scenario(
    "operations of five steps",
    in_calls(0.1, anywhere(0.1, {"kill": 3, "terminate": 2, "raise": 1, "cut": 1})),
    ("kill", "terminate", "PostgreSQL SIGKILL", "PostgreSQL immediate shutdown"),
    must_show=("worker restarted", "decided: paid", "decided: not paid"),
    share=0.2,
    nemesis=lambda place: restarting(place.cluster, place.counts),
    entry_points=(IN_STEPS, ONE_AT_MOST_ONCE),
)
SCENARIOS = (
    OUTAGES,
    *REDISES,
    CRASHES,
    CRASHES_BY_LOCK,
    CRASHES_MIXED,
    ZOMBIES,
    WIRES,
    TIMEOUTS,
    SERIALIZABLE,
    REPEATABLE_READ,
    DATABASE_CRASHES,
    FAILOVER,
    DISK_FULL,
    CLOCK,
    CONSUMERS,
    CHAINS,
    STEPS,
)


def lacking(scenario: Scenario) -> str:
    """What the machine lacks for it."""
    if scenario is CLOCK and shutil.which("gcc") is None:
        return "gcc, to make a clock that jumps"
    if scenario in REDISES and shutil.which(REDIS_SERVER) is None:
        return "redis-server"
    if scenario.told and nats_program() is None:
        return "nats-server"
    if scenario.own_disk and os.geteuid() != 0:
        return "root, to mount a small disk"
    return ""


@contextmanager
def ground(disk: int = 0) -> Iterator[tuple[Cluster, Path]]:
    """A server with a prepared database, and a directory. An asynchronous commit stays
    in memory as long as it may.
    """
    with (
        room() as scratch,
        small_disk(disk) if disk else room() as directory,
        running_cluster(directory, wal_writer_delay="10s") as cluster,
    ):
        prepare_database(cluster.url())
        yield cluster, scratch
