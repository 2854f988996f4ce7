"""RabbitMQ, with kombu."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import kombu
from amqp.exceptions import AccessRefused, AMQPError, NotFound, PreconditionFailed
from django.core.exceptions import ImproperlyConfigured
from kombu.exceptions import OperationalError

from django_idempotency.consumers.base import Consumer
from django_idempotency.consumers.messages import Message
from django_idempotency.consumers.runner import Runner

HOUR = 60 * 60
# What a copy of a message keeps. The expiration is left out: it would drop the copy from the queue in which it waits.
PROPERTIES = ("message_id", "correlation_id", "reply_to", "priority", "type", "app_id", "timestamp")


class RabbitMQ(Runner[kombu.Message]):
    """Consumes one queue. The id of a message is its ``message_id``, or what ``identify`` returns.

    ``queue``: declared durable if it doesn't exist. An existing queue is consumed as it is.
    ``dead_letters``: the queue for messages that can't be handled, by default ``<queue>.dead``.

    Messages that have to wait do so in queues with a TTL, ``<queue>.later.<seconds>``, one for each power of two. A
    message therefore never waits behind one that waits longer. Messages are published to these queues, and to the dead
    letters, with confirms, before the original is acknowledged.

    ``run()`` raises ``ImproperlyConfigured`` if one of the queues exists with other arguments, or may not be declared.
    """

    tells_redeliveries = True
    broken = (OSError, AMQPError, OperationalError)
    redelivered_after = 30 * 60  # RabbitMQ's consumer_timeout
    heartbeat = 1.0

    def __init__(
        self,
        consumer: Consumer,
        url: str,
        queue: str,
        *,
        source: str | None = None,
        dead_letters: str | None = None,
        identify: Callable[[kombu.Message], Any] = lambda received: received.properties.get("message_id"),
        **options: Any,
    ) -> None:
        super().__init__(consumer, **options)
        self.url, self.queue, self.source = url, queue, source or queue
        self.dead_letters = dead_letters or f"{queue}.dead"
        self.identify = identify
        self._received: deque[kombu.Message] = deque()

    def open(self) -> None:
        self._received.clear()  # from an earlier connection; they come again
        self.connection = kombu.Connection(self.url, heartbeat=30, transport_options={"confirm_publish": True})
        self.connection.ensure_connection(max_retries=max(1, len(self.connection.alt) - 1))  # each host, but not long
        self.publishing = self.connection.channel()
        self.producer = kombu.Producer(self.publishing)
        self._declare(self.dead_letters, {})
        self.receiving = kombu.Consumer(
            self._channel_to_queue(),
            [kombu.Queue(self.queue)],
            on_message=self._received.append,
            on_decode_error=lambda message, _error: self._received.append(message),
            prefetch_count=self.ahead,
            auto_declare=False,
        )
        self.receiving.consume()

    def receive(self, most: int, timeout: float) -> Iterable[kombu.Message]:
        with suppress(TimeoutError):
            while len(self._received) < most:
                self.connection.drain_events(timeout=timeout)
                timeout = 0.001  # only what has already arrived
        return [self._received.popleft() for _n in range(min(most, len(self._received)))]

    def beat(self) -> None:
        """Hear the broker's heartbeats, and send ours. Each side closes the connection if it misses the other's."""
        with suppress(TimeoutError):
            self.connection.drain_events(timeout=0.001)
        self.connection.heartbeat_check()

    def message(self, received: kombu.Message) -> Message:
        headers = {str(name): str(value) for name, value in (received.headers or {}).items()}
        body = received.body if isinstance(received.body, bytes) else str(received.body).encode()
        redelivered = bool(received.delivery_info.get("redelivered"))
        return Message(self.source, self.identify(received), body, headers, redelivered)

    def ack(self, received: kombu.Message) -> None:
        received.ack()

    def later(self, received: kombu.Message, delay: float) -> None:
        seconds = 2 ** max(0, math.ceil(math.log2(max(delay, 1))))
        arguments = {
            "x-message-ttl": seconds * 1000,
            "x-dead-letter-exchange": "",
            "x-dead-letter-routing-key": self.queue,
            "x-expires": (seconds + HOUR) * 1000,  # counted from the last declaration, which is now
        }
        self._move(received, f"{self.queue}.later.{seconds}", {}, arguments)

    def dead_letter(self, received: kombu.Message, headers: dict[str, str]) -> None:
        self._move(received, self.dead_letters, headers, {})

    def _move(self, received: kombu.Message, queue: str, headers: dict[str, str], arguments: dict[str, Any]) -> None:
        self._declare(queue, arguments)
        kept: dict[str, Any] = {
            name: received.properties[name] for name in PROPERTIES if received.properties.get(name) is not None
        }
        self.producer.publish(
            received.body,
            routing_key=queue,
            content_type=received.content_type or "application/octet-stream",
            content_encoding=received.content_encoding or "binary",
            headers={**(received.headers or {}), **headers},
            compression=_compression(received),
            delivery_mode=2,
            **kept,
        )
        received.ack()

    def _channel_to_queue(self) -> Any:
        """Return a channel. Declare the queue if it doesn't exist."""
        channel = self.connection.channel()
        try:
            kombu.Queue(self.queue)(channel).queue_declare(passive=True)
        except NotFound:  # which closes the channel
            self._declare(self.queue, {})
            return self.connection.channel()
        return channel

    def _declare(self, queue: str, arguments: dict[str, Any]) -> None:
        """Declare ``queue``. Raises ``ImproperlyConfigured`` for errors that no reconnection would change."""
        try:
            kombu.Queue(queue, durable=True, queue_arguments=arguments)(self.publishing).declare()
        except PreconditionFailed as error:
            raise ImproperlyConfigured(
                f"The queue {queue!r} already exists, with other arguments than this consumer declares. RabbitMQ "
                f"says: {error.reply_text}. Empty and delete the queue, so that the consumer can declare it again; "
                "or, if it holds dead letters, name another queue for them with dead_letters=…."
            ) from error
        except AccessRefused as error:
            raise ImproperlyConfigured(
                f"The queue {queue!r} can't be declared. RabbitMQ says: {error.reply_text}. Grant the consumer's user "
                "the permission to configure it, or name another queue."
            ) from error

    def close(self) -> None:
        self.connection.release()


def _compression(received: kombu.Message) -> str | None:
    """Return how kombu has decompressed the body. If it could not, the body is as it came."""
    return None if received.errors else received.headers.get("compression")
