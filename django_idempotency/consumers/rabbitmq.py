"""RabbitMQ, by kombu."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import kombu
from amqp.exceptions import AccessRefused, AMQPError, NotFound, PreconditionFailed
from django.core.exceptions import ImproperlyConfigured
from kombu.exceptions import OperationalError

from django_idempotency.consumers.base import Consumer
from django_idempotency.consumers.messages import Message
from django_idempotency.consumers.runner import Runner

HOUR = 60 * 60
# What a copy of a message keeps. Not the expiration, which would drop it from a queue in which it has to wait.
PROPERTIES = ("message_id", "correlation_id", "reply_to", "priority", "type", "app_id", "timestamp")


class RabbitMQ(Runner[kombu.Message]):
    """Consumes one queue. The id of a message is its ``message_id``, or what ``identify`` says.

    ``queue``: declared durable if it is not there; one that is there is consumed as it is.
    ``dead_letters``: the queue for what can't be handled, ``<queue>.dead`` unless stated. What has to wait does so in a
    queue with a TTL, ``<queue>.later.<seconds>``, one for each power of two: a message never waits behind one that
    waits longer. Both are published to with confirms, before the original is acknowledged.

    Running it raises ``ImproperlyConfigured`` if one of these queues is there with other arguments, or may not be
    declared.
    """

    broken = (OSError, AMQPError, OperationalError)
    redelivered_after = 30 * 60  # RabbitMQ's consumer_timeout

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
        self._received.clear()  # of a connection before: it comes again
        self.connection = kombu.Connection(self.url, heartbeat=30, transport_options={"confirm_publish": True})
        self.connection.ensure_connection(max_retries=10)
        self.publishing = self.connection.channel()
        self.producer = kombu.Producer(self.publishing)
        self._declare(self.dead_letters, {})
        self.receiving = kombu.Consumer(
            self._channel_to_queue(),
            [kombu.Queue(self.queue)],
            on_message=self._received.append,
            prefetch_count=self.ahead,
            auto_declare=False,
        )
        self.receiving.consume()

    def receive(self, most: int, timeout: float) -> Iterable[kombu.Message]:
        try:
            while len(self._received) < most:
                self.connection.drain_events(timeout=timeout)
                timeout = 0.001  # what has come already
        except TimeoutError:
            self.connection.heartbeat_check()
        return [self._received.popleft() for _n in range(min(most, len(self._received)))]

    def message(self, received: kombu.Message) -> Message:
        headers = {str(name): str(value) for name, value in (received.headers or {}).items()}
        body = received.body if isinstance(received.body, bytes) else str(received.body).encode()
        return Message(self.source, self.identify(received), body, headers)

    def ack(self, received: kombu.Message) -> None:
        received.ack()

    def later(self, received: kombu.Message, delay: float) -> None:
        seconds = 2 ** max(0, math.ceil(math.log2(max(delay, 1))))
        arguments = {
            "x-message-ttl": seconds * 1000,
            "x-dead-letter-exchange": "",
            "x-dead-letter-routing-key": self.queue,
            "x-expires": (seconds + HOUR) * 1000,  # from the last declaration, which is just now
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
            delivery_mode=2,
            **kept,
        )
        received.ack()

    def _channel_to_queue(self) -> Any:
        """A channel, with the queue there."""
        channel = self.connection.channel()
        try:
            kombu.Queue(self.queue)(channel).queue_declare(passive=True)
        except NotFound:  # which closes the channel
            self._declare(self.queue, {})
            return self.connection.channel()
        return channel

    def _declare(self, queue: str, arguments: dict[str, Any]) -> None:
        """Raises ``ImproperlyConfigured`` for what would be the same after every reconnection."""
        try:
            kombu.Queue(queue, durable=True, queue_arguments=arguments)(self.publishing).declare()
        except PreconditionFailed as error:
            raise ImproperlyConfigured(
                f"The queue {queue!r} exists with other arguments than this consumer declares it with. "
                f"RabbitMQ says: {error.reply_text}. Empty and delete the queue, so that the consumer declares it "
                "anew; or, if it holds dead letters, name another queue for them with dead_letters=…."
            ) from error
        except AccessRefused as error:
            raise ImproperlyConfigured(
                f"The queue {queue!r} can't be declared. RabbitMQ says: {error.reply_text}. Grant the consumer's user "
                "the permission to configure it, or name another queue."
            ) from error

    def close(self) -> None:
        self.connection.release()
