"""Webhooks, signed as in Standard Webhooks (https://www.standardwebhooks.com): several at once, each by itself."""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import hmac
import logging
import socket
import ssl
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from ipaddress import IPv6Address, ip_address
from typing import Any
from urllib.parse import urlsplit

import httpcore2
from django.core.exceptions import ImproperlyConfigured
from django.utils.module_loading import import_string
from httpcore2 import AsyncNetworkStream

from django_idempotency.messages.publisher import (
    Confirmed,
    Event,
    NotSent,
    Outcome,
    Publisher,
    Refused,
)
from django_idempotency.reporting.logs import log

SILENT = 5  # times in a row that an endpoint does not respond before it is left alone
LEFT_ALONE = 30.0  # seconds
GONE = 410
PREFIX = "whsec_"
# An event can't set these headers: they belong to the connection, or the publisher sets them itself.
OURS = {"host", "content-length", "connection", "transfer-encoding", "content-type"}


@dataclass(frozen=True)
class Endpoint:
    """Where webhooks go. ``secrets``: ``whsec_…``, more than one while a secret is being replaced."""

    url: str
    secrets: Sequence[str] = field(repr=False)


class WebhookPublisher(Publisher):
    """Posts each event to its endpoint. ``webhook-id`` is the event's id. A 2xx response confirms the event.

    A 410 gives the event up at once. Anything else is a failed attempt, including redirects and no response. An
    endpoint that has given no response several times in a row gets no requests for half a minute. Its events have
    failed meanwhile.

    ``url`` and ``secret``: the endpoint for all events.
    ``endpoint``: instead of these, a callable or its dotted path, which takes an event and returns its ``Endpoint``.
    ``concurrency``: how many requests are sent at once; with ``endpoint``, a quarter of them to one URL at most.
    ``timeout``: seconds that a request may take from the lookup of the host to the status of the response.
    ``allow_private``: whether addresses may be used that are not public, such as those of one's own network.
    """

    def __init__(
        self,
        url: str = "",
        secret: str = "",
        *,
        endpoint: Callable[[Event], Endpoint] | str | None = None,
        concurrency: int = 16,
        timeout: float = 5.0,
        allow_private: bool = False,
    ) -> None:
        if bool(endpoint) == bool(url):
            raise ImproperlyConfigured("Set either url and secret, or endpoint.")
        only = Endpoint(url, [secret])
        self.endpoint: Callable[[Event], Endpoint] = (
            import_string(endpoint)
            if isinstance(endpoint, str)
            else endpoint or (lambda _event: only)
        )
        self.concurrency = concurrency
        self.share = max(1, concurrency // 4) if endpoint else concurrency
        self.timeout = timeout
        self.allow_private = allow_private
        self._loop: asyncio.AbstractEventLoop | None = None
        self._silent: dict[
            str, tuple[int, float]
        ] = {}  # by URL: how often in a row, and until when it is left alone

    def connect(self) -> None:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._client = httpcore2.AsyncConnectionPool(
                ssl_context=ssl.create_default_context(),
                max_connections=self.concurrency,
                network_backend=_Addresses(
                    self.timeout, allow_private=self.allow_private
                ),
            )

    def send(self, events: Sequence[Event], timeout: float) -> Iterator[Outcome]:
        assert self._loop is not None
        deadline, run = time.monotonic() + timeout, self._loop.run_until_complete
        slots = asyncio.Semaphore(self.concurrency)
        shares: dict[str, asyncio.Semaphore] = defaultdict(
            lambda: asyncio.Semaphore(self.share)
        )
        posts = list[_Post]()
        for event in events:
            try:
                posts.append(_Post(event, self.endpoint(event)))
            except ImproperlyConfigured as error:
                yield Refused(event, str(error))
            except Exception as error:  # from the project's endpoint(): the event's fault, not the relay's
                log(
                    logging.ERROR,
                    "outbox_publisher",
                    "outbox: endpoint() failed",
                    error=error,
                )
                yield Refused(event, f"endpoint() raised {type(error).__name__}")
        waiting = {
            self._loop.create_task(self._post(post, shares[post.url], slots))
            for post in posts
        }
        try:
            while waiting and (left := deadline - time.monotonic()) > 0:
                ended, waiting = run(
                    asyncio.wait(
                        waiting, timeout=left, return_when=asyncio.FIRST_COMPLETED
                    )
                )
                yield from (task.result() for task in ended)
        finally:
            for task in waiting:
                task.cancel()
            if waiting:
                run(asyncio.wait(waiting))
        yield from (NotSent(post.event) for post in posts if not post.begun)

    async def _post(
        self, post: _Post, share: asyncio.Semaphore, slots: asyncio.Semaphore
    ) -> Outcome:
        async with share, slots:
            post.begun = True
            silences, left_alone_until = self._silent.get(post.url, (0, 0.0))
            if time.monotonic() < left_alone_until:
                return Refused(
                    post.event,
                    f"the endpoint is left alone: it did not respond {silences} times",
                )
            try:
                async with asyncio.timeout(self.timeout):
                    request = self._client.stream(
                        "POST",
                        post.url,
                        headers=post.headers,
                        content=post.event.payload,
                    )
                    async with request as response:
                        status = response.status
            except NotPublic:
                return Refused(post.event, "the endpoint's address is not public")
            except httpcore2.LocalProtocolError:
                return Refused(post.event, "its headers can't be sent by HTTP")
            except (
                Exception
            ):  # the text of which may tell of the network in which the relay is
                again = time.monotonic() + LEFT_ALONE if silences + 1 >= SILENT else 0.0
                self._silent[post.url] = silences + 1, again
                return Refused(post.event, "the endpoint did not respond")
        self._silent.pop(post.url, None)
        if 200 <= status < 300:
            return Confirmed(post.event)
        return Refused(
            post.event,
            f"the endpoint responded with {status}",
            permanent=status == GONE,
        )

    def close(self) -> None:
        loop, self._loop = self._loop, None
        if loop is not None:
            loop.run_until_complete(self._client.aclose())
            loop.close()


class _Post:
    """The request for an event. Raises ``ImproperlyConfigured`` if its endpoint can't be one."""

    def __init__(self, event: Event, endpoint: Endpoint) -> None:
        parts = urlsplit(endpoint.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ImproperlyConfigured(
                "A webhook's URL must begin with https:// or http://, and a host."
            )
        self.event, self.url, self.headers = (
            event,
            endpoint.url,
            _headers(event, endpoint),
        )
        self.begun = False


class NotPublic(Exception):
    """The host of an endpoint has no address that is public."""


class _Addresses(httpcore2.AnyIOBackend):
    """Looks a host up once, and connects to an address that may be used: a second lookup could find another one."""

    def __init__(self, timeout: float, *, allow_private: bool) -> None:
        self.timeout = timeout
        self.allow_private = allow_private

    async def connect_tcp(
        self, host: str, port: int, *_arguments: Any, **_options: Any
    ) -> AsyncNetworkStream:
        found = await asyncio.get_running_loop().getaddrinfo(
            host, port, type=socket.SOCK_STREAM
        )
        addresses = dict.fromkeys(str(address[0]) for *_kind, address in found)
        usable = [
            address
            for address in addresses
            if self.allow_private or _is_public(address)
        ]
        error: Exception = NotPublic()
        for address in usable:
            try:
                return await super().connect_tcp(
                    address, port, timeout=self.timeout / len(usable)
                )
            except (httpcore2.NetworkError, httpcore2.TimeoutException) as failure:
                error = failure
        raise error


def _is_public(address: str) -> bool:
    ip = ip_address(address)
    if isinstance(ip, IPv6Address):
        ip = ip.ipv4_mapped or ip
    return ip.is_global and not ip.is_multicast


def signature(secret: str, id: str, timestamp: int, body: bytes) -> str:
    """Return the ``webhook-signature`` of a message. Raises ``ImproperlyConfigured`` if the secret is invalid."""
    try:
        key = base64.b64decode(secret.removeprefix(PREFIX), validate=True)
    except (binascii.Error, ValueError):
        key = b""
    if not key:
        raise ImproperlyConfigured(
            f"A webhook's secret must be {PREFIX} followed by base64."
        )
    signed = hmac.new(
        key, f"{id}.{timestamp}.".encode() + body, hashlib.sha256
    ).digest()
    return f"v1,{base64.b64encode(signed).decode()}"


def _headers(event: Event, endpoint: Endpoint) -> dict[bytes | str, bytes | str]:
    now = int(time.time())
    signatures = [
        signature(secret, str(event.id), now, event.payload)
        for secret in endpoint.secrets
    ]
    return {
        **{
            name: value
            for name, value in event.headers.items()
            if name not in OURS and name[:8] != "webhook-"
        },
        "content-type": event.content_type,
        "webhook-id": str(event.id),
        "webhook-timestamp": str(now),
        "webhook-signature": " ".join(signatures),
    }
