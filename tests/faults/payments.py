"""Drive the payments service under faults: which entry point, which fault, and what
came of it.
"""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from pathlib import Path
from threading import Event
from typing import Any, LiteralString

import httpx
import psycopg

from tests.faults.trials import Call, Response
from tests.support.servers import Server
from tests.support.waiting import eventually

ATOMIC = (
    "/api/charges/",
    "/api/transfers/",
    "/orders/",
    "/legacy/refunds/",
    "/legacy/api/refunds/",
    "/v1/charges",
)
REPEATABLE = (
    "/api/payouts/",
    "/async/orders/",
)  # in lease mode; a run after a crash finds the effect, and answers by it
IN_STEPS = "/orders/in-five-steps/"
ONE_AT_MOST_ONCE = "/orders/in-five-steps/once/"
FIVE_STEPS = (IN_STEPS, ONE_AT_MOST_ONCE)
# the third one's response differs each time
LEASED = (*REPEATABLE, "/orders/leased/", *FIVE_STEPS)
BOOKED_AND_CLOSED = 11_000
ON_HOLD = b"idempotency_key_on_hold"
TIMEOUT = 8.0
# as a client should, so that its requests do not all fall into one outage
BACK_OFF = 0.4
BACKING_OFF = Event()  # never set

Choose = Callable[[random.Random, Call, bool], "Trouble"]


@dataclass(frozen=True)
class Trouble:
    """What one request asks for: faults at points, and what is simulated inside its
    operation.
    """

    faults: Sequence[Mapping[str, Any]] = ()
    simulate: Mapping[str, Any] = field(default_factory=dict)


NO_TROUBLE = Trouble()


