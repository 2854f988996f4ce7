"""What is done to the service, scenario by scenario."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from django_idempotency.testing import Verdict, exercise
from tests.faults.cluster import Cluster
from tests.faults.nemesis import CountingProxy, Nemesis, crashing, cutting, locking, reviving, together, vanishing
from tests.faults.payments import ATOMIC, LEASED, Fault, Payments, bites
from tests.servers import Server, prepare_database, running_server

LEASE = 1.0
PAST_THE_LEASE = 2.2
WORKERS = 4
CLIENTS = 16

ON_THE_WAY = ("claim", "take", "complete", "commit", "effect", "fail", "release")
BOTH = tuple(f"{step}.{when}" for step in ON_THE_WAY for when in ("before", "after")) + ("respond",)
ATOMIC_POINTS = (*BOTH, "lock.before", "lock.after")
LEASED_POINTS = (*BOTH, "renew.before", "renew.after")
INSIDE = ("lock.after", "effect.before", "effect.after", "complete.before", "complete.after", "commit.before")


@dataclass(frozen=True)
class Place:
    """The service with its database behind a proxy."""

    cluster: Cluster
    proxy: CountingProxy
    server: Server
    log: Path
    tally: Counter[str]


@dataclass(frozen=True)
class Scenario:
    """``must_bite``: the faults that it is for. ``share``: of the operations of the campaign."""

    name: str
    choose: Callable[[random.Random, bool], Fault | None]
    must_bite: Sequence[str]
    share: float
    nemesis: Callable[[Place], Nemesis] | None = None
    doors: Sequence[str] = (*ATOMIC, *LEASED)
    environment: Mapping[str, str] = field(default_factory=dict)
    connection: Mapping[str, str] = field(default_factory=dict)
    parameters: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    scenario: Scenario
    verdict: Verdict
    hits: Counter[tuple[str, str]]
    bitten: Counter[str]


def run(
    scenario: Scenario, cluster: Cluster, directory: Path, *, operations: int, seed: int, drain: float = 60
) -> Outcome:
    """Play it on a prepared database."""
    with standing(scenario, cluster, directory) as place:
        payments = Payments(place.server, cluster.url(), scenario.doors, scenario.choose, seed)
        verdict = exercise(
            payments.send,
            payments.effects,
            clients=CLIENTS,
            keys=max(1, operations // 4),
            operations=operations,
            seed=seed,
            nemesis=scenario.nemesis(place) if scenario.nemesis else None,
            drain=drain,
        )
    hits, errors = bites(place.log)
    bitten = errors + place.proxy.made + place.tally
    for (action, _point), count in hits.items():
        bitten[action] += count
    return Outcome(scenario, verdict, hits, bitten)


@contextmanager
def standing(scenario: Scenario, cluster: Cluster, directory: Path) -> Iterator[Place]:
    proxy = CountingProxy("127.0.0.1", cluster.port)
    log = directory / f"{scenario.name.replace(' ', '-')}.jsonl"
    query = "".join(f"&{name}={quote(value)}" for name, value in scenario.connection.items())
    environment = {
        "DJANGO_SETTINGS_MODULE": "tests.faults.settings",
        "FAULTS_LOG": str(log),
        "LEASE": str(LEASE),
        **scenario.environment,
    }
    url = cluster.url(port=proxy.port) + query
    try:
        with (
            running_server(url, directory, workers=WORKERS, **environment) as server,
            reviving(server.pid, after=PAST_THE_LEASE) as tally,
        ):
            yield Place(cluster, proxy, server, log, tally)
    finally:
        proxy.listener.close()
        proxy.go_away()


# --- Which fault ------------------------------------------------------------------------------------------------------

MATRIX = {"raise": 4, "terminate": 3, "cut": 3, "kill": 2, "stop": 1}


def anywhere(rate: float, actions: Mapping[str, int] = MATRIX) -> Callable[[random.Random, bool], Fault | None]:
    """Any action at any point. What is to be hit while renewing has to take long enough to be renewed."""

    def choose(decide: random.Random, leased: bool) -> Fault | None:
        if decide.random() > rate:
            return None
        at = decide.choice(LEASED_POINTS if leased else ATOMIC_POINTS)
        (do,) = decide.choices([*actions], [*actions.values()])
        slowly = {"delay_ms": 700} if at.startswith("renew") else {"delay_ms": decide.choice((0, 0, 30))}
        return {"at": at, "do": do, **slowly}

    return choose


def one_of(rate: float, *faults: Fault) -> Callable[[random.Random, bool], Fault | None]:
    def choose(decide: random.Random, leased: bool) -> Fault | None:
        if decide.random() > rate:
            return None
        fault = dict(decide.choice(faults))
        return {**fault, "at": decide.choice(fault["at"])}

    return choose


def _options(**settings: str) -> dict[str, str]:
    return {"options": " ".join(f"-c {name}={value}" for name, value in settings.items())}


CRASHES = Scenario(
    "crashes at every point",
    anywhere(0.3),
    (*MATRIX, "cut before COMMIT", "cut after COMMIT", "worker restarted", "worker continued", "connection terminated"),
    share=0.45,
    nemesis=lambda place: cutting(place.proxy),
)
CRASHES_PERSISTENT = Scenario(
    "persistent connections",
    anywhere(0.2, {"terminate": 3, "cut": 3, "raise": 1}),
    ("terminate", "cut", "database out of reach"),
    share=0.1,
    nemesis=lambda place: together(cutting(place.proxy), vanishing(place.proxy)),
    environment={"CONN_MAX_AGE": "60"},
)
TIMEOUTS = Scenario(
    "timeouts and deadlocks",
    one_of(
        0.3,
        {"at": INSIDE, "do": "sleep", "ms": 400},
        {"at": INSIDE, "do": "query", "ms": 400},
        {"at": INSIDE, "do": "lock", "locks": [7, 8], "ms": 40},
        {"at": INSIDE, "do": "lock", "locks": [8, 7], "ms": 40},
    ),
    ("idle_in_transaction_session_timeout", "statement_timeout", "lock_timeout", "deadlock", "foreign row lock"),
    share=0.1,
    nemesis=lambda place: locking(place.cluster.url(), place.tally),
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
    share=0.1,
    connection={"isolation_level": "4"},
)
REPEATABLE_READ = Scenario(
    "repeatable read",
    one_of(0.4, {"at": INSIDE, "do": "update", "ms": 20}),
    ("serialization failure",),
    share=0.1,
    connection={"isolation_level": "3"},
)
DATABASE_CRASHES = Scenario(
    "the database crashes",
    one_of(
        0.03,
        {"at": ("claim.after", "lock.before", "lock.after", "effect.after", "complete.after"), "do": "crash"},
        {"at": ("commit.before", "commit.after", "respond"), "do": "crash"},
    ),
    ("crash", "PostgreSQL SIGKILL", "PostgreSQL immediate shutdown"),
    share=0.15,
    nemesis=lambda place: crashing(place.cluster, place.tally),
    environment={"FAULTS_MAY_CRASH_DATABASE": "1", "CONN_MAX_AGE": "60"},
    parameters={"wal_writer_delay": "10s"},  # an asynchronous commit stays in memory for as long as it may
)
SCENARIOS = (CRASHES, CRASHES_PERSISTENT, TIMEOUTS, SERIALIZABLE, REPEATABLE_READ, DATABASE_CRASHES)


def prepare(cluster: Cluster) -> None:
    prepare_database(cluster.url())


def described(**parts: Any) -> str:
    return " ".join(f"{name}={value}" for name, value in parts.items())
