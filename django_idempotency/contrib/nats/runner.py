"""NATS JetStream, with nats-py."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import nats
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import Error as NATSError
from nats.js.api import AckPolicy, ConsumerConfig
from nats.js.errors import APIError, NoStreamResponseError, NotFoundError

from django_idempotency.messages.consumer import Consumer
from django_idempotency.messages.message import ORIGINAL_ID, Message
from django_idempotency.messages.runner import NotTaken, Runner

T = TypeVar("T")
ID = "Nats-Msg-Id"


class JetStream(Runner[Msg]):
    """Consumes a stream with a durable pull consumer. Creates both if they don't exist.

    The id of a message is what ``identify`` returns; by default, its header ``Nats-Msg-Id``, or else its sequence
    number in the stream. A dead letter keeps its stream and that in the header ``idempotency-id``, which comes first.

    ``ack_wait``: seconds after which the server delivers an unacknowledged message again. For a message at work,
    ``in_progress`` is sent three times as often.
    ``max_deliver``: how often a message is delivered at most, whatever becomes of it; -1 for no limit.
    ``dead_letters``: the subject for messages that can't be handled, by default ``<durable>.dead``. A stream has to
    take it.

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
        max_deliver: int = -1,
        identify: Callable[[Msg], Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(consumer, **options)
        self.servers, self.subject, self.stream = servers, subject, stream
        self.durable = durable or consumer.name
        self.dead_letters = dead_letters or f"{self.durable}.dead"
        self.identify = identify or _identify
        self.redelivered_after: float = ack_wait
        self.max_deliver = max_deliver

    tells_redeliveries = True
    broken = (OSError, NATSError)  # a TimeoutError is an OSError

    def open(self) -> None:
        self.client: Client | None = None
        self._loop = asyncio.new_event_loop()
        self._await(self._subscribe())

    async def _subscribe(self) -> None:
        self.client = await nats.connect(self.servers, allow_reconnect=False, error_cb=_ignore)
        self.jetstream = self.client.jetstream()
        try:
            await self.jetstream.stream_info(self.stream)
        except NotFoundError:
            await self.jetstream.add_stream(name=self.stream, subjects=[self.subject, self.dead_letters])
        config = ConsumerConfig(
            ack_policy=AckPolicy.EXPLICIT,
            ack_wait=self.redelivered_after,
            max_deliver=self.max_deliver,
            max_ack_pending=max(1000, self.batch),
        )
        self.subscription = await self.jetstream.pull_subscribe(
            self.subject, durable=self.durable, stream=self.stream, config=config
        )
        found = await self.subscription.consumer_info()  # an existing consumer has its own times
        self.heartbeat = (found.config.ack_wait or self.redelivered_after) / 3

    def _await(self, work: Coroutine[Any, Any, T], timeout: float = 10) -> T:
        return self._loop.run_until_complete(asyncio.wait_for(work, timeout))

    def receive(self, most: int, timeout: float) -> Iterable[Msg]:
        assert self.client is not None
        if not self.client.is_connected:
            raise ConnectionError("NATS closed the connection")
        with suppress(TimeoutError):  # the base class of NATS' own
            return self._await(self.subscription.fetch(most, timeout=timeout), timeout + 10)
        return []

    def message(self, received: Msg) -> Message:
        redelivered = received.metadata.num_delivered > 1
        return Message(self.stream, self.identify(received), received.data, dict(received.headers or {}), redelivered)

    def ack(self, received: Sequence[Msg]) -> None:
        for each in received:
            self._await(each.ack())

    def later(self, received: Msg, delay: float) -> None:
        self._await(received.nak(delay=delay))

    def dead_letter(self, received: Msg, headers: dict[str, str]) -> None:
        kept = {name: value for name, value in (received.headers or {}).items() if name != ID}
        first = kept.get(ORIGINAL_ID) or _own(received) + _identify(received)
        sent_headers = {**kept, ORIGINAL_ID: first, **headers}  # by ID, the stream would drop it as a duplicate
        try:
            self._await(self.jetstream.publish(self.dead_letters, received.data, headers=sent_headers))
        except NoStreamResponseError as error:
            raise NotTaken(f"no stream accepts the subject {self.dead_letters}") from error
        except APIError as error:
            raise NotTaken(f"JetStream: {error.description or error.code}") from error
        self._await(received.term())

    def keep_alive(self) -> None:
        for received in self.at_work:
            self._await(received.in_progress())
        assert self.client is not None
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
    """Return what stands before the id of a message of this stream. Two streams have the same sequence numbers."""
    return f"{received.metadata.stream}/"


async def _ignore(_error: Exception) -> None:
    """Ignore errors, which the calls raise anyway. Otherwise the client would log them too."""
