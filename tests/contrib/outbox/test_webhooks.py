"""Webhooks out, against a real HTTP server."""

from __future__ import annotations

import math
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest
import standardwebhooks
from django.core.exceptions import ImproperlyConfigured

from django_idempotency.contrib.outbox.models import OutboxEvent
from django_idempotency.contrib.outbox.publishers.webhooks import (
    LEFT_ALONE,
    SILENT,
    Endpoint,
    WebhookPublisher,
    _is_public,
    _Line,
    _Post,
)
from django_idempotency.contrib.outbox.relay import EventRelay
from django_idempotency.messages.publisher import Confirmed, NotSent, Postponed, Refused
from tests.contrib.outbox.events import (
    TRACE,
    event,
    outcomes_of,
    publish_all,
    sent,
)
from tests.support.private_servers import free_port
from tests.support.waiting import eventually

pytestmark = [pytest.mark.slow, pytest.mark.webhooks]
HERE = "django_idempotency.contrib.outbox.publishers.webhooks"
SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
OTHER = "whsec_d2ViaG9vay1zZWNyZXQtZm9yLXRlc3Rz"


def webhooks(*endpoint, **options):
    """A publisher with patience for a busy machine."""
    given = {"allow_private": True, "timeout": 60, **options}
    return WebhookPublisher(*endpoint, **given)


def by_topic(urls, **options):
    """A publisher to the URL of each topic."""
    return webhooks(
        endpoint=lambda event: Endpoint(urls[event.topic], [SECRET]), **options
    )


