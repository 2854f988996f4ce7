"""RabbitMQ, with kombu."""

from __future__ import annotations

import math
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import amqp
import kombu
from amqp.exceptions import (
    AccessRefused,
    AMQPError,
    MessageNacked,
    NotFound,
    PreconditionFailed,
)
from django.core.exceptions import ImproperlyConfigured
from kombu.exceptions import OperationalError

from django_idempotency import Message
from django_idempotency.extending.brokers import (
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

HOUR = 60 * 60
CONFIRM = 10.0  # seconds for the broker to confirm a message
# What a copy of a message keeps. The expiration is left out: it would drop the copy
# from the queue in which it waits.
PROPERTIES = (
    "message_id",
    "correlation_id",
    "reply_to",
    "priority",
    "type",
    "app_id",
    "timestamp",
)
PERSISTENT = 2


class RabbitMQ(Runner[kombu.Message]):
    """Consumes one queue. The id of a message is its ``message_id``, or what
    ``identify`` returns.

    ``queue``: declared durable if it doesn't exist. An existing queue is consumed as it
    is. ``dead_letters``: the queue for messages that can't be handled, by default
    ``<queue>.dead``. ``ahead``: how many messages RabbitMQ sends before the first is
    acknowledged, by default four times ``batch``.

    Messages that have to wait do so in queues with a TTL, ``<queue>.later.<seconds>``,
    one for each power of two. A message therefore never waits behind one that waits
    longer. Messages are published to these queues, and to the dead letters, with
    confirms, before the original is acknowledged. This takes a connection of its own,
    because RabbitMQ stops connections that publish when it is short of memory or disk
    space.

    ``run()`` raises ``ImproperlyConfigured`` if one of the queues exists with other
    arguments, or may not be declared.
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
        ahead: int | None = None,
        identify: Callable[[kombu.Message], Any] = lambda received: (
            received.properties.get("message_id")
        ),
        **options: Any,
    ) -> None:
        super().__init__(consumer, **options)
        self.url, self.queue, self.source = url, queue, source or queue
        self.dead_letters = dead_letters or f"{queue}.dead"
        self.ahead = ahead or 4 * self.batch
        self.identify = identify
        self._received: deque[kombu.Message] = deque()

    def open(self) -> None:
        self._received.clear()  # from an earlier connection; they are redelivered
        callbacks = {
            "on_blocked": self._hear_blocked,
            "on_unblocked": self._hear_unblocked,
        }
        self.connection, self.publishing = (
            self._connection(),
            self._connection(confirm_publish=True, **callbacks),
        )
        self._connect(self.connection)
        self._begin_publishing()
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

    def _connection(self, **options: Any) -> kombu.Connection:
        return kombu.Connection(self.url, heartbeat=30, transport_options=options)

    def _connect(self, connection: kombu.Connection) -> None:
        # each host, but not long
        connection.ensure_connection(max_retries=max(1, len(connection.alt) - 1))

    def _begin_publishing(self) -> None:
        self.publishing.collect()
        self._is_blocked = self._is_unconfirmed = False
        self._connect(self.publishing)
        self._channel = self.publishing.channel()
        self.producer = kombu.Producer(self._channel)

    def _hear_blocked(self, reason: str) -> None:
        self._is_blocked = True
        raise NotTaken(f"RabbitMQ blocks publishers: {reason}")

    def _hear_unblocked(self) -> None:
        self._is_blocked = False

    def receive(self, most: int, timeout: float) -> Iterable[kombu.Message]:
        with suppress(TimeoutError):
            while len(self._received) < most:
                self.connection.drain_events(
                    timeout=0.001 if self._received else timeout
                )
        return [
            self._received.popleft() for _n in range(min(most, len(self._received)))
        ]

    def keep_alive(self) -> None:
        """Hear the broker's heartbeats, and send ours. Each side closes the connection
        if it misses the other's.
        """
        for connection in (self.connection, self.publishing):
            with suppress(TimeoutError, NotTaken):
                connection.drain_events(timeout=0.001)
            connection.heartbeat_check()

    def message(self, received: kombu.Message) -> Message:
        headers = {
            str(name): str(value) for name, value in (received.headers or {}).items()
        }
        body = (
            received.body
            if isinstance(received.body, bytes)
            else str(received.body).encode()
        )
        redelivered = bool(received.delivery_info.get("redelivered"))
        return Message(self.source, self.identify(received), body, headers, redelivered)

    def ack(self, received: Sequence[kombu.Message]) -> None:
        for each in received:
            each.ack()

    def later(self, received: kombu.Message, delay: float) -> None:
        seconds = 2 ** max(0, math.ceil(math.log2(max(delay, 1))))
        arguments = {
            "x-message-ttl": seconds * 1000,
            "x-dead-letter-exchange": "",
            "x-dead-letter-routing-key": self.queue,
            # counted from the last declaration, which is now
            "x-expires": (seconds + HOUR) * 1000,
        }
        self._move(received, f"{self.queue}.later.{seconds}", {}, arguments)

    def dead_letter(self, received: kombu.Message, headers: dict[str, str]) -> None:
        self._move(received, self.dead_letters, headers, {})

    def _move(
        self,
        received: kombu.Message,
        queue: str,
        headers: dict[str, str],
        arguments: dict[str, Any],
    ) -> None:
        kept: dict[str, Any] = {
            name: received.properties[name]
            for name in PROPERTIES
            if received.properties.get(name) is not None
        }
        if self._is_blocked:
            raise NotTaken("RabbitMQ blocks publishers")
        # or else a late confirm of one message would be taken for that of the next
        if self._is_unconfirmed:
            self._begin_publishing()
        self._is_unconfirmed = True
        try:
            self._declare(queue, arguments, nowait=True)
            with _explained(queue):
                self.producer.publish(
                    received.body,
                    routing_key=queue,
                    content_type=received.content_type or "application/octet-stream",
                    content_encoding=received.content_encoding or "binary",
                    headers={**(received.headers or {}), **headers},
                    # As kombu has decompressed the body. If it could not, the body is
                    # as it came.
                    compression=(
                        None if received.errors else received.headers.get("compression")
                    ),
                    delivery_mode=PERSISTENT,
                    timeout=CONFIRM,
                    confirm_timeout=CONFIRM,
                    **kept,
                )
        except (TimeoutError, MessageNacked) as error:
            raise NotTaken(
                f"RabbitMQ did not confirm it: {error or type(error).__name__}"
            ) from error
        self._is_unconfirmed = False
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

    def _declare(
        self, queue: str, arguments: dict[str, Any], *, nowait: bool = False
    ) -> None:
        """Declare ``queue``. Raises ``ImproperlyConfigured`` for errors that no
        reconnection would change.
        """
        with _explained(queue):
            kombu.Queue(queue, durable=True, queue_arguments=arguments)(
                self._channel
            ).declare(nowait=nowait)

    def close(self) -> None:
        self.publishing.collect()  # a blocked connection would not respond to a goodbye
        self.connection.release()


@contextmanager
def _explained(queue: str) -> Iterator[None]:
    """Raise ``ImproperlyConfigured`` for errors in declaring ``queue`` that no
    reconnection would change.
    """
    try:
        yield
    except (AccessRefused, PreconditionFailed) as error:
        raise ImproperlyConfigured(
            f"The queue {queue!r} can't be declared. RabbitMQ says: {error.reply_text}."
            " If it exists with other arguments than this consumer declares, empty and"
            " delete it, or name another queue for dead letters with dead_letters=…."
            " Otherwise, grant the consumer's user the permission to configure it."
        ) from error


# --- Publishing -----------------------------------------------------------------------


class RabbitMQPublisher(Publisher):
    """Publishes to ``exchange`` with the topic as the routing key. ``message_id`` is
    the event's id.

    An event is refused if no queue takes its message (``mandatory``) or the broker
    nacks it. With the default exchange, the topic names a queue. The key is sent in the
    header ``idempotency-outbox-key``.

    ``url``: ``amqp://user:password@host:port/vhost``.
    ``exchange``: one that exists.
    Further options are those of ``kombu.Connection``.
    """

    def __init__(self, url: str, exchange: str = "", **options: Any) -> None:
        self.url = url
        self.exchange = exchange
        self.options = options
        self._connection: kombu.Connection | None = None
        self._confirms: _Confirms | None = None
        self._blocked: str | None = None

    def connect(self) -> None:
        if self._confirms is not None:
            return
        self._blocked = None
        self._connection = kombu.Connection(self.url, connect_timeout=5, **self.options)
        self._connection.transport_options = {
            "on_blocked": self._hear_blocked,
            "on_unblocked": self._hear_unblocked,
        }
        try:
            self._confirms = _Confirms(self._connection.channel())
        except (OSError, AMQPError) as error:
            self.close()
            raise PublisherUnavailable(f"RabbitMQ: {_words(error)}") from error

    def send(self, events: Iterable[Event], timeout: float) -> Iterator[Outcome]:
        confirms, deadline = self._confirms, 0.0
        assert confirms is not None
        try:
            while True:
                if self._blocked is None and confirms.publish(events, self.exchange):
                    deadline = time.monotonic() + timeout
                left = deadline - time.monotonic()
                if not confirms.outstanding or left <= 0:
                    break
                with suppress(TimeoutError):
                    confirms.channel.connection.drain_events(timeout=left)
                yield from confirms.settled()
        except (OSError, AMQPError) as error:
            yield from confirms.settled()
            raise ConnectionLost(_words(error)) from error
        if self._blocked is not None:
            raise PublisherUnavailable(f"RabbitMQ blocks publishers: {self._blocked}")

    def _hear_blocked(self, reason: str) -> None:
        self._blocked = reason

    def _hear_unblocked(self) -> None:
        self._blocked = None

    def close(self) -> None:
        connection, self._connection, self._confirms = self._connection, None, None
        if connection is not None:
            connection.collect()


class _Confirms:
    """A channel in confirm mode, and its messages that the broker has not confirmed
    yet.
    """

    def __init__(self, channel: Any) -> None:
        self.channel = channel
        self.outstanding: dict[int, Event] = {}
        self._last_tag = 0
        self._oldest_tag = 1
        self._returned: dict[str, str] = {}
        self._settled: list[Outcome] = []
        channel.confirm_select()
        channel.events["basic_ack"].add(self._ack)
        channel.events["basic_nack"].add(self._nack)
        channel.events["basic_return"].add(self._return)

    def publish(self, events: Iterable[Event], exchange: str) -> bool:
        """Publish ``events``. Return whether there were any."""
        before = self._last_tag
        with _in_full_segments(self.channel.connection.sock):
            for event in events:
                self._last_tag += 1
                self.outstanding[self._last_tag] = event
                self.channel.basic_publish(
                    _message(event),
                    exchange=exchange,
                    routing_key=event.topic,
                    mandatory=True,
                )
        return self._last_tag > before

    def settled(self) -> list[Outcome]:
        settled, self._settled = self._settled, []
        return settled

    def _ack(self, tag: int, multiple: bool) -> None:
        for event in self._answered(tag, multiple):
            reason = self._returned.pop(str(event.id), None)
            self._settled.append(
                Confirmed(event) if reason is None else Refused(event, reason)
            )

    def _nack(self, tag: int, multiple: bool) -> None:
        self._settled += [
            Refused(event, "RabbitMQ refused it (nack)")
            for event in self._answered(tag, multiple)
        ]

    def _return(
        self, error: Exception, exchange: str, routing_key: str, message: Any
    ) -> None:
        """Note why a message was returned. The broker acknowledges it too,
        afterwards.
        """
        self._returned[message.properties["message_id"]] = (
            f"no queue accepts it: {_words(error)}"
        )

    def _answered(self, tag: int, multiple: bool) -> list[Event]:
        tags = range(self._oldest_tag, tag + 1) if multiple else (tag,)
        if multiple:
            self._oldest_tag = tag + 1
        return [
            event
            for number in tags
            if (event := self.outstanding.pop(number, None)) is not None
        ]


@contextmanager
def _in_full_segments(sock: socket.socket) -> Iterator[None]:
    """Send what is written meanwhile in as few packets as possible, if the system can:
    a fifth more events a second.
    """
    cork = getattr(socket, "TCP_CORK", None)
    if cork is None:
        yield
        return
    sock.setsockopt(socket.IPPROTO_TCP, cork, 1)
    try:
        yield
    finally:
        with suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, cork, 0)


def _message(event: Event) -> amqp.Message:
    headers: Mapping[str, str] = event.headers
    if event.key:
        headers = {**headers, "idempotency-outbox-key": event.key}
    return amqp.Message(
        event.payload,
        message_id=str(event.id),
        content_type=event.content_type,
        delivery_mode=PERSISTENT,
        application_headers=dict(headers),
    )


def _words(error: Exception) -> str:
    return str(error) or type(error).__name__
