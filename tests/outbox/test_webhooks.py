"""Webhooks out, against a real HTTP server."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from django.core.exceptions import ImproperlyConfigured

from django_idempotency.outbox.publishers.base import Confirmed, NotSent, Refused
from django_idempotency.outbox.publishers.webhooks import Endpoint, WebhookPublisher, signature
from tests.outbox.events import TRACE, event, sent
from tests.support.pgbouncer import free_port

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
OTHER = "whsec_d2ViaG9vay1zZWNyZXQtZm9yLXRlc3Rz"


class Site:
    """Keeps what was posted to it, and answers with what the path says: ``/204``. ``/slow`` waits for ``go``."""

    def __init__(self):
        site = self
        self.requests = []
        self.go = threading.Event()

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                site.requests.append((self.path, dict(self.headers), body))
                if self.path == "/slow":
                    site.go.wait(30)
                self.send_response(int(self.path[1:]) if self.path[1:].isdecimal() else 200)
                self.send_header("Location", "/204")
                self.end_headers()

            def log_message(self, *arguments):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"


@pytest.fixture
def site():
    made = Site()
    thread = threading.Thread(target=made.server.serve_forever, daemon=True)
    thread.start()
    yield made
    made.go.set()
    made.server.shutdown()
    made.server.server_close()


def test_the_signature_is_that_of_the_specification():
    """The example of https://www.standardwebhooks.com, by its own library too."""
    body = b'{"test": 2432232314}'
    signed = signature(SECRET, "msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, body)
    assert signed == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


@pytest.mark.webhooks
def test_a_webhook_passes_the_reference_librarys_test(site):
    import standardwebhooks

    one = event("charge.created")
    assert sent(WebhookPublisher(f"{site.url}/204", SECRET), one) == [Confirmed(one)]
    ((_path, headers, body),) = site.requests
    headers = {name.lower(): value for name, value in headers.items()}
    assert standardwebhooks.Webhook(SECRET).verify(body, headers) == {"amount": 1}
    assert (headers["webhook-id"], headers["traceparent"]) == (str(one.id), TRACE)


def test_each_secret_of_a_rotation_signs(site):
    endpoint = Endpoint(f"{site.url}/204", [SECRET, OTHER])
    sent(WebhookPublisher(endpoint=lambda _event: endpoint), event("a"))
    ((_path, headers, _body),) = site.requests
    assert headers["Webhook-Signature" if "Webhook-Signature" in headers else "webhook-signature"].count("v1,") == 2


@pytest.mark.parametrize(
    ("status", "permanent"), [(302, False), (400, False), (404, False), (410, True), (429, False), (500, False)]
)
def test_anything_but_2xx_is_refused(site, status, permanent):
    one = event("a")
    (outcome,) = sent(WebhookPublisher(f"{site.url}/{status}", SECRET), one)
    assert outcome == Refused(one, f"the endpoint answered {status}", permanent)
    assert len(site.requests) == 1


def test_an_endpoint_that_is_down_or_slow_is_a_refusal(site):
    down = WebhookPublisher(f"http://127.0.0.1:{free_port()}/", SECRET)
    slow = WebhookPublisher(f"{site.url}/slow", SECRET, timeout=0.2)
    for publisher in (down, slow):
        (outcome,) = sent(publisher, event("a"))
        assert "did not answer" in outcome.reason


def test_a_slow_endpoint_leaves_the_others_their_turn(site):
    endpoints = {"slow": Endpoint(f"{site.url}/slow", [SECRET]), "quick": Endpoint(f"{site.url}/204", [SECRET])}
    publisher = WebhookPublisher(endpoint=lambda event: endpoints[event.topic], concurrency=2, timeout=30)
    slow, quick = event("slow"), [event("quick") for _ in range(20)]
    assert sent(publisher, slow, *quick, timeout=3) == [Confirmed(one) for one in quick]


def test_what_there_was_no_time_for_is_as_if_nobody_had_tried(site):
    publisher = WebhookPublisher(f"{site.url}/slow", SECRET, concurrency=1, timeout=30)
    first, second = event("a"), event("b")
    assert sent(publisher, first, second, timeout=0.3) == [NotSent(second)]


def test_a_secret_that_is_none_is_told_of(site):
    (outcome,) = sent(WebhookPublisher(f"{site.url}/204", "whsec_***"), event("a"))
    assert "must be whsec_ followed by base64" in outcome.reason
    with pytest.raises(ImproperlyConfigured, match="either url and secret, or endpoint"):
        WebhookPublisher()