class Site:
    """Keeps what was posted to it, and answers with what the path says: ``/204``.
    ``/hangs`` waits for ``go``, and ``/slow`` a second.

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
                if self.path in ("/hangs", "/slow"):
                    site.go.wait(1 if self.path == "/slow" else 60)
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

    def paths(self):
        return [path for path, *_ in self.requests]


@pytest.fixture
def site():
    made = Site()
    thread = threading.Thread(target=made.server.serve_forever, daemon=True)
    thread.start()
    yield made
    made.go.set()
    made.server.shutdown()
    made.server.server_close()


@pytest.fixture
def later(monkeypatch):
    """``later(seconds)``: so much later is it for publishers, at once."""
    passed = []
    clock = lambda: time.monotonic() + sum(passed)  # noqa: E731
    monkeypatch.setattr(
        f"{HERE}.time", SimpleNamespace(time=time.time, monotonic=clock)
    )
    return passed.append


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


def test_a_request_has_one_deadline_and_its_thread_ends(site):
    drips = [event("drip") for _ in range(3)]
    before = threading.active_count()
    begun = time.monotonic()
    outcomes = sent(webhooks(f"{site.url}/drip", SECRET, timeout=2), *drips)
    assert time.monotonic() - begun < 60
    assert outcomes == [Refused(one, "the endpoint did not respond") for one in drips]
    site.go.set()
    # one that looks hosts up, if any
    eventually(lambda: threading.active_count() <= before + 1)


def test_an_endpoint_takes_only_its_share_of_the_requests(site, later, monkeypatch):
    """Otherwise one that hangs would keep all others waiting."""
    monkeypatch.setattr(f"{HERE}.LEFT_ALONE", 200)
    publisher = by_topic(
        {"hangs": f"{site.url}/hangs", "quick": f"{site.url}/204"},
        concurrency=4,
        timeout=300,
    )
    hanging, quick = ([event(topic) for _ in range(8)] for topic in ("hangs", "quick"))
    sending = outcomes_of(publisher, *hanging, *quick)
    assert [next(sending) for _one in quick] == [*map(Confirmed, quick)]
    later(60)
    outcomes = list(sending)
    # the server may not have read it yet
    assert site.paths().count("/hangs") <= 1
    assert [(type(each), each.event) for each in outcomes] == [
        (Postponed, each) for each in hanging[1:]
    ]
    delays = [each.delay for each in outcomes]
    assert delays == sorted(delays)
    assert delays[0] < delays[-1] <= 200


@pytest.mark.parametrize("how", ["hangs", "drip"])
def test_the_next_event_of_a_key_does_not_wait_for_an_endpoint_that_hangs(site, how):
    urls = {how: f"{site.url}/{how}", "quick": f"{site.url}/204"}
    hanging, *quick = event(how), *(event("quick", key="k") for _ in range(3))
    sending = outcomes_of(by_topic(urls, timeout=300), hanging, *quick)
    assert [next(sending) for _one in quick] == [*map(Confirmed, quick)]
    sending.close()


@pytest.mark.parametrize("concurrency", [1, 4])
def test_a_mute_endpoint_is_left_alone_for_a_while(site, later, concurrency):
    """Requests that were under way at once all count."""
    publisher = webhooks(
        f"{site.url}/hangs", SECRET, timeout=0.2, concurrency=concurrency
    )
    events = [event("a") for _ in range(40)]
    reasons = [outcome.reason for outcome in sent(publisher, *events)]
    requests = reasons.count("the endpoint did not respond")
    assert SILENT <= requests < SILENT + concurrency
    assert all("the endpoint is left alone" in each for each in reasons[requests:])
    # the server may not have read each of them yet
    assert len(site.requests) <= requests
    site.go.set()
    one, publisher.timeout = event("a"), 60
    later(LEFT_ALONE)
    assert sent(publisher, one) == [Confirmed(one)]
    assert publisher._silent == {}


def test_an_endpoint_that_has_not_responded_gets_one_request_at_a_time(
    site, monkeypatch
):
    # its turn is over when a request is, however long it takes to begin several
    monkeypatch.setattr(_Line, "age", lambda line: float(line.ended))
    publisher = by_topic({"hangs": f"{site.url}/hangs"}, timeout=0.5)
    for requests in (publisher.share, 1):
        outcomes = sent(publisher, *(event("hangs") for _ in range(8)))
        assert list(map(type, outcomes)).count(Refused) == requests


URLS: dict[str, str] = {}  # by topic, for the relay


def endpoint_of(event):
    return Endpoint(URLS[event.topic], [SECRET])


@pytest.mark.row_locks
@pytest.mark.parametrize(
    ("path", "timeout", "most"),
    [("/hangs", 2, 2 * SILENT), ("/slow", 60, 60)],
    ids=["hangs", "is slow"],
)
def test_events_of_one_endpoint_do_not_stop_those_of_others(
    site, outbox, monkeypatch, path, timeout, most
):
    """They are published before the others, many batches of them. Without isolation, an
    endpoint that hangs is asked 20 times first, and one that is slow for each event.
    """
    # so long that no event is due again before the others went, on a busy machine too
    monkeypatch.setattr(f"{HERE}.LEFT_ALONE", 600)
    URLS.update(bad=f"{site.url}{path}", good=f"{site.url}/204")
    options = {
        "endpoint": f"{__name__}.endpoint_of",
        "timeout": timeout,
        "allow_private": True,
    }
    backend = {"BACKEND": f"{HERE}.WebhookPublisher", "OPTIONS": options}
    outbox(PUBLISHERS={"default": backend}, BATCH=50, FIRST_DELAY=1, LONGEST_DELAY=60)
    publish_all(*["bad"] * 200, *["good"] * 10)
    stop, event_relay = threading.Event(), EventRelay("default")
    event_relay.publisher.turn = 0.4
    relay = threading.Thread(target=event_relay.run, args=[stop])
    relay.start()
    try:
        eventually(lambda: site.paths().count("/204") >= 10)
        assert site.paths().count(path) <= most
        # a postponement is no attempt
        waiting = OutboxEvent.objects.filter(error__contains="go first")
        assert set(waiting.values_list("attempts", "status")) == {(1, "pending")}
    finally:
        site.go.set()
        stop.set()
        relay.join()


@pytest.mark.parametrize("key", ["k", ""], ids=["one key", "no key"])
def test_a_healthy_endpoint_gets_its_next_events_at_once(
    site, outbox, monkeypatch, key
):
    """If the next one of a key were postponed, all events behind it would be, too."""
    # it gets to 12 in its turn, by whatever clock
    monkeypatch.setattr(_Line, "age", lambda line: float(line.ended))
    URLS["good"] = f"{site.url}/204"
    options = {
        "endpoint": f"{__name__}.endpoint_of",
        "timeout": 60,
        "concurrency": 4,
        "allow_private": True,
    }
    backend = {"BACKEND": f"{HERE}.WebhookPublisher", "OPTIONS": options}
    outbox(PUBLISHERS={"default": backend}, BATCH=20, FIRST_DELAY=60, LONGEST_DELAY=60)
    publish_all(*[f"good/{key}"] * 50)
    assert EventRelay("default").run_once() == 50
    assert site.paths() == ["/204"] * 50


def test_events_that_an_endpoint_would_not_get_to_soon_are_postponed(site):
    line = _Line()
    line.begun, line.ended = time.monotonic() - 100, 10
    line.waiting.extend(
        _Post(event("a"), Endpoint(site.url, [SECRET])) for _ in range(5)
    )
    outcomes = [type(outcome) for outcome in line.left(turn=35)]
    assert outcomes == [NotSent] * 3 + [Postponed] * 2
    line.ended = 0
    assert set(map(type, line.left(turn=35))) == {Postponed}
    assert set(map(type, line.left(turn=math.inf))) == {NotSent}


def test_a_host_whose_lookup_hangs_does_not_delay_others(site, monkeypatch):
    """Nor have two requests to it two lookups."""
    real, go, asked = socket.getaddrinfo, threading.Event(), []

    def getaddrinfo(host, *rest, **named):
        if host.endswith(".test"):
            asked.append(host)
            go.wait(60)
        return real("127.0.0.1", *rest, **named)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    port = site.server.server_port
    urls = {f"bad-{n}": f"http://{n}.test:{port}/204" for n in range(15)}
    urls["good"] = f"http://localhost:{port}/204"
    events = [event(topic) for topic in urls for _n in range(2)]
    threads = threading.active_count()
    sending = outcomes_of(by_topic(urls, concurrency=64), *events)
    try:
        first = sorted(
            [next(sending), next(sending)], key=lambda outcome: outcome.event.position
        )
        assert first == [*map(Confirmed, events[-2:])]
        sending.close()
    finally:
        go.set()
    eventually(lambda: threading.active_count() <= threads)
    assert len(asked) == 15


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


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("8.8.8.8", True),
        ("2606:4700::1111", True),
        ("::ffff:8.8.8.8", True),
        ("::ffff:10.0.0.1", False),
        ("10.0.0.1", False),
        ("224.0.0.1", False),
        ("fd00::1", False),
        ("fe80::1", False),
        ("64:ff9b::a00:1", False),  # NAT64
        ("64:ff9b::808:808", False),
        ("2002:a00:1::1", False),  # 6to4
        ("2001:0:4136:e378:8000:63bf:f5ff:fffe", False),  # Teredo
        ("::a00:1", False),
        ("4000::1", False),  # not assigned
    ],
)
def test_an_address_is_public_if_it_is_of_the_assigned_space(address, public):
    assert _is_public(address) is public


@pytest.mark.parametrize("wrong", ["é", " x", "a\r\nb"])
def test_a_header_that_http_does_not_carry_is_the_events_fault(site, wrong):
    publisher = webhooks(f"{site.url}/204", SECRET)
    (outcome,) = sent(publisher, event("a", headers={"name": wrong}))
    assert outcome.reason == "its URL or headers can't be sent over HTTP"
    assert publisher._silent == {}


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
