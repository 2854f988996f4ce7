"""The transports for httpx and the adapter for requests, through a relay that loses
what the real server answers.
"""

from __future__ import annotations

import asyncio
import io

import httpx
import pytest
import requests

from django_idempotency.contrib.client import Retries
from django_idempotency.contrib.client.httpx import (
    AsyncIdempotentTransport,
    IdempotentTransport,
)
from django_idempotency.contrib.client.requests import IdempotentAdapter
from tests.support.callers import payment

pytestmark = [pytest.mark.server, pytest.mark.http_clients]

HEADERS = {"Authorization": "Token alice-token"}
SOON = Retries(first_wait=0.01)
UNTIL_IT_ENDS = Retries(first_wait=0.01, attempts=200)
TIMEOUT = 120  # seconds that a busy server may take
LIMITS = httpx.Limits(max_keepalive_connections=0)


def by_httpx(method, url, retries=SOON, **sent):
    transport = IdempotentTransport(httpx.HTTPTransport(limits=LIMITS), retries)
    with httpx.Client(transport=transport, trust_env=False, timeout=TIMEOUT) as client:
        return client.request(method, url, **sent)


def by_async_httpx(method, url, retries=SOON, content=None, **sent):
    async def chunks():
        for chunk in content:
            yield chunk

    async def main():
        transport = AsyncIdempotentTransport(
            httpx.AsyncHTTPTransport(limits=LIMITS), retries
        )
        async with httpx.AsyncClient(
            transport=transport, trust_env=False, timeout=TIMEOUT
        ) as client:
            return await client.request(
                method, url, content=content and chunks(), **sent
            )

    return asyncio.run(main())


def by_requests(method, url, retries=SOON, content=None, **sent):
    with requests.Session() as session:
        session.trust_env = False
        for scheme in ("http://", "https://"):
            session.mount(scheme, IdempotentAdapter(retries))
        return session.request(
            method,
            url,
            timeout=TIMEOUT,
            **({} if content is None else {"data": content}),
            **sent,
        )


@pytest.fixture(params=[by_httpx, by_async_httpx, by_requests])
def request_by(request):
    return request.param


@pytest.fixture
def charge(request_by, relay, reference):
    """Charge under ``reference``, with a key of the client's making."""

    def send(retries=SOON, headers=(), **sent):
        body = {"json": payment(reference)}
        url = f"{relay.url}/api/charges/"
        return request_by(
            "POST", url, retries, headers={**HEADERS, **dict(headers)}, **(sent or body)
        )

    return send


NO_RESPONSE = (httpx.TransportError, requests.RequestException)


def test_a_lost_response_is_fetched_with_the_same_key(charge, relay, server, reference):
    relay.plan = ["lose", "cut"]
    response = charge()
    assert (response.status_code, response.headers["Idempotent-Replayed"]) == (
        201,
        "true",
    )
    assert response.json()["reference"] == reference
    assert (len(relay.keys), len(set(relay.keys)), server.ledger(reference)) == (
        3,
        1,
        1,
    )
    assert response.elapsed


def test_a_call_that_is_in_flight_is_waited_for(charge, relay, server, met_in_flight):
    reference, response = met_in_flight(
        lambda reference, headers: charge(
            UNTIL_IT_ENDS, headers, json=payment(reference)
        )
    )
    assert (response.status_code, server.ledger(reference)) == (201, 1)
    assert 409 in relay.statuses
    assert len(set(relay.keys)) == 1


def test_a_refusal_that_stands_for_every_retry_is_returned(charge, relay, reference):
    key = {"Idempotency-Key": f'"{reference}"'}
    charge(headers=key)
    refused = charge(headers=key, json=payment(reference, amount=9))
    assert (refused.status_code, relay.keys) == (422, list(key.values()) * 2)
    assert refused.headers["X-Should-Retry"] == "false"


def test_the_caller_gets_the_last_error_or_response_after_the_last_attempt(
    charge, relay
):
    relay.plan = [{"status": 503}] * 3 + ["lose"] * 3
    assert charge(Retries(attempts=3, first_wait=0.01)).status_code == 503
    with pytest.raises(NO_RESPONSE):
        charge(Retries(attempts=3, first_wait=0.01))
    assert (len(relay.keys), len(set(relay.keys))) == (6, 2)


def test_a_body_that_can_be_read_once_is_sent_again(charge, relay, server, reference):
    relay.plan = ["lose"]
    body = f'{{"amount": 5, "currency": "EUR", "reference": "{reference}"}}'.encode()
    response = charge(
        headers={"Content-Type": "application/json"}, content=iter([body[:9], body[9:]])
    )
    assert (response.status_code, server.ledger(reference)) == (201, 1)
    assert relay.bodies == [body, body]


@pytest.mark.parametrize(
    "made",
    [
        lambda: bytearray(b"abc"),
        lambda: memoryview(b"abc"),
        lambda: iter(["a", "bc"]),
        lambda: io.BytesIO(b"abc"),
        lambda: io.StringIO("abc"),
    ],
    ids=["bytearray", "memoryview", "iterator of str", "file", "text file"],
)
def test_every_kind_of_body_for_requests_is_sent_again_and_redirected(relay, made):
    elsewhere = {"status": 307, "headers": {"Location": f"{relay.url}/elsewhere"}}
    relay.plan = [{"status": 503}, elsewhere, {"status": 200}]
    assert by_requests("POST", relay.url, content=made()).status_code == 200
    assert relay.bodies == [b"abc"] * 3
    assert len(set(relay.keys)) == 1
