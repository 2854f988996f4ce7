"""The test project, from a charge to its receipt, and the webhooks that it takes."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from uuid import uuid4

import httpx
import pytest
from standardwebhooks import Webhook

from testproject import brokers
from testproject.demo import usable_broker
from testproject.hooks import SECRET
from tests.support.private_servers import free_port
from tests.support.waiting import eventually

pytestmark = [pytest.mark.server, pytest.mark.webhooks, pytest.mark.slow]
ALICE = {"Authorization": "Token alice-token"}


def ledger(server, reference):
    answer = httpx.get(f"{server.url}/api/ledger/", params={"reference": reference}, headers=ALICE).json()
    return answer["effects"], answer["receipts"]


@pytest.fixture(
    params=[
        pytest.param("rabbitmq", marks=pytest.mark.rabbitmq),
        pytest.param("nats", marks=pytest.mark.nats),
    ]
)
def channel(request):
    """A broker's URL, and a topic of the test's own on it, of which nothing is left afterwards."""
    url, topic = request.getfixturevalue(f"{request.param}_url"), f"test.{uuid4().hex}"
    yield url, topic
    brokers.forget(url, topic)


def test_a_charge_has_one_receipt_however_often_it_is_sent(channel, start_server):
    url, topic = channel
    server = start_server(BROKER_URL=url, CHARGE_TOPIC=topic)
    reference = f"r-{uuid4()}"
    charge = {"amount": 5, "currency": "eur", "reference": reference}
    headers = ALICE | {"Idempotency-Key": str(uuid4())}
    for _time in range(3):
        assert httpx.post(f"{server.url}/api/charges/", json=charge, headers=headers, timeout=30).status_code == 201
    eventually(lambda: ledger(server, reference) == (1, 1), within=60)


def test_a_webhook_of_the_gateway_is_one_effect(server):
    reference = f"r-{uuid4()}"
    body = json.dumps({"type": "deposit", "data": {"reference": reference, "amount": 7}})
    id, now = f"msg_{uuid4().hex}", datetime.now(UTC)
    headers = {
        "webhook-id": id,
        "webhook-timestamp": str(int(now.timestamp())),
        "webhook-signature": Webhook(SECRET).sign(id, now, body),
    }
    url = f"{server.url}/api/hooks/gateway/"
    assert httpx.post(url, content=body, headers=headers | {"webhook-signature": "v1,AAAA"}).status_code == 401
    assert [httpx.post(url, content=body, headers=headers).status_code for _time in range(3)] == [200] * 3
    assert ledger(server, reference) == (1, 0)


@pytest.mark.nats
def test_the_demo_tells_a_broker_that_lets_it_in(nats_url, monkeypatch):
    monkeypatch.setenv("BROKER_URL", nats_url)
    assert usable_broker() == nats_url
    monkeypatch.setenv("BROKER_URL", f"nats://127.0.0.1:{free_port()}")
    assert usable_broker() == ""
