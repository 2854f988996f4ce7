"""Webhooks, signed as in Standard Webhooks (https://www.standardwebhooks.com): several
at once, each by itself.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import hmac
import logging
import math
import socket
import ssl
import threading
import time
from asyncio import FIRST_COMPLETED
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from ipaddress import IPv6Address, IPv6Network, ip_address
from typing import Any
from urllib.parse import urlsplit

import httpcore2
from django.core.exceptions import ImproperlyConfigured
from django.utils.module_loading import import_string
from httpcore2 import AsyncNetworkStream

from django_idempotency.extending import log
from django_idempotency.extending.brokers import (
    Confirmed,
    Event,
    NotSent,
    Outcome,
    Postponed,
    Publisher,
    Refused,
)

SILENT = 5  # times in a row that an endpoint does not respond before it is left alone
LEFT_ALONE = 30.0  # seconds
NEVER = 0, 0.0
GONE = 410
# https://www.iana.org/assignments/ipv6-address-space
GLOBAL_UNICAST = IPv6Network("2000::/3")
PREFIX = "whsec_"
# An event can't set these headers: they belong to the connection, or the publisher sets
# them itself.
OURS = {"host", "content-length", "connection", "transfer-encoding", "content-type"}


@dataclass(frozen=True)
class Endpoint:
    """Where webhooks go. ``secrets``: ``whsec_…``, more than one while a secret is
    being replaced.
    """

    url: str
    secrets: Sequence[str] = field(repr=False)


class WebhookPublisher(Publisher):
    """Posts each event to its endpoint. ``webhook-id`` is the event's id. A 2xx
    response confirms the event.

    A 410 gives the event up at once. Anything else is a failed attempt, including
    redirects and no response. An endpoint that has given no response gets one request
    at a time, and after several in a row, none for half a minute. Its events have
    failed meanwhile.

    ``url`` and ``secret``: the endpoint for all events. ``endpoint``: instead of these,
    a callable or its dotted path, which takes an event and returns its ``Endpoint``.
    ``concurrency``: how many requests are sent at once; with ``endpoint``, a quarter of
    them to one URL at most, and none to it once a fifth of ``timeout`` is over: what it
    would not get to in another fifth is postponed. ``timeout``: seconds that a request
    may take from the lookup of the host to the status of the response.
    ``allow_private``: whether addresses may be used that are not public, such as those
    of one's own network.
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
        self.turn = timeout / 5 if endpoint else math.inf
        self.timeout = timeout
        self.allow_private = allow_private
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lookups = _Lookups()
        # by URL: how often in a row, and until when it is left alone
        self._silent: dict[str, tuple[int, float]] = {}

    def connect(self) -> None:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._client = httpcore2.AsyncConnectionPool(
                ssl_context=ssl.create_default_context(),
                max_connections=self.concurrency,
                network_backend=_Addresses(
                    self._lookups, self.timeout, allow_private=self.allow_private
                ),
            )

    def send(self, events: Iterable[Event], timeout: float) -> Iterator[Outcome]:
        assert self._loop is not None
        lines: dict[str, _Line] = defaultdict(_Line)
        under_way: dict[asyncio.Task[Outcome], _Line] = {}
        deadline = 0.0
        try:
            while True:
                for event in events:
                    deadline = time.monotonic() + timeout
                    yield from self._have_wait(event, lines)
                yield from self._begin(lines, under_way)
                left = deadline - time.monotonic()
                if not under_way or left <= 0:
                    break
                ended, _others = self._loop.run_until_complete(
                    asyncio.wait(under_way, timeout=left, return_when=FIRST_COMPLETED)
                )
                for post in ended:
                    under_way.pop(post).has_ended()
                    yield post.result()
        finally:
            if under_way:
                for post in under_way:
                    post.cancel()
                self._loop.run_until_complete(asyncio.wait(under_way))
        for line in lines.values():
            yield from line.left(self.turn)

    def _have_wait(self, event: Event, lines: dict[str, _Line]) -> Iterator[Outcome]:
        try:
            post = _Post(event, self.endpoint(event))
            lines[post.url].waiting.append(post)
        except ImproperlyConfigured as error:
            yield Refused(event, str(error))
        except Exception as error:
            # from the project's endpoint(): the event's fault, not the relay's
            log(
                logging.ERROR,
                "outbox_publisher",
                "outbox: endpoint() failed for the event %s of the topic %r",
                event.id,
                event.topic,
                error=error,
            )
            yield Refused(event, f"endpoint() raised {type(error).__name__}")

    def _begin(
        self, lines: dict[str, _Line], under_way: dict[asyncio.Task[Outcome], _Line]
    ) -> Iterator[Outcome]:
        """Begin as many requests as there may be at once, for one endpoint after the
        other while it is its turn.
        """
        assert self._loop is not None
        urls = deque(lines)
        while urls and len(under_way) < self.concurrency:
            url = urls.popleft()
            line = lines[url]
            if not line.waiting or line.age() >= self.turn:
                continue
            silences, left_alone_until = self._silent.get(url, NEVER)
            if time.monotonic() < left_alone_until:
                reason = f"the endpoint is left alone: it did not respond {silences}"
                for post in line.waiting:
                    yield Refused(post.event, f"{reason} times")
                line.waiting.clear()
            elif line.under_way < (1 if silences else self.share):
                task = self._loop.create_task(self._post(line.next()))
                under_way[task] = line
                lines[url] = lines.pop(url)  # now the last one
                urls.append(url)

    async def _post(self, post: _Post) -> Outcome:
        try:
            async with asyncio.timeout(self.timeout):
                request = self._client.stream(
                    "POST", post.url, headers=post.headers, content=post.event.payload
                )
                async with request as response:
                    status = response.status
        except NotPublic:
            return Refused(post.event, "the endpoint's address is not public")
        except (TypeError, httpcore2.LocalProtocolError):
            return Refused(post.event, "its URL or headers can't be sent over HTTP")
        except (
            Exception
        ):  # the text of which may tell of the network in which the relay is
            # others may have ended since this one began
            silences = self._silent.get(post.url, NEVER)[0] + 1
            again = time.monotonic() + LEFT_ALONE if silences >= SILENT else 0.0
            self._silent[post.url] = silences, again
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
    """The request for an event. Raises ``ImproperlyConfigured`` if its endpoint can't
    be one.
    """

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


