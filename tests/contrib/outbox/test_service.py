"""The test project's service with a broker: HTTP, outbox, broker and consumer write one receipt for each charge."""

from __future__ import annotations

import os
import signal
import uuid

import psutil
import pytest
from django.db import connection

from tests.support.waiting import eventually

pytestmark = [pytest.mark.server, pytest.mark.rabbitmq, pytest.mark.row_locks, pytest.mark.slow]


@pytest.fixture
def topic():
    return f"charges-{uuid.uuid4().hex}"


@pytest.fixture
def shop(start_server, rabbitmq_url, topic):
    return start_server(BROKER_URL=rabbitmq_url, CHARGE_TOPIC=topic)


def charge(shop, reference, **options):
    payload = {"amount": 5, "currency": "eur", "reference": reference}
    return shop.post("/api/charges/", payload, key=reference, **options)


def receipts(shop, reference):
    answer = shop.request("GET", "/api/ledger/", params={"reference": reference})
    return answer.raise_for_status().json()["receipts"]


def test_a_charge_has_one_receipt_if_it_committed_however_often_it_is_asked_for(shop, topic):
    faults = [{"raise": True}, {"status": 500}]
    if connection.vendor == "postgresql":  # elsewhere, no constraint is checked at COMMIT
        faults.append({"fail_commit": True})
    for _ in range(3):
        charge(shop, f"once-{topic}")
    for number, fault in enumerate(faults):
        charge(shop, f"lost-{number}-{topic}", simulate=fault)
    charge(shop, f"later-{topic}")
    for reference in ("once", "later"):
        eventually(lambda one=reference: receipts(shop, f"{one}-{topic}"), within=60)
    assert receipts(shop, f"once-{topic}") == 1
    assert [receipts(shop, f"lost-{number}-{topic}") for number, _fault in enumerate(faults)] == [0] * len(faults)


def test_a_charge_has_its_receipt_after_the_relay_was_killed(shop, topic, rabbitmq_url, start_server):
    relay = eventually(lambda: next(relays_of(os.getpid()), None))
    relay.send_signal(signal.SIGKILL)
    relay.wait(10)
    charge(shop, f"meanwhile-{topic}")
    assert receipts(shop, f"meanwhile-{topic}") == 0
    start_server(BROKER_URL=rabbitmq_url, CHARGE_TOPIC=topic)
    eventually(lambda: receipts(shop, f"meanwhile-{topic}"), within=90)
    assert receipts(shop, f"meanwhile-{topic}") == 1


def relays_of(pid):
    relay = {"idempotency_outbox", "relay"}
    return (child for child in psutil.Process(pid).children() if relay <= set(child.cmdline()))
