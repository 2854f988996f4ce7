"""A hot key: five hundred duplicates of one request at once, beside traffic with other
keys.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from testproject.benchmarks.clients import Answer, Client
from testproject.benchmarks.cluster import Cluster
from testproject.benchmarks.load import drive, driving, result
from testproject.benchmarks.servers import BODY, PATH, Server

DUPLICATES = 500
WORK = 1000  # ms that the one execution takes
OTHERS = {"plan": "fresh", "clients": 8, "work": 50}
SECONDS = 10
HEAD_START = 1.0  # seconds of the others' traffic before the storm
PATIENCE = 30
IN_FLIGHT = (409, 423, 425)


@dataclass(frozen=True)
class Storm:
    executions: int
    answers: dict[str, int]
    slowest_refusal: float
    lasted: float
    others: float
    others_calm: float


def storms(server: Server, cluster: Cluster, rounds: int) -> list[Storm]:
    return [_storm(server, cluster) for _ in range(rounds)]


def summary(storms: Sequence[Storm]) -> dict[str, Any]:
    """``executions`` is the most there were of one key. ``in_flight``: how often a
    client was told to come again.
    """
    return {
        "executions": max(storm.executions for storm in storms),
        "others": median(storm.others for storm in storms),
        "others_calm": median(storm.others_calm for storm in storms),
        "ratio": median(storm.others / storm.others_calm for storm in storms),
        "slowest_refusal": median(storm.slowest_refusal for storm in storms),
        "lasted": median(storm.lasted for storm in storms),
        "unanswered": sum(storm.answers.get("none", 0) for storm in storms),
        "rounds": [asdict(storm) for storm in storms],
    }


def _storm(server: Server, cluster: Cluster) -> Storm:
    calm = drive(server, seconds=SECONDS, **OTHERS)  # type: ignore[arg-type]
    key = str(uuid.uuid4())
    with driving(server, seconds=SECONDS, **OTHERS) as others:  # type: ignore[arg-type]
        time.sleep(HEAD_START)
        begun = time.perf_counter()
        told = asyncio.run(_duplicates(server, key))
        lasted = time.perf_counter() - begun
        output, _ = others.communicate()
    return Storm(
        executions=int(
            cluster.ask(
                f"SELECT count(*) FROM effect WHERE key = '{key}'", server.database
            )[0]
        ),
        answers=dict(
            Counter(_label(answers[-1] if answers else None) for answers in told)
        ),
        slowest_refusal=max((answer.seconds for answer in _refusals(told)), default=0.0)
        * 1000,
        lasted=lasted,
        others=result(output).rate,
        others_calm=calm.rate,
    )


async def _duplicates(server: Server, key: str) -> list[list[Answer]]:
    clients = [
        Client(f"http://127.0.0.1:{server.port}{PATH}?work={WORK}")
        for _ in range(DUPLICATES)
    ]
    for client in clients:
        await client.connect()
    return await asyncio.gather(*(_insist(client, key) for client in clients))


async def _insist(client: Client, key: str) -> list[Answer]:
    """Return all the answers to a client that retries when it is told to."""
    answers: list[Answer] = []
    try:
        async with asyncio.timeout(PATIENCE):
            while not answers or (
                answers[-1].status in IN_FLIGHT and not answers[-1].replayed
            ):
                if answers:
                    await asyncio.sleep(
                        float(answers[-1].headers.get(b"retry-after", b"1"))
                    )
                    # the server does not keep idle connections for long
                    await client.connect()
                answers.append(await client.post(key, BODY))
    except (TimeoutError, OSError, EOFError):
        pass
    return answers


def _refusals(told: Sequence[Sequence[Answer]]) -> Iterator[Answer]:
    return (
        answer for answers in told for answer in answers if answer.status in IN_FLIGHT
    )


def _label(answer: Answer | None) -> str:
    if answer is None:
        return "none"
    return f"{answer.status} replayed" if answer.replayed else f"{answer.status}"
