"""A client that Stainless generated, OpenAI's, against the real server: what it retries
is what we say.
"""

from __future__ import annotations

import json

import openai
import pytest
from django.urls import path
from django.views.decorators.csrf import csrf_exempt
from pytest_django.live_server_helper import LiveServer

from django_idempotency.http.placement import idempotent
from django_idempotency.stores import store_for
from django_idempotency.values.policy import Policy
from tests.support.callers import claim, payment
from tests.support.relay import running_relay

pytestmark = pytest.mark.openai


@pytest.fixture
def post():
    def send(url, path, *, key, body, token="alice-token", **headers):
        with openai.OpenAI(base_url=url, api_key="none", max_retries=50) as client:
            own = {
                "Authorization": f"Token {token}",
                "Idempotency-Key": f'"{key}"',
                **headers,
            }
            return client.post(
                path, cast_to=object, body=body, options={"headers": own}
            )

    return send


@pytest.mark.server
def test_a_request_in_flight_is_retried_until_it_is_done(
    post, relay, server, met_in_flight
):
    def charge(reference, slow):
        body = payment(reference)
        return post(relay.url, "/api/charges/", key=reference, body=body, **slow)

    reference, created = met_in_flight(charge)
    assert (created["reference"], server.ledger(reference)) == (reference, 1)
    assert relay.statuses[0] == 409
    assert relay.statuses[-1] == 201


def on_hold(request):
    raise AssertionError("it must not run")


def test_a_409_on_hold_is_not_retried(post, transactional_db, settings):
    """Without the header ``X-Should-Retry`` it would be, as any other 409."""
    settings.MIDDLEWARE = []
    settings.ROOT_URLCONF = (
        path("pay/", csrf_exempt(idempotent(scope="public")(on_hold))),
    )
    policy = Policy(scope="public")
    body = {"amount": 5}
    store_for(policy).fail(
        claim(body=json.dumps(body).encode(), policy=policy), "crashed", on_hold=True
    )
    server = LiveServer("localhost")
    try:
        with (
            running_relay(server.url) as relay,
            pytest.raises(openai.ConflictError) as refused,
        ):
            post(relay.url, "/pay/", key="k", body=body)
    finally:
        server.stop()
    assert refused.value.body["code"] == "idempotency_key_on_hold"
    assert len(relay.keys) == 1
