"""Webhooks out, against a real HTTP server."""

from __future__ import annotations

import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import standardwebhooks
from django.core.exceptions import ImproperlyConfigured

from django_idempotency.contrib.outbox.publishers.webhooks import (
    SILENT,
    Endpoint,
    WebhookPublisher,
)
from django_idempotency.messages.publisher import Confirmed, NotSent, Refused
from tests.contrib.outbox.events import TRACE, event, sent
from tests.support.private_servers import free_port
from tests.support.waiting import eventually

pytestmark = pytest.mark.webhooks
SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
OTHER = "whsec_d2ViaG9vay1zZWNyZXQtZm9yLXRlc3Rz"


def webhooks(*endpoint, **options):
    return WebhookPublisher(*endpoint, **{"allow_private": True, **options})


def by_topic(urls, **options):
    """A publisher to the URL of each topic."""
    return webhooks(
        endpoint=lambda event: Endpoint(urls[event.topic], [SECRET]), **options
    )


class Site:
    """Keeps what was posted to it, and answers with what the path says: ``/204``. ``/slow`` waits for ``go``.

    ``/drip`` sends a byte of a header now and then, until ``go``.
    """

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
                if self.path == "/drip":
                    self.wfile.write(b"HTTP/1.1 200 OK\r\nX-Drip: ")
                    while not site.go.wait(0.1):
                        self.wfile.write(b".")
                    return
                self.send_response(
                    int(self.path[1:]) if self.path[1:].isdecimal() else 200
                )
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


def test_each_secret_of_a_rotation_passes_the_reference_librarys_test(site):
    one = event("charge.created")
    publisher = webhooks(
        endpoint=lambda _event: Endpoint(f"{site.url}/204", [SECRET, OTHER])
    )
    assert sent(publisher, one) == [Confirmed(one)]
    ((_path, headers, body),) = site.requests
    headers = {name.lower(): value for name, value in headers.items()}
    for secret in (SECRET, OTHER):
        assert standardwebhooks.Webhook(secret).verify(body, headers) == {"amount": 1}
    assert (headers["webhook-id"], headers["traceparent"]) == (str(one.id), TRACE)


@pytest.mark.parametrize(
    ("status", "permanent"),
    [(302, False), (400, False), (404, False), (410, True), (429, False), (500, False)],
)
def test_anything_but_2xx_is_refused(site, status, permanent):
    one = event("a")
    (outcome,) = sent(webhooks(f"{site.url}/{status}", SECRET), one)
    assert outcome == Refused(one, f"the endpoint responded with {status}", permanent)
    assert len(site.requests) == 1


def test_a_request_has_a_deadline_as_a_whole_and_leaves_no_thread(site):
    publisher = by_topic(
        {"drip": f"{site.url}/drip", "quick": f"{site.url}/204"}, timeout=2
    )
    drips, quick = [event("drip") for _ in range(3)], event("quick")
    before = threading.active_count()
    begun = time.monotonic()
    outcomes = sent(publisher, *drips, quick)
    assert time.monotonic() - begun < 15
    assert outcomes == [
        *(Refused(one, "the endpoint did not respond") for one in drips),
        Confirmed(quick),
    ]
    site.go.set()
    eventually(
        lambda: threading.active_count() <= before + 1
    )  # one that looks hosts up, if any


def test_an_endpoint_takes_only_its_share_of_the_requests(site):
    """Otherwise one that hangs would keep all others waiting."""
    publisher = by_topic(
        {"slow": f"{site.url}/slow", "quick": f"{site.url}/204"},
        concurrency=4,
        timeout=30,
    )
    slow, quick = [event("slow") for _ in range(8)], [event("quick") for _ in range(8)]
    outcomes = sent(publisher, *slow, *quick, timeout=3)
    assert [path for path, *_ in site.requests].count("/slow") == 1
    assert outcomes == [*map(NotSent, slow[1:]), *map(Confirmed, quick)]


def test_an_endpoint_that_gives_no_answer_is_left_alone_for_a_while(site, monkeypatch):
    monkeypatch.setattr(
        "django_idempotency.contrib.outbox.publishers.webhooks.LEFT_ALONE", 1.5
    )
    publisher = webhooks(f"{site.url}/slow", SECRET, timeout=0.2, concurrency=1)
    reasons = [
        outcome.reason for outcome in sent(publisher, *(event("a") for _ in range(8)))
    ]
    assert reasons == ["the endpoint did not respond"] * SILENT + [
        f"the endpoint is left alone: it did not respond {SILENT} times"
    ] * (8 - SILENT)
    assert len(site.requests) <= SILENT  # the server may not have read each of them yet
    site.go.set()
    one = event("a")
    eventually(lambda: sent(publisher, one) == [Confirmed(one)])
    assert publisher._silent == {}


def test_addresses_that_are_not_public_need_to_be_allowed(site):
    for host in (
        "127.0.0.1",
        "localhost",
        "[::ffff:127.0.0.1]",
        "169.254.169.254",
        "0.0.0.0",
    ):
        url = f"http://{host}:{site.server.server_port}/204"
        (outcome,) = sent(webhooks(url, SECRET, allow_private=False), event("a"))
        assert outcome.reason == "the endpoint's address is not public", host
    assert site.requests == []


def test_the_address_that_was_checked_is_the_one_that_is_connected_to(
    site, monkeypatch
):
    """A host may be looked up as a public address first, and then as a private one."""
    real, addresses = socket.getaddrinfo, iter(["127.0.0.9", "127.0.0.1"])
    monkeypatch.setattr(
        socket,
        "getaddrinfo",
        lambda _host, port, *rest, **named: real(next(addresses), port),
    )
    (outcome,) = sent(
        webhooks(f"http://rebinding.test:{site.server.server_port}/204", SECRET),
        event("a"),
    )
    assert (outcome.reason, site.requests) == ("the endpoint did not respond", [])
    assert next(addresses) == "127.0.0.1"


def test_proxies_of_the_environment_are_not_used(site, monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{free_port()}")
    one = event("a")
    assert sent(webhooks(f"{site.url}/204", SECRET), one) == [Confirmed(one)]


@pytest.mark.parametrize(
    "url", ["file:///etc/passwd", "ftp://127.0.0.1/x", "https:///x", "127.0.0.1/x"]
)
def test_an_endpoint_is_of_http(url):
    (outcome,) = sent(webhooks(url, SECRET), event("a"))
    assert (
        outcome.reason
        == "A webhook's URL must begin with https:// or http://, and a host."
    )


def test_an_error_of_the_endpoint_callable_is_logged_and_not_shown(caplog):
    def endpoint(event):
        raise LookupError("the password is hunter2")

    (outcome,) = sent(webhooks(endpoint=endpoint), event("a"))
    assert outcome.reason == "endpoint() raised LookupError"
    assert "hunter2" in caplog.text


def test_an_invalid_webhook_secret_is_refused_with_a_reason(site):
    (outcome,) = sent(webhooks(f"{site.url}/204", "whsec_***"), event("a"))
    assert "must be whsec_ followed by base64" in outcome.reason
    with pytest.raises(
        ImproperlyConfigured, match="either url and secret, or endpoint"
    ):
        webhooks()
