"""Clients that hang up at random moments, on an async view in lease mode under a real
uvicorn.
"""

from __future__ import annotations

import json
import random
import time
from collections import Counter, defaultdict
from uuid import uuid4

import pytest

from tests.support.servers import Server, running_uvicorn
from tests.support.threads import in_threads
from tests.support.waiting import eventually

pytestmark = [pytest.mark.server, pytest.mark.row_locks, pytest.mark.slow]

REQUESTS, CLIENTS = {"database": 256, "redis": 64}, 8
LONGEST = 0.06  # seconds until a client hangs up, at most
PATH = "/runs/async/"


@pytest.mark.parametrize(
    "store", ["database", pytest.param("redis", marks=pytest.mark.redis)]
)
def test_every_key_ends_right_whenever_its_client_hangs_up(
    server_database, tmp_path, redis_url, store
):
    requests = REQUESTS[store]
    runs = tmp_path / "runs.jsonl"
    # So long a lease that a claim with nobody behind it would not be overlooked.
    environment = {
        "DJANGO_SETTINGS_MODULE": "tests.faults.settings",
        "RUNS_LOG": str(runs),
        "LEASE": "120",
    }
    environment |= {"STORE": store, "REDIS_URL": redis_url, "REDIS_TIMEOUT": "60"}
    with running_uvicorn(server_database, tmp_path, **environment) as server:
        server.ledger("-")  # it serves
        answers = dict(
            pair
            for pairs in in_threads(
                CLIENTS, lambda client: _use(server, client, requests // CLIENTS)
            )
            for pair in pairs
        )
    histories = defaultdict(list)
    for line in map(json.loads, runs.read_text().splitlines()):
        histories[line["key"]].append(line)
    assert len(answers) == requests
    for key, answer in answers.items():
        *cancelled, begin, end = histories[key]
        assert (begin["at"], end["at"], end["run"]) == ("begin", "end", answer)
        for begun, ended in zip(cancelled[::2], cancelled[1::2], strict=True):
            assert (begun["at"], ended["at"], ended["run"]) == (
                "begin",
                "cancelled",
                begun["run"],
            ), histories[key]
    ends = Counter(line["at"] for history in histories.values() for line in history)
    assert ends["cancelled"] > 0
    assert ends["end"] == requests


def _use(server: Server, client: int, requests: int) -> list[tuple[str, str]]:
    """Each key with the run that its last caller, who stays, is told of."""
    decide = random.Random(client)
    return [
        # A busy machine hardly begins a run in LONGEST; the first of each client take
        # long enough to be cut off.
        _hang_up_and_ask(
            server, str(uuid4()), *((1.0, 0.9) if number < 2 else _at_random(decide))
        )
        for number in range(requests)
    ]


def _at_random(decide: random.Random) -> tuple[float, float]:
    return decide.uniform(0, LONGEST / 3), decide.uniform(0, LONGEST)


def _hang_up_and_ask(
    server: Server, key: str, seconds: float, after: float
) -> tuple[str, str]:
    body = {"seconds": seconds}
    with server.sent(
        PATH, json.dumps(body).encode(), f'Idempotency-Key: "{key}"'.encode()
    ):
        time.sleep(after)

    def asked() -> str | None:
        answer = server.request("POST", PATH, key=key, token=None, json=body)
        assert answer.status_code in (201, 409), answer.content
        return answer.json()["id"] if answer.status_code == 201 else None

    return key, eventually(asked)
