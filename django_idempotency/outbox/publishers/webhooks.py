"""Webhooks, signed as in Standard Webhooks (https://www.standardwebhooks.com): several at once, each by itself."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError
from urllib.request import HTTPRedirectHandler, Request, build_opener

from django.core.exceptions import ImproperlyConfigured
from django.utils.module_loading import import_string

from django_idempotency.outbox.publishers.base import Confirmed, Event, NotSent, Outcome, Publisher, Refused

GONE = 410
PREFIX = "whsec_"
# An event can't set these headers: they belong to the connection, or the publisher sets them itself.
OURS = {"host", "content-length", "connection", "transfer-encoding", "content-type"}


@dataclass(frozen=True)
class Endpoint:
    """Where webhooks go. ``secrets``: ``whsec_…``, more than one while a secret is being replaced."""

    url: str
    secrets: Sequence[str]


class WebhookPublisher(Publisher):
    """Posts each event to its endpoint. ``webhook-id`` is the event's id. A 2xx response confirms the event.

    A 410 gives the event up at once. Anything else is a failed attempt, including redirects and no response.

    ``url`` and ``secret``: the endpoint for all events.
    ``endpoint``: instead of these, a callable or its dotted path, which takes an event and returns its ``Endpoint``.
    ``concurrency``: how many requests are sent at once.
    ``timeout``: seconds that an endpoint has for its response.
    """

    def __init__(
        self,
        url: str = "",
        secret: str = "",
        *,
        endpoint: Callable[[Event], Endpoint] | str | None = None,
        concurrency: int = 16,
        timeout: float = 5.0,
    ) -> None:
        if bool(endpoint) == bool(url):
            raise ImproperlyConfigured("Set either url and secret, or endpoint.")
        self.endpoint: Callable[[Event], Endpoint] = (
            import_string(endpoint) if isinstance(endpoint, str) else endpoint or _always(Endpoint(url, [secret]))
        )
        self.concurrency = concurrency
        self.timeout = timeout
        self._pool: ThreadPoolExecutor | None = None
        self._opener = build_opener(_NoRedirects)

    def connect(self) -> None:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self.concurrency, thread_name_prefix="webhooks")

    def send(self, events: Sequence[Event], timeout: float) -> Iterator[Outcome]:
        assert self._pool is not None
        posts = {self._pool.submit(self._post, event): event for event in events}
        try:
            for post in as_completed(posts, timeout):
                yield post.result()
        except TimeoutError:
            yield from _not_begun(posts)

    def _post(self, event: Event) -> Outcome:
        try:
            endpoint = self.endpoint(event)
            request = Request(endpoint.url, event.payload, _headers(event, endpoint), method="POST")
            with self._opener.open(request, timeout=self.timeout) as answer:
                answer.read(1)
        except HTTPError as error:
            with error:
                return Refused(event, f"the endpoint answered {error.code}", permanent=error.code == GONE)
        except (OSError, HTTPException) as error:
            return Refused(event, f"the endpoint did not answer: {error}")
        except Exception as error:  # from the project's endpoint(): the event's fault, not the relay's
            return Refused(event, f"{type(error).__name__}: {error}")
        return Confirmed(event)

    def close(self) -> None:
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=False, cancel_futures=True)


def signature(secret: str, id: str, timestamp: int, body: bytes) -> str:
    """Return the ``webhook-signature`` of a message. Raises ``ImproperlyConfigured`` if the secret is invalid."""
    try:
        key = base64.b64decode(secret.removeprefix(PREFIX), validate=True)
    except (binascii.Error, ValueError):
        key = b""
    if not key:
        raise ImproperlyConfigured(f"A webhook's secret must be {PREFIX} followed by base64.")
    signed = hmac.new(key, f"{id}.{timestamp}.".encode() + body, hashlib.sha256).digest()
    return f"v1,{base64.b64encode(signed).decode()}"


def _headers(event: Event, endpoint: Endpoint) -> Mapping[str, str]:
    now = int(time.time())
    kept = {name: value for name, value in event.headers.items() if name not in OURS and name[:8] != "webhook-"}
    return {
        **kept,
        "content-type": event.content_type,
        "webhook-id": str(event.id),
        "webhook-timestamp": str(now),
        "webhook-signature": " ".join(
            signature(secret, str(event.id), now, event.payload) for secret in endpoint.secrets
        ),
    }


def _not_begun(posts: Mapping[Future[Outcome], Event]) -> Iterator[Outcome]:
    for post, event in posts.items():
        if post.cancel():
            yield NotSent(event)


def _always(endpoint: Endpoint) -> Callable[[Event], Endpoint]:
    return lambda _event: endpoint


class _NoRedirects(HTTPRedirectHandler):
    """A redirect is an error: the signature was made for another receiver."""

    def redirect_request(self, *arguments: Any) -> None:
        return None
