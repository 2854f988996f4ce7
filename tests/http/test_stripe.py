"""The main job on real input: Stripe's own client, which makes keys and retries by
itself, pays once.
"""

from __future__ import annotations

import json
import uuid

import pytest
import stripe

pytestmark = pytest.mark.server


class CountingClient(stripe.RequestsClient):
    """Stripe's HTTP client, which also keeps the idempotency key of each attempt."""

    def __init__(self, **options):
        super().__init__(**options)
        self.keys = []

    def request(self, method, url, headers, post_data=None, **options):
        self.keys.append(headers.get("Idempotency-Key"))
        return super().request(method, url, headers, post_data, **options)


@pytest.fixture
def http():
    return CountingClient(timeout=1)


@pytest.fixture
def alice(server, http):
    return stripe.StripeClient(
        "sk_test_alice",
        base_addresses={"api": server.url},
        http_client=http,
        max_network_retries=10,
    )


def charge(reference, amount=500):
    return {"amount": amount, "currency": "eur", "description": reference}


def simulated(**faults):
    return {"headers": {"X-Simulate": json.dumps(faults)}}


def test_a_charge_is_created_under_a_key_that_the_client_made(alice, http, server):
    reference = str(uuid.uuid4())
    created = alice.v1.charges.create(charge(reference))
    assert (created.object, created.amount) == ("charge", 500)
    assert server.ledger(reference) == 1
    (key,) = set(http.keys)  # a slow server may make the client try again
    assert key


def test_a_client_that_times_out_and_retries_pays_once(alice, http, server):
    reference = str(uuid.uuid4())
    created = alice.v1.charges.create(charge(reference), simulated(delay_ms=1700))
    assert created.id.startswith("ch_")
    assert server.ledger(reference) == 1
    assert len(http.keys) > 1, "it had to try again"
    assert len(set(http.keys)) == 1
    again = alice.v1.charges.create(
        charge(reference), {"idempotency_key": http.keys[0]}
    )
    assert again.id == created.id
    assert server.ledger(reference) == 1


def test_a_reused_key_is_an_idempotency_error_for_stripe(alice, server):
    reference = str(uuid.uuid4())
    alice.v1.charges.create(charge(reference), {"idempotency_key": reference})
    with pytest.raises(stripe.IdempotencyError) as refused:
        alice.v1.charges.create(
            charge(reference, amount=900), {"idempotency_key": reference}
        )
    assert refused.value.http_status == 400
    assert refused.value.error.type == "idempotency_error"
    assert server.ledger(reference) == 1
