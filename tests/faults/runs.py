"""Drive lease mode through outages, with effects outside the database, which only the
lease keeps single.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import httpx

from tests.faults.payments import BACK_OFF, BACKING_OFF
from tests.faults.trials import Call, Response, Violation
from tests.support.servers import Server

TIMEOUT = 15.0
COMPARED = ("content-type", "x-run")
STATED = {503: "idempotency_store_unavailable"}
REFUSALS = {409: "idempotency_key_in_use", 422: "idempotency_key_reused"}


@dataclass
class Runs:
    """``send`` and ``effects`` for ``exercise``. An effect is a run that began.

    The law: while no process that runs it is killed or stopped, a key is run once,
    whatever happens to the store. ``unstated``: responses that are not a success and
    are not among those that the documentation lists.
    """

    server: Server
    log: Path
    seed: int
    unstated: list[tuple[str, str]] = field(default_factory=list)

    def send(self, call: Call) -> Response:
        decide = random.Random(f"{self.seed}:{call.index}")
        seconds = decide.choices((0.005, 0.3, 1.5, 4), (80, 12, 6, 2))[0]
        body = {"amount": 5 + call.variant, "seconds": seconds}
        try:
            response = self.server.request(
                "POST", "/runs/", key=call.key, token=None, json=body, timeout=TIMEOUT
            )
        except httpx.TransportError:
            BACKING_OFF.wait(BACK_OFF)
            raise
        self._judge(call, response)
        if response.status_code >= 500:
            BACKING_OFF.wait(BACK_OFF)
        told = [response.headers.get(name, "") for name in COMPARED]
        return Response(response.status_code, response.content + repr(told).encode())

    def _judge(self, call: Call, response: httpx.Response) -> None:
        if response.status_code < 400:
            return
        stated = (STATED | REFUSALS).get(response.status_code)
        code = _problem(response).get("code")
        if stated is None or code != stated:
            self.unstated.append(
                (call.key, f"{response.status_code} {response.content[:200]!r}")
            )

    def effects(self, key: str) -> int:
        return begun(self.log, self.log.stat().st_size)[key]

    @property
    def violations(self) -> list[Violation]:
        return [
            Violation(key, f"was answered otherwise than is stated: {told}", ())
            for key, told in self.unstated
        ]


@cache
def begun(log: Path, _size: int) -> Counter[str]:
    """How many runs of each key began, by the log as it stands."""
    lines = map(json.loads, log.read_text().splitlines())
    return Counter(line["key"] for line in lines if line["at"] == "begin")


def _problem(response: httpx.Response) -> Any:
    try:
        return response.json()
    except ValueError:
        return {}
