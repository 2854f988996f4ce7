"""docs/consumers/webhooks.md: its views verify what Stripe and GitHub sign, and handle
each event once.
"""

from __future__ import annotations

import hmac
import json
import time
from types import SimpleNamespace

import pytest
import stripe

from tests.support.pages import FENCE, text

pytestmark = [pytest.mark.webhooks, pytest.mark.django_db(transaction=True)]

PAGE = "consumers/webhooks.md"
EVENT = {
    "id": "evt_1",
    "object": "event",
    "type": "payment_intent.succeeded",
    "data": {"object": {"id": "pi_1"}},
}


class Model:
    """Stands for a model of the reader's. ``done``: what was done to it."""

    def __init__(self):
        self.done = []
        self.objects = self

    def create(self, **values):
        self.done.append(values)

    def filter(self, **found):
        return SimpleNamespace(update=lambda **values: self.done.append(found | values))


def shown(view, model):
    """The view on the page, and the model that it works on."""
    (block,) = [
        block
        for language, block in FENCE.findall(text(PAGE))
        if f"class {view}(" in block
    ]
    names = {model: Model()}
    exec(compile(block, PAGE, "exec"), names)
    return names[view].as_view(), names[model].done


def signed(secret, content):
    return hmac.new(secret, content, "sha256").hexdigest()


def test_an_event_of_stripe_is_handled_once(rf):
    view, done = shown("StripeHook", "Payment")
    body, now = json.dumps(EVENT), int(time.time())

    def deliver(secret):
        signature = f"t={now},v1={signed(secret.encode(), f'{now}.{body}'.encode())}"
        return view(
            rf.post(
                "/", body, "application/json", headers={"Stripe-Signature": signature}
            )
        ).status_code

    assert [deliver("whsec_other"), deliver("whsec_…"), deliver("whsec_…")] == [
        401,
        200,
        200,
    ]
    assert done == [{"intent": "pi_1", "paid": True}]
    signature = f"t={now},v1={signed('whsec_…'.encode(), f'{now}.{body}'.encode())}"
    assert stripe.Webhook.construct_event(body, signature, "whsec_…")["id"] == "evt_1"
    assert view(rf.post("/", body, "application/json")).status_code == 401


def test_an_event_of_github_is_handled_once(rf):
    view, done = shown("GitHubHook", "Build")
    body = json.dumps({"after": "8e03978e"}).encode()

    def deliver(secret, id):
        signature = f"sha256={signed(secret, body)}"
        headers = {
            "X-Hub-Signature-256": signature,
            "X-GitHub-Event": "push",
            "X-GitHub-Delivery": id,
        }
        return view(rf.post("/", body, "application/json", headers=headers)).status_code

    assert deliver(b"another secret", "1") == 401
    assert [
        deliver(b"the secret of the webhook", id) for id in ("1", "1", "2", "")
    ] == [200, 200, 200, 400]
    assert done == [{"commit": "8e03978e"}] * 2
    assert view(rf.post("/", body, "application/json")).status_code == 401
