"""A way to the server that loses responses, and requests that meet one in flight."""

from __future__ import annotations

import json

import pytest


@pytest.fixture
def relay(server):
    """A way to the test project's server that loses what it is told to lose."""
    from tests.support.relay import running_relay

    with running_relay(server.url) as running:
        yield running


@pytest.fixture
def met_in_flight(relay, reference):
    """``met_in_flight(send)``: the reference and the answer of ``send(reference,
    headers)``, which leaves its first request in flight.

    A busy machine's retry may come when that has ended; the next one takes longer.
    """

    def meet(send):
        for delay in (1500, 6000, 24_000):
            relay.plan, relay.keys, relay.statuses = ["leave"], [], []
            headers = {"X-Simulate": json.dumps({"delay_ms": delay})}
            answer = send(f"{reference}-{delay}", headers)
            if 409 in relay.statuses:
                break
        return f"{reference}-{delay}", answer

    return meet
