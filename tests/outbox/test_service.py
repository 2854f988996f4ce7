"""The test project's service with a broker: HTTP, outbox, broker and consumer write one receipt for each charge."""

from __future__ import annotations

import os
import signal
import uuid

import psutil
import pytest

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


def test_a_charge_has_one_receipt_however_often_it_is_asked_for(shop, topic):
    for _ in range(3):
        charge(shop, f"once-{topic}")
    charge(shop, f"later-{topic}")
    eventually(lambda: receipts(shop, f"later-{topic}"), within=60)
    eventually(lambda: receipts(shop, f"once-{topic}"), within=60)
    assert receipts(shop, f"once-{topic}") == 1


@pytest.mark.parametrize("fault", [{"raise": True}, {"fail_commit": True}, {"status": 500}])
@pytest.mark.postgresql
def test_nothing_is_told_of_a_charge_that_did_not_commit(shop, topic, fault):
    charge(shop, f"lost-{topic}", simulate=fault)
    charge(shop, f"kept-{topic}")
    eventually(lambda: receipts(shop, f"kept-{topic}"), within=60)
    assert receipts(shop, f"lost-{topic}") == 0


def test_a_charge_is_told_of_after_its_relay_was_killed(shop, topic, rabbitmq_url, start_server):
    relay = eventually(lambda: next(relays_of(os.getpid()), None))
    relay.send_signal(signal.SIGKILL)
    relay.wait(10)
    charge(shop, f"meanwhile-{topic}")
    assert receipts(shop, f"meanwhile-{topic}") == 0
    start_server(BROKER_URL=rabbitmq_url, CHARGE_TOPIC=topic)
    eventually(lambda: receipts(shop, f"meanwhile-{topic}"), within=90)
    assert receipts(shop, f"meanwhile-{topic}") == 1


def relays_of(pid):
    return (child for child in psutil.Process(pid).children() if "idempotency_relay" in child.cmdline())
