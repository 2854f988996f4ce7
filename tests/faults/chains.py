"""Drive a whole chain under faults: a charge by HTTP, its event in the outbox, a
broker, and a receipt.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg

from testproject.brokers import stream_of
from tests.faults.deliveries import Fleet, harm
from tests.faults.payments import Payments
from tests.support.brokers import on_jetstream
from tests.support.private_servers import PrivateNATS
from tests.support.waiting import eventually

CHARGES = ("/api/charges/",)
TOPIC = "charge.created"
PAUSE = 1.0  # seconds between two kills, on average
KILLED_EVERY = 1.5  # the broker
SETTLED_WITHIN = 90.0  # a message whose consumer was killed is redelivered after 30 s
COMMANDS = {
    "relay": ("idempotency_outbox", "relay"),
    "consumer": ("idempotency_consume", "testproject.consumers.receipts"),
}


@dataclass
class Chain:
    """What follows the service: relays, consumers and a broker, all of which are
    killed.
    """

    fleet: Fleet
    broker: PrivateNATS
    database_url: str
    is_settled: threading.Event = field(default_factory=threading.Event)

    def harm(
        self, counts: Counter[str], decide: random.Random, over: threading.Event
    ) -> None:
        self.is_settled.clear()
        killed = harm(self.fleet, self.broker, KILLED_EVERY, PAUSE, decide, over)
        counts["broker killed"] += killed["broker"]
        counts["relay or consumer killed"] += killed["relay"] + killed["consumer"]

    def receipts(self, reference: str) -> int:
        """How many there are once every event was published and every message
        handled.
        """
        if not self.is_settled.is_set():
            with suppress(TimeoutError):
                eventually(self._is_through, within=SETTLED_WITHIN, every=0.5)
            self.is_settled.set()
        return int(
            self._ask(
                "SELECT count(*) FROM testproject_receipt WHERE reference = %s",
                reference,
            )
        )

    def _is_through(self) -> bool:
        self.fleet.revive()
        return (
            self._ask("SELECT count(*) FROM django_idempotency_outbox_event") == 0
            and self._unsettled() == 0
        )

    def _unsettled(self) -> int:
        """Messages that are not acknowledged."""

        async def count(stream: Any) -> int:
            info = await stream.consumer_info(stream_of(TOPIC), "receipts")
            return int((info.num_pending or 0) + (info.num_ack_pending or 0))

        return int(on_jetstream(self.broker.url, count))

    def _ask(self, query: str, *values: str) -> Any:
        with psycopg.connect(self.database_url, autocommit=True) as connection:
            row = connection.execute(query.encode(), values).fetchone()
        return row and row[0]


@contextmanager
def chain(database_url: str, directory: Path) -> Iterator[Chain]:
    broker = PrivateNATS(directory / "nats")
    broker.start()
    environment = {
        "DATABASE_URL": database_url,
        "DJANGO_SETTINGS_MODULE": "testproject.settings",
        "BROKER_URL": broker.url,
        "CHARGE_TOPIC": TOPIC,
    }
    fleet = Fleet(environment, directory / "chain.log", COMMANDS)
    fleet.start("relay 1", "relay 2", "consumer 1", "consumer 2")
    try:
        yield Chain(fleet, broker, database_url)
    finally:
        fleet.stop()
        broker.kill()


@dataclass(frozen=True)
class ToldCharges(Payments):
    """``Payments`` in which a charge has taken effect only if it has its receipt; with
    two, it did so twice.
    """

    chain: Chain

    def effects(self, key: str) -> int | list[str]:
        charges = super().effects(key)
        assert isinstance(charges, list)
        return told(charges, self.chain.receipts(key))


def told(charges: list[str], receipts: int) -> list[str]:
    """As many of the charges as there are receipts, again from the first where there
    are more.
    """
    return [
        charges[number % len(charges)] if charges else "no charge"
        for number in range(receipts)
    ]
