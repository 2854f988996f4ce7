"""docs/stripe.md: its view, with Stripe's own client, charges once through crashes and
failures.
"""

from __future__ import annotations

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from types import SimpleNamespace
from urllib.parse import parse_qs

import pytest
import stripe
from django.contrib.auth import get_user_model
from django.http import JsonResponse

from tests.support.pages import FENCE, text
from tests.support.views import code

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.postgresql]

SETTINGS, MODEL, VIEW, URLS, WITHOUT_KEYS = (
    block
    for language, block in FENCE.findall(text("stripe.md"))
    if language == "python"
)


class Stripe(BaseHTTPRequestHandler):
    """Makes one payment for each key, as Stripe does. What was asked is in
    ``server.asked``.
    """

    def do_POST(self):
        sent = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())
        key = self.headers["Idempotency-Key"]
        self.server.asked.append(key)
        id = self.server.payments.setdefault(key, f"pi_{len(self.server.payments) + 1}")
        body = json.dumps(
            {"id": id, "object": "payment_intent", "amount": int(sent["amount"][0])}
        ).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


@pytest.fixture
def provider(monkeypatch):
    with ThreadingHTTPServer(("127.0.0.1", 0), Stripe) as server:
        server.asked, server.payments = [], {}
        Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("STRIPE_SECRET_KEY", "sk_test_alice")
        monkeypatch.setattr(stripe, "api_key", None)  # the page sets it
        monkeypatch.setattr(
            stripe, "api_base", f"http://127.0.0.1:{server.server_port}"
        )
        monkeypatch.setattr(stripe, "max_network_retries", 0)
        yield server
        server.shutdown()


@pytest.fixture
def saved():
    return []


@pytest.fixture
def pay(rf, django_user_model, provider, saved, monkeypatch):
    """Send a request to the view on the page. ``crash``: it is interrupted after Stripe
    has charged.
    """
    user = django_user_model.objects.create_user("alice")
    payments = SimpleNamespace()
    monkeypatch.setitem(sys.modules, "orders", SimpleNamespace())
    monkeypatch.setitem(
        sys.modules,
        "orders.models",
        SimpleNamespace(Payment=SimpleNamespace(objects=payments)),
    )
    payments.create = lambda **_named: SimpleNamespace(pk=1)
    names = {}
    exec(compile(VIEW, "stripe.md", "exec"), names)

    charge = names["charge"]

    def send(crash=""):
        def update(intent):
            if crash == "behind the call":
                raise SystemExit
            saved.append(intent)

        def charge_and_crash(*args):
            done = charge(*args)
            if crash == "in the call":
                raise SystemExit
            return done

        names["charge"] = charge_and_crash
        payments.filter = lambda pk: SimpleNamespace(update=update)
        request = rf.post(
            "/",
            {"amount": "500", "payment_method": "pm_card"},
            headers={"Idempotency-Key": "order-1"},
        )
        request.user = user
        return names["pay"](request)

    return send


def test_a_retry_gets_the_response_and_stripe_is_not_called(pay, provider, saved):
    first, again = pay(), pay()
    assert (first.status_code, again.headers["Idempotent-Replayed"]) == (201, "true")
    assert again.content == first.content
    assert (len(provider.asked), len(saved)) == (1, 1)


@pytest.mark.parametrize(
    ("crash", "asked"), [("in the call", 2), ("behind the call", 1)]
)
def test_after_a_crash_nothing_is_charged_twice(pay, provider, saved, crash, asked):
    with pytest.raises(SystemExit):
        pay(crash=crash)
    assert pay().status_code == 201
    assert (len(provider.payments), len(saved)) == (1, 1)
    assert len(provider.asked) == asked
    assert len(set(provider.asked)) == 1


def test_a_provider_without_keys_is_called_at_most_once(rf):
    names = {"JsonResponse": JsonResponse}
    exec(compile(WITHOUT_KEYS, "stripe.md", "exec"), names)
    sent = []

    def send_to_bank(amount):
        sent.append(amount)
        raise TimeoutError

    names["send_to_bank"] = send_to_bank
    request = rf.post("/", {"amount": "5"}, headers={"Idempotency-Key": "order-1"})
    request.user = get_user_model().objects.create_user("alice")
    for _retry in range(2):
        assert code(names["pay_out"](request)) == "idempotency_key_on_hold"
    assert sent == ["5"]
