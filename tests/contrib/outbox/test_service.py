"""The test project's service: a receipt for each charge by outbox, broker and consumer,
and webhooks that come in.
"""

from __future__ import annotations

import json
import uuid
from contextlib import suppress
from datetime import UTC, datetime

import pytest
from django.db import connection
from standardwebhooks import Webhook

from testproject import brokers
from testproject.demo import usable_broker
from testproject.hooks import SECRET
from tests.support.private_servers import free_port
from tests.support.waiting import eventually

pytestmark = [pytest.mark.server, pytest.mark.row_locks, pytest.mark.slow]
RABBITMQ = pytest.param("rabbitmq", marks=pytest.mark.rabbitmq)


@pytest.fixture(params=[RABBITMQ, pytest.param("nats", marks=pytest.mark.nats)])
def broker_url(request):
    return request.getfixturevalue(f"{request.param}_url")


@pytest.fixture
def topic(broker_url):
    """A topic of the test's own, of which nothing is left at the broker afterwards."""
    topic = f"charges-{uuid.uuid4().hex}"
    yield topic

    def is_forgotten():
        with suppress(Exception):  # any client's, as from a broker that is late
            brokers.forget(broker_url, topic)
            return True
        return False

    eventually(is_forgotten)


@pytest.fixture
def shop(broker_url, topic, start_server):
    return start_server(BROKER_URL=broker_url, CHARGE_TOPIC=topic)


def charge(shop, reference, **options):
    payload = {"amount": 5, "currency": "eur", "reference": reference}
    return shop.post("/api/charges/", payload, key=reference, **options)


def receipts(shop, reference):
    answer = shop.request("GET", "/api/ledger/", params={"reference": reference})
    return answer.raise_for_status().json()["receipts"]


def test_a_charge_has_one_receipt_if_it_committed_however_often_it_is_asked_for(
    shop, topic
):
    faults = [{"raise": True}, {"status": 500}]
    # elsewhere, no constraint is checked at COMMIT
    if connection.vendor == "postgresql":
        faults.append({"fail_commit": True})
    for _ in range(3):
        charge(shop, f"once-{topic}")
    for number, fault in enumerate(faults):
        charge(shop, f"lost-{number}-{topic}", simulate=fault)
    charge(shop, f"later-{topic}")
    for reference in ("once", "later"):
        eventually(lambda one=reference: receipts(shop, f"{one}-{topic}"), within=180)
    assert (shop.ledger(f"once-{topic}"), receipts(shop, f"once-{topic}")) == (1, 1)
    assert [
        receipts(shop, f"lost-{number}-{topic}") for number, _fault in enumerate(faults)
    ] == [0] * len(faults)


@pytest.mark.webhooks
def test_a_webhook_of_the_gateway_is_one_effect(server):
    reference = f"r-{uuid.uuid4()}"
    body = json.dumps(
        {"type": "deposit", "data": {"reference": reference, "amount": 7}}
    )
    id, now = f"msg_{uuid.uuid4().hex}", datetime.now(UTC)
    signed = {"webhook-id": id, "webhook-timestamp": str(int(now.timestamp()))}
    signed["webhook-signature"] = Webhook(SECRET).sign(id, now, body)

    def send(headers):
        return server.request(
            "POST", "/api/hooks/gateway/", token=None, content=body, headers=headers
        ).status_code

    assert send(signed | {"webhook-signature": "v1,AAAA"}) == 401
    assert [send(signed) for _time in range(3)] == [200] * 3
    assert (server.ledger(reference), receipts(server, reference)) == (1, 0)


@pytest.mark.nats
def test_the_demo_tells_a_broker_that_lets_it_in(nats_url, monkeypatch):
    monkeypatch.setenv("BROKER_URL", nats_url)
    assert eventually(usable_broker) == nats_url
    monkeypatch.setenv("BROKER_URL", f"nats://127.0.0.1:{free_port()}")
    assert usable_broker() == ""