@dataclass(frozen=True)
class Payments:
    """``send`` and ``effects`` for ``exercise``. ``choose``: picks the trouble of a
    request.
    """

    server: Server
    ledger: Ledger
    entry_points: Sequence[str]
    choose: Choose
    seed: int
    counts: Counter[str]

    def send(self, call: Call) -> Response:
        entry_point = self._entry_point(call.index)
        decide = random.Random(f"{self.seed}:{call.number}:{call.retry}")
        trouble = (
            NO_TROUBLE
            if call.draining
            else self.choose(decide, call, entry_point in LEASED)
        )
        try:
            response = self.server.request(
                "POST",
                entry_point,
                key=call.key,
                timeout=TIMEOUT,
                **_payment(entry_point, call),
                **_troubled(entry_point, trouble),
            )
        except httpx.TransportError:
            BACKING_OFF.wait(BACK_OFF)
            raise
        self.counts["response an hour off"] += _is_off(response)
        if response.status_code >= 500:
            BACKING_OFF.wait(BACK_OFF)
        if entry_point == ONE_AT_MOST_ONCE and ON_HOLD in response.content:
            self.counts["held"] += 1
            self._decide(call)
        effect = _effect(response, None if entry_point in LEASED else amount(call))
        return Response(response.status_code, response.content, effect=effect)

    def _entry_point(self, index: int) -> str:
        return self.entry_points[index % len(self.entry_points)]

    def _decide(self, call: Call) -> None:
        """Be the operator, whom other clients and faults may interrupt."""
        BACKING_OFF.wait(BACK_OFF)  # for a call that is under way
        asked = {"json": {"reference": call.key}, "timeout": TIMEOUT}
        with suppress(httpx.TransportError):
            response = self.server.request("POST", "/decide/", **asked)
            if response.status_code == 200:
                self.counts[f"decided: {response.json()['found']}"] += 1

    def effects(self, key: str) -> int | list[str]:
        """The names of the effects; but how many there are at the gateway, where that
        is not one.
        """
        entries = self.ledger.entries(key)
        if (
            any(kind == "payout" for _name, kind in entries)
            and (paid := self._paid(key)) != 1
        ):
            return paid
        in_steps = self._entry_point(int(key.rpartition("-")[2])) in FIVE_STEPS
        if in_steps and entries and self.steps_done(key) != {1}:
            return 2
        return [name for name, _kind in entries]

    def steps_done(self, key: str) -> set[int]:
        """How often each of the five steps was done."""
        amounts = self.ledger.amounts(key)
        booked = {each // BOOKED_AND_CLOSED for each in amounts}
        odd = {each % BOOKED_AND_CLOSED for each in amounts} - {
            amount(Call(key)),
            amount(Call(key, variant=1)),
        }
        return booked | odd | {len(amounts), self._paid(key), self._paid(f"{key}:fee")}

    def _paid(self, key: str) -> int:
        response = httpx.get(
            f"{self.server.gateway_url}/payouts",
            params={"reference": key},
            trust_env=False,
            timeout=60,
        )
        return int(response.raise_for_status().json()["effects"])


class Ledger:
    """The effects that exist, read over one connection for as long as it lasts."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.connection: psycopg.Connection | None = None

    def entries(self, reference: str) -> list[tuple[str, str]]:
        """The names of those with a reference, and their kinds."""
        query = (
            "SELECT id, CASE WHEN operation IS NULL THEN amount END, kind FROM"
            " testproject_ledgerentry WHERE reference = %s"
        )
        return [
            (named(id.hex, amount), kind)
            for id, amount, kind in self._rows(query, reference)
        ]

    def amounts(self, reference: str) -> list[int]:
        """Those of the effects that ``entries`` has found."""
        query = "SELECT amount FROM testproject_ledgerentry WHERE reference = %s"
        return [amount for (amount,) in self._rows(query, reference)]

    def _rows(self, query: LiteralString, reference: str) -> list[Any]:
        """Those that there are, even if a fault of a late request hits the database."""

        def ask() -> tuple[list[Any]] | None:
            with suppress(psycopg.OperationalError):
                if self.connection is None or self.connection.closed:
                    self.connection = psycopg.connect(self.url, autocommit=True)
                return (self.connection.execute(query, [reference]).fetchall(),)
            return None

        (found,) = eventually(ask, every=0.2)
        return found

    def close(self) -> None:
        if self.connection is not None:
            self.connection.close()


def named(id: str, amount: int | None) -> str:
    """An effect's name: by the amount it tells the body that it is of.

    Without it where a key names the effect. Such a one stands when the operation is
    refused after it, which releases its key, and whoever uses the key again finds it,
    with whatever body.
    """
    return id if amount is None else f"{id}:{amount}"


def amount(call: Call) -> int:
    return 5 + call.variant


def _payment(entry_point: str, call: Call) -> dict[str, Any]:
    payment = {"amount": amount(call), "currency": "eur"}
    if entry_point.startswith("/v1/"):
        return {"data": payment | {"description": call.key}, "token": None}
    return {"json": payment | {"reference": call.key}}


def _troubled(entry_point: str, trouble: Trouble) -> dict[str, Any]:
    headers = (
        {"Authorization": "Bearer sk_test_alice"}
        if entry_point.startswith("/v1/")
        else {}
    )
    if trouble.faults:
        headers["X-Fault"] = json.dumps(trouble.faults)
    return {"headers": headers, "simulate": dict(trouble.simulate)}


def _is_off(response: httpx.Response) -> bool:
    return (
        abs(parsedate_to_datetime(response.headers["Date"]).timestamp() - time.time())
        > 1800
    )


def _effect(response: httpx.Response, amount: int | None) -> str:
    if response.status_code >= 300:
        return ""
    return named(
        str(response.json()["id"]).removeprefix("ch_").replace("-", ""), amount
    )


# --- What bit -------------------------------------------------------------------------

# Errors of the database, as the server's processes saw them.
ERRORS = {
    "could not serialize access": "serialization failure",
    "deadlock detected": "deadlock",
    "canceling statement due to lock timeout": "lock_timeout",
    "canceling statement due to statement timeout": "statement_timeout",
    "terminating connection due to idle-in-transaction timeout": (
        "idle_in_transaction_session_timeout"
    ),
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
            errors.update(
                name for message, name in ERRORS.items() if message in line["error"]
            )
    return hits, errors
