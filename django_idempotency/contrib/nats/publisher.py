"""NATS JetStream: a batch is sent at a time, and its stream acknowledges each message."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import nats
from nats.errors import Error as NATSError
from nats.errors import MaxPayloadError
from nats.js.api import PubAck
from nats.js.errors import APIError, NoStreamResponseError

from django_idempotency.messages.publisher import (
    Confirmed,
    ConnectionLost,
    Event,
    Outcome,
    Publisher,
    PublisherUnavailable,
    Refused,
)

T = TypeVar("T")


class NATSPublisher(Publisher):
    """Publishes to the subject ``prefix`` + topic. ``Nats-Msg-Id`` is the event's id, by which streams deduplicate.

    An event is refused if no stream listens to its subject. The key is sent in the header ``Idempotency-Outbox-Key``.

    ``servers``: one URL or several. Further options are those of ``nats.connect``.
    """

    def __init__(self, servers: str | Sequence[str], *, prefix: str = "", **options: Any) -> None:
        self.servers = [servers] if isinstance(servers, str) else list(servers)
        self.prefix = prefix
        once = {"allow_reconnect": False, "max_reconnect_attempts": 1, "reconnect_time_wait": 0.1}
        self.options = {"connect_timeout": 5, **once, **options}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._client: Any = None

    def connect(self) -> None:
        if self._is_alive():
            return
        self.close()
        self._loop = asyncio.new_event_loop()
        try:
            self._client = self._run(nats.connect(self.servers, error_cb=_ignore, **self.options))
        except (TimeoutError, OSError, NATSError) as error:
            self.close()
            raise PublisherUnavailable(f"NATS: {error or type(error).__name__}") from error
        self._stream = self._client.jetstream(publish_async_max_pending=100_000)

    def _is_alive(self) -> bool:
        """Whether the server still answers. Between two batches, its pings get no answer, and it may disconnect."""
        if self._client is None:
            return False
        try:
            self._run(self._client.flush(5))
        except (TimeoutError, OSError, NATSError):
            return False
        return bool(self._client.is_connected)

    def send(self, events: Sequence[Event], timeout: float) -> Iterator[Outcome]:
        try:
            yield from self._run(self._send(events, timeout))
        except (TimeoutError, OSError, NATSError) as error:
            raise ConnectionLost(str(error) or type(error).__name__) from error
        if not self._client.is_connected:
            raise ConnectionLost("NATS closed the connection")

    async def _send(self, events: Sequence[Event], timeout: float) -> list[Outcome]:
        outcomes: list[Outcome] = []
        sent: dict[asyncio.Future[PubAck], Event] = {}
        for event in events:
            try:
                sent[await self._publish(event)] = event
            except (MaxPayloadError, ValueError) as error:
                outcomes.append(Refused(event, f"NATS: {error}", permanent=True))
        if sent:
            done, late = await asyncio.wait(sent, timeout=timeout)
            outcomes += [outcome for future in done if (outcome := _outcome(future, sent[future])) is not None]
            for future in late:
                future.cancel()
        return outcomes

    def _publish(self, event: Event) -> Coroutine[Any, Any, asyncio.Future[PubAck]]:
        headers = {**event.headers, "Nats-Msg-Id": str(event.id), "Content-Type": event.content_type}
        if event.key:
            headers["Idempotency-Outbox-Key"] = event.key
        return self._stream.publish_async(self.prefix + event.topic, event.payload, headers=headers)  # type: ignore[no-any-return]

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        assert self._loop is not None
        return self._loop.run_until_complete(work)

    def close(self) -> None:
        client, loop, self._client, self._loop = self._client, self._loop, None, None
        if loop is None:
            return
        if client is not None:
            with suppress(TimeoutError, OSError, NATSError):
                loop.run_until_complete(asyncio.wait_for(client.close(), 5))
        loop.close()


def _outcome(future: asyncio.Future[PubAck], event: Event) -> Outcome | None:
    error = future.exception()
    if error is None:
        return Confirmed(event)
    if isinstance(error, NoStreamResponseError):
        return Refused(event, "no stream accepts its subject")
    if isinstance(error, APIError):
        return Refused(event, f"JetStream: {error.description or error.code}")
    return None


async def _ignore(_error: Exception) -> None:
    """Ignore errors, which the calls raise anyway. Otherwise the client would print them too."""
