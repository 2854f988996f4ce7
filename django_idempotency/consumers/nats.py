"""NATS JetStream, with nats-py."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from typing import Any, TypeVar

import nats
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import Error as NATSError
from nats.js.api import AckPolicy, ConsumerConfig
from nats.js.errors import APIError, NoStreamResponseError, NotFoundError

from django_idempotency.consumers.base import Consumer
from django_idempotency.consumers.messages import ORIGINAL_ID, Message
from django_idempotency.consumers.runner import DeadLetterNotTaken, Runner

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
        self.extended = 0
        self.redelivered_after: float = ack_wait
        self.max_deliver = max_deliver

    tells_redeliveries = True
    broken = (OSError, NATSError, FutureTimeout)

    def open(self) -> None:
        self.client: Client | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="idempotency-jetstream", daemon=True)
        self._thread.start()
        self._await(self._subscribe())

    async def _subscribe(self) -> None:
        self.client = await nats.connect(self.servers)
        self.jetstream = self.client.jetstream()
        try:
            await self.jetstream.stream_info(self.stream)
        except NotFoundError:
            await self.jetstream.add_stream(name=self.stream, subjects=[self.subject, self.dead_letters])
        config = ConsumerConfig(
            ack_policy=AckPolicy.EXPLICIT,
            ack_wait=self.redelivered_after,
            max_deliver=self.max_deliver,
            max_ack_pending=max(1000, self.ahead),
        )
        self.subscription = await self.jetstream.pull_subscribe(
            self.subject, durable=self.durable, stream=self.stream, config=config
        )
        found = await self.subscription.consumer_info()  # an existing consumer has its own times
        self.heartbeat = (found.config.ack_wait or self.redelivered_after) / 3

    def _await(self, work: Coroutine[Any, Any, T], timeout: float = 10) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout)

    def receive(self, most: int, timeout: float) -> Iterable[Msg]:
        try:
            return self._await(self.subscription.fetch(most, timeout=timeout), timeout + 10)
        except TimeoutError:  # the base class of NATS' own
            return []

    def message(self, received: Msg) -> Message:
        redelivered = received.metadata.num_delivered > 1
        return Message(self.stream, self.identify(received), received.data, dict(received.headers or {}), redelivered)

    def ack(self, received: Msg) -> None:
        self._await(received.ack())

    def later(self, received: Msg, delay: float) -> None:
        self._await(received.nak(delay=delay))

    def dead_letter(self, received: Msg, headers: dict[str, str]) -> None:
        kept = {name: value for name, value in (received.headers or {}).items() if name != ID}
        first = kept.get(ORIGINAL_ID) or _own(received) + _identify(received)
        told = {**kept, ORIGINAL_ID: first, **headers}  # by ID, the stream would drop it as a duplicate
        try:
            self._await(self.jetstream.publish(self.dead_letters, received.data, headers=told))
        except NoStreamResponseError as error:
            raise DeadLetterNotTaken(f"no stream accepts the subject {self.dead_letters}") from error
        except APIError as error:
            raise DeadLetterNotTaken(f"JetStream: {error.description or error.code}") from error
        self._await(received.term())

    def extend(self, received: Msg) -> None:
        self.extended += 1
        self._await(received.in_progress())

    def close(self) -> None:
        with suppress(Exception):
            if self.client is not None:
                self._await(self.client.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def _identify(received: Msg) -> str:
    headers = received.headers or {}
    first = headers.get(ORIGINAL_ID, "").removeprefix(_own(received))
    return first or headers.get(ID) or str(received.metadata.sequence.stream)


def _own(received: Msg) -> str:
    """Return what stands before the id of a message of this stream. Two streams have the same sequence numbers."""
    return f"{received.metadata.stream}/"
