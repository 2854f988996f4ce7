"""How the payments service is driven under faults: which door, which fault, and what came of it."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psycopg

from django_idempotency.testing import Answer, Call
from tests.servers import Server

ATOMIC = (
    "/api/charges/",
    "/api/transfers/",
    "/orders/",
    "/legacy/refunds/",
    "/legacy/api/refunds/",
    "/v1/charges",
)
LEASED = ("/api/payouts/", "/async/orders/", "/orders/leased/")
TIMEOUT = 8.0

Fault = Mapping[str, Any]
Choose = Callable[[random.Random, bool], Fault | None]


@dataclass(frozen=True)
class Payments:
    """``send`` and ``effects`` of ``exercise``. ``choose`` picks a request's fault; true if its door is in lease mode."""

    server: Server
    effects_url: str
    doors: Sequence[str]
    choose: Choose
    seed: int
    armed: Counter[str] = field(default_factory=Counter)

    def send(self, call: Call) -> Answer:
        door = self.doors[call.index % len(self.doors)]
        decide = random.Random(f"{self.seed}:{call.number}:{call.retry}")
        fault = None if call.draining else self.choose(decide, door in LEASED)
        answer = self.server.request(
            "POST", door, key=call.key, timeout=TIMEOUT, **_payment(door, call), **_faulty(door, fault)
        )
        return Answer(answer.status_code, answer.content, effect=_effect(answer))

    def effects(self, key: str) -> int | list[str]:
        """The names of the effects; but how many there are at the gateway, where that is not one."""
        with psycopg.connect(self.effects_url, autocommit=True) as connection:
            rows = connection.execute("SELECT id, kind FROM testproject_ledgerentry WHERE reference = %s", [key])
            entries = rows.fetchall()
        if any(kind == "payout" for _id, kind in entries) and (paid := self._paid(key)) != 1:
            return paid
        return [entry.hex for entry, _kind in entries]

    def _paid(self, key: str) -> int:
        answer = httpx.get(f"{self.server.gateway_url}/payouts", params={"reference": key}, trust_env=False)
        return int(answer.raise_for_status().json()["effects"])


def _payment(door: str, call: Call) -> dict[str, Any]:
    payment = {"amount": 5 + call.variant, "currency": "eur"}
    if door.startswith("/v1/"):
        return {"data": payment | {"description": call.key}, "token": None}
    return {"json": payment | {"reference": call.key}}


def _faulty(door: str, fault: Fault | None) -> dict[str, Any]:
    headers = {"Authorization": "Bearer sk_test_alice"} if door.startswith("/v1/") else {}
    if fault is None:
        return {"headers": headers}
    armed = {name: value for name, value in fault.items() if name != "delay_ms"}
    if armed:
        headers["X-Fault"] = json.dumps(armed)
    simulate = {"delay_ms": fault["delay_ms"]} if "delay_ms" in fault else None
    return {"headers": headers, "simulate": simulate}


def _effect(answer: httpx.Response) -> str:
    if answer.status_code >= 300:
        return ""
    return str(answer.json()["id"]).removeprefix("ch_").replace("-", "")


# --- What bit --------------------------------------------------------------------------------------------------------

# What the database says, as the server's processes heard it.
ERRORS = {
    "could not serialize access": "serialization failure",
    "deadlock detected": "deadlock",
    "canceling statement due to lock timeout": "lock_timeout",
    "canceling statement due to statement timeout": "statement_timeout",
    "terminating connection due to idle-in-transaction timeout": "idle_in_transaction_session_timeout",
    "No space left on device": "disk full",
    "terminating connection due to administrator command": "connection terminated",
}


def bites(log: Path) -> tuple[Counter[tuple[str, str]], Counter[str]]:
    """What was hit: by what and where; and the errors of the database."""
    hits: Counter[tuple[str, str]] = Counter()
    errors: Counter[str] = Counter()
    for line in map(json.loads, log.read_text().splitlines() if log.exists() else ()):
        if "do" in line:
            hits[line["do"], line["at"]] += 1
        else:
            errors.update(name for message, name in ERRORS.items() if message in line["error"])
    return hits, errors
