"""NATS JetStream, with nats-py."""

from __future__ import annotations

import asyncio
import time
from collections.abc import (
    AsyncIterator,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    Sequence,
)
from contextlib import suppress
from typing import Any, TypeVar

import nats
from nats.aio.msg import Msg
from nats.errors import Error as NATSError
from nats.errors import MaxPayloadError
from nats.js.api import AckPolicy, ConsumerConfig, PubAck
from nats.js.errors import APIError, NoStreamResponseError, NotFoundError

from django_idempotency import Message
from django_idempotency.extending.brokers import (
    ORIGINAL_ID,
    Confirmed,
    ConnectionLost,
    Event,
    NotTaken,
    Outcome,
    Publisher,
    PublisherUnavailable,
    Refused,
    Runner,
)
from django_idempotency.messages import Consumer

T = TypeVar("T")
ID = "Nats-Msg-Id"


class JetStream(Runner[Msg]):
    """Consumes a stream with a durable pull consumer. Creates both if they don't exist.

    The id of a message is what ``identify`` returns; by default, its header
    ``Nats-Msg-Id``, or else its sequence number in the stream. A dead letter keeps its
    stream and that in the header ``idempotency-id``, which comes first.

    ``ack_wait``: seconds after which the server delivers an unacknowledged message
    again. For a message at work, ``in_progress`` is sent three times as often.
    ``dead_letters``: the subject for messages that can't be handled, by default
    ``<durable>.dead``. A stream has to take it.

    An existing consumer is used as it is, with its own times.
    """

    def __init__(
        self,
        consumer: Consumer,
        servers: str,
        subject: str,
        *,
        stream: str,
        durable: str | None = None,
        dead_letters: str | None = None,
        ack_wait: float = 30,
        identify: Callable[[Msg], Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(consumer, **options)
        self.servers, self.subject, self.stream = servers, subject, stream
        self.durable = durable or consumer.name
        self.dead_letters = dead_letters or f"{self.durable}.dead"
        self.identify = identify or _identify
        self.redelivered_after: float = ack_wait

    tells_redeliveries = True
    broken = (OSError, NATSError)  # a TimeoutError is an OSError

    def open(self) -> None:
        self.client: Any = None
        self._loop = asyncio.new_event_loop()
        self._await(self._subscribe())

    async def _subscribe(self) -> None:
        self.client = await nats.connect(
            self.servers, allow_reconnect=False, error_cb=_ignore
        )
        self.jetstream = self.client.jetstream()
        try:
            await self.jetstream.stream_info(self.stream)
        except NotFoundError:
            await self.jetstream.add_stream(
                name=self.stream, subjects=[self.subject, self.dead_letters]
            )
        config = ConsumerConfig(
            ack_policy=AckPolicy.EXPLICIT,
            ack_wait=self.redelivered_after,
            max_ack_pending=max(1000, self.batch),
        )
        self.subscription = await self.jetstream.pull_subscribe(
            self.subject, durable=self.durable, stream=self.stream, config=config
        )
        # an existing consumer has its own times
        found = await self.subscription.consumer_info()
        self.heartbeat = (found.config.ack_wait or self.redelivered_after) / 3

    def _await(self, work: Coroutine[Any, Any, T], timeout: float = 10) -> T:
        return self._loop.run_until_complete(asyncio.wait_for(work, timeout))

    def receive(self, most: int, timeout: float) -> Iterable[Msg]:
        if not self.client.is_connected:
            raise ConnectionError("NATS closed the connection")
        with suppress(TimeoutError):  # the base class of NATS' own
            return self._await(
                self.subscription.fetch(most, timeout=timeout), timeout + 10
            )
        return []

    def message(self, received: Msg) -> Message:
        redelivered = received.metadata.num_delivered > 1
        return Message(
            self.stream,
            self.identify(received),
            received.data,
            dict(received.headers or {}),
            redelivered,
        )

    def ack(self, received: Sequence[Msg]) -> None:
        for each in received:
            self._await(each.ack())

    def later(self, received: Msg, delay: float) -> None:
        self._await(received.nak(delay=delay))

    def dead_letter(self, received: Msg, headers: dict[str, str]) -> None:
        kept = {
            name: value
            for name, value in (received.headers or {}).items()
            if name != ID
        }
        first = kept.get(ORIGINAL_ID) or _own(received) + _identify(received)
        # by ID, the stream would drop it as a duplicate
        sent_headers = {**kept, ORIGINAL_ID: first, **headers}
        try:
            self._await(
                self.jetstream.publish(
                    self.dead_letters, received.data, headers=sent_headers
                )
            )
        except NoStreamResponseError as error:
            raise NotTaken(
                f"no stream accepts the subject {self.dead_letters}"
            ) from error
        except APIError as error:
            raise NotTaken(f"JetStream: {error.description or error.code}") from error
        self._await(received.term())

    def keep_alive(self) -> None:
        for received in self.at_work:
            self._await(received.in_progress())
        self._await(self.client.flush())  # which responds to the server's pings too

    def close(self) -> None:
        if self.client is not None:
            with suppress(OSError, NATSError):
                self._await(self.client.close())
        self._loop.close()


def _identify(received: Msg) -> str:
    headers = received.headers or {}
    first = headers.get(ORIGINAL_ID, "").removeprefix(_own(received))
    return first or headers.get(ID) or str(received.metadata.sequence.stream)


def _own(received: Msg) -> str:
    """Return what stands before the id of a message of this stream. Two streams have
    the same sequence numbers.
    """
    return f"{received.metadata.stream}/"


async def _ignore(_error: Exception) -> None:
    """Ignore errors, which the calls raise anyway. Otherwise the client would log them
    too.
    """


# --- Publishing -----------------------------------------------------------------------


class NATSPublisher(Publisher):
    """Publishes to the subject ``prefix`` + topic. ``Nats-Msg-Id`` is the event's id,
    by which streams deduplicate.

    An event is refused if no stream listens to its subject. The key is sent in the
    header ``Idempotency-Outbox-Key``.

    ``servers``: one URL or several. Further options are those of ``nats.connect``.
    """

    def __init__(
        self, servers: str | Sequence[str], *, prefix: str = "", **options: Any
    ) -> None:
        self.servers = [servers] if isinstance(servers, str) else list(servers)
        self.prefix = prefix
        once = {
            "allow_reconnect": False,
            "max_reconnect_attempts": 1,
            "reconnect_time_wait": 0.1,
        }
        self.options = {"connect_timeout": 5, **once, **options}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._client: Any = None

    def connect(self) -> None:
        if self._is_alive():
            return
        self.close()
        self._loop = asyncio.new_event_loop()
        try:
            self._client = self._run(
                nats.connect(self.servers, error_cb=_ignore, **self.options)
            )
        except (TimeoutError, OSError, NATSError) as error:
            self.close()
            raise PublisherUnavailable(
                f"NATS: {error or type(error).__name__}"
            ) from error
        self._stream = self._client.jetstream(publish_async_max_pending=100_000)

    def _is_alive(self) -> bool:
        """Whether the server still answers. Between two batches, its pings get no
        answer, and it may disconnect.
        """
        if self._client is None:
            return False
        try:
            self._run(self._client.flush(5))
        except (TimeoutError, OSError, NATSError):
            return False
        return bool(self._client.is_connected)

    def send(self, events: Iterable[Event], timeout: float) -> Iterator[Outcome]:
        sending = self._send(events, timeout)
        try:
            while (outcomes := self._run(anext(sending, None))) is not None:
                yield from outcomes
        except (TimeoutError, OSError, NATSError) as error:
            raise ConnectionLost(str(error) or type(error).__name__) from error
        if not self._client.is_connected:
            raise ConnectionLost("NATS closed the connection")

    async def _send(
        self, events: Iterable[Event], timeout: float
    ) -> AsyncIterator[list[Outcome]]:
        deadline, acks = 0.0, asyncio.Queue[asyncio.Future[PubAck]]()
        waiting: dict[asyncio.Future[PubAck], Event] = {}
        try:
            while True:
                for event in events:
                    deadline = time.monotonic() + timeout
                    try:
                        ack = await self._publish(event)
                    except (MaxPayloadError, ValueError) as error:
                        yield [Refused(event, f"NATS: {error}", permanent=True)]
                    else:
                        waiting[ack] = event
                        ack.add_done_callback(acks.put_nowait)
                if not waiting:
                    return
                try:
                    async with asyncio.timeout(deadline - time.monotonic()):
                        done = [await acks.get()]
                except TimeoutError:
                    return
                done += (acks.get_nowait() for _ in range(acks.qsize()))
                outcomes = [_outcome(ack, waiting.pop(ack)) for ack in done]
                yield [outcome for outcome in outcomes if outcome is not None]
        finally:
            for ack in waiting:
                ack.cancel()

    async def _publish(self, event: Event) -> asyncio.Future[PubAck]:
        headers = {
            **event.headers,
            ID: str(event.id),
            "Content-Type": event.content_type,
        }
        if event.key:
            headers["Idempotency-Outbox-Key"] = event.key
        ack: asyncio.Future[PubAck] = await self._stream.publish_async(
            self.prefix + event.topic, event.payload, headers=headers
        )
        return ack

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
