"""The payouts of the test project, against its gateway in a process of its own."""

from __future__ import annotations

import httpx
import pytest

from tests.support.servers import running_server
from tests.support.views import code
from tests.support.waiting import eventually

pytestmark = [pytest.mark.server, pytest.mark.postgresql, pytest.mark.slow]
FAULTS = [
    *({"kill": where} for where in ("before", "call", "bank", "after")),
    *({"gateway": fault} for fault in ("slow", "500", "cut")),
    {"gateway": "nokeys"},
    *({"gateway": "nokeys", "kill": where} for where in ("bank", "after")),
]
FAILING = ({"gateway": "500"}, {"gateway": "cut"})


@pytest.fixture(scope="module")
def server(server_database, tmp_path_factory):
    directory = tmp_path_factory.mktemp("server")
    with running_server(server_database, directory, LEASE="2") as running:
        yield running


def pay_out(server, reference, **faults):
    """The response; ``None`` if the worker was killed."""
    payout = {"amount": 5, "currency": "EUR", "reference": reference}
    try:
        return server.post("/api/payouts/", payout, key=reference, **faults)
    except httpx.TransportError:
        return None


def paid(server, reference):
    found = server.request("GET", "/api/gateway/", params={"reference": reference})
    return found.json()["payments"]


def finished(server, reference):
    """The response of a retry that is not told to come back later."""

    def retried():
        response = pay_out(server, reference)
        is_final = response and code(response) != "idempotency_key_in_use"
        return response if is_final else None

    return eventually(retried, within=120)


@pytest.mark.parametrize("simulate", FAULTS, ids=str)
def test_a_payout_is_paid_and_booked_once(server, reference, simulate):
    first = pay_out(server, reference, simulate=simulate)
    answer = finished(server, reference)
    expected = None if "kill" in simulate else 502 if simulate in FAILING else 201
    assert (first and first.status_code) == expected
    assert (answer.status_code, paid(server, reference)) == (201, 1)
    assert server.ledger(reference) == 1
    assert pay_out(server, reference).content == answer.content


def test_a_payout_without_keys_that_was_interrupted_is_held(server, reference):
    simulate = {"gateway": "nokeys", "kill": "call"}
    assert pay_out(server, reference, simulate=simulate) is None
    assert code(finished(server, reference)) == "idempotency_key_on_hold"
    assert (paid(server, reference), server.ledger(reference)) == (1, 1)