class _Line:
    """The events for one endpoint, in one call."""

    def __init__(self) -> None:
        self.waiting = deque[_Post]()
        self.begun: float | None = None
        self.under_way = self.ended = 0

    def next(self) -> _Post:
        """Take the next request, which is begun now."""
        self.begun = self.begun or time.monotonic()
        self.under_way += 1
        return self.waiting.popleft()

    def has_ended(self) -> None:
        self.under_way -= 1
        self.ended += 1

    def age(self) -> float:
        """Seconds since the first request was begun."""
        return 0.0 if self.begun is None else time.monotonic() - self.begun

    def left(self, turn: float) -> Iterator[Outcome]:
        """What comes of those still waiting: at its present pace, the endpoint would
        get to the next one after ``each`` seconds.

        Those that it would get to in its next ``turn`` are not postponed: all events
        behind them that have their keys would be, too.
        """
        each = self.age() / max(1, self.ended)
        for place, post in enumerate(self.waiting, start=1):
            is_soon = place * each < turn if self.ended else turn == math.inf
            if self.begun is None or is_soon:
                yield NotSent(post.event)
            else:
                reason = "other events for the endpoint go first, as many as it accepts"
                yield Postponed(post.event, reason, min(place * each, LEFT_ALONE))


class NotPublic(Exception):
    """The host of an endpoint has no address that is public."""


class _Lookups:
    """Looks hosts up, one lookup a host at a time: one that hangs has one thread, and
    keeps no other waiting.

    Only requests begin a lookup, so that there are few threads even while all hang.
    """

    def __init__(self) -> None:
        self._under_way: dict[str, Future[list[Any]]] = {}

    async def find(self, host: str) -> list[Any]:
        found = self._under_way.get(host)
        if found is None:
            found = self._under_way[host] = Future()
            found.set_running_or_notify_cancel()  # those who wait can't cancel it
            threading.Thread(
                target=self._look_up, args=[host, found], daemon=True
            ).start()
        return await asyncio.wrap_future(found)

    def _look_up(self, host: str, found: Future[list[Any]]) -> None:
        try:
            addresses = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        except Exception as error:
            del self._under_way[host]
            found.set_exception(error)
        else:
            del self._under_way[host]
            found.set_result(addresses)


class _Addresses(httpcore2.AnyIOBackend):
    """Looks a host up once, and connects to an address that may be used: a second
    lookup could find another one.
    """

    def __init__(
        self, lookups: _Lookups, timeout: float, *, allow_private: bool
    ) -> None:
        self.lookups = lookups
        self.timeout = timeout
        self.allow_private = allow_private

    async def connect_tcp(
        self, host: str, port: int, *_arguments: Any, **_options: Any
    ) -> AsyncNetworkStream:
        found = await self.lookups.find(host)
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
        # addresses that lead to one of IPv4 are public by that one, or by none
        if ip.ipv4_mapped is None:
            return ip in GLOBAL_UNICAST and not (ip.sixtofour or ip.teredo)
        ip = ip.ipv4_mapped
    return ip.is_global and not ip.is_multicast


def signature(secret: str, id: str, timestamp: int, body: bytes) -> str:
    """Return the ``webhook-signature`` of a message. Raises ``ImproperlyConfigured`` if
    the secret is invalid.
    """
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
