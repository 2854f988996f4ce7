"""RabbitMQ: a batch is sent at a time. Every message is persistent, mandatory and confirmed by the broker."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import amqp
from kombu import Connection

from django_idempotency.messages.publisher import (
    Confirmed,
    ConnectionLost,
    Event,
    Outcome,
    Publisher,
    PublisherUnavailable,
    Refused,
)

PERSISTENT = 2


class RabbitMQPublisher(Publisher):
    """Publishes to ``exchange`` with the topic as the routing key. ``message_id`` is the event's id.

    An event is refused if no queue takes its message (``mandatory``) or the broker nacks it. With the default exchange,
    the topic names a queue. The key is sent in the header ``idempotency-outbox-key``.

    ``url``: ``amqp://user:password@host:port/vhost``.
    ``declare``: whether to declare the exchange, durable, with the type ``exchange_type``.
    Further options are those of ``kombu.Connection``.
    """

    def __init__(
        self, url: str, exchange: str = "", *, exchange_type: str = "topic", declare: bool = False, **options: Any
    ) -> None:
        self.url = url
        self.exchange = exchange
        self.exchange_type = exchange_type
        self.declare = declare
        self.options = options
        self._connection: Connection | None = None
        self._confirms: _Confirms | None = None
        self._blocked: str | None = None

    def connect(self) -> None:
        if self._confirms is not None:
            return
        self._blocked = None
        connection = Connection(self.url, connect_timeout=5, **self.options)
        connection.transport_options = {"on_blocked": self._hear_blocked, "on_unblocked": self._hear_unblocked}
        try:
            self._confirms = _Confirms(connection.channel())
            if self.declare:
                self._confirms.channel.exchange_declare(
                    self.exchange, self.exchange_type, durable=True, auto_delete=False
                )
        except (OSError, amqp.AMQPError) as error:
            self.close()
            raise PublisherUnavailable(f"RabbitMQ: {_words(error)}") from error
        self._connection = connection

    def send(self, events: Sequence[Event], timeout: float) -> Iterator[Outcome]:
        assert self._confirms is not None
        deadline = time.monotonic() + timeout
        try:
            self._confirms.publish(events, self.exchange)
            while self._confirms.outstanding and (left := deadline - time.monotonic()) > 0:
                self._wait(left)
                yield from self._confirms.settled()
        except (OSError, amqp.AMQPError) as error:
            yield from self._confirms.settled()
            raise ConnectionLost(_words(error)) from error
        if self._blocked is not None:
            raise PublisherUnavailable(f"RabbitMQ blocks publishers: {self._blocked}")

    def _wait(self, seconds: float) -> None:
        try:
            self._confirms.channel.connection.drain_events(timeout=seconds)  # type: ignore[union-attr]
        except TimeoutError:
            return

    def _hear_blocked(self, reason: str) -> None:
        self._blocked = reason

    def _hear_unblocked(self) -> None:
        self._blocked = None

    def close(self) -> None:
        connection, self._connection, self._confirms = self._connection, None, None
        if connection is not None:
            connection.collect()


class _Confirms:
    """A channel in confirm mode, and its messages that the broker has not confirmed yet."""

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

    def publish(self, events: Iterable[Event], exchange: str) -> None:
        with _in_full_segments(self.channel.connection.sock):
            for event in events:
                self._last_tag += 1
                self.outstanding[self._last_tag] = event
                self.channel.basic_publish(_message(event), exchange=exchange, routing_key=event.topic, mandatory=True)

    def settled(self) -> list[Outcome]:
        settled, self._settled = self._settled, []
        return settled

    def _ack(self, tag: int, multiple: bool) -> None:
        for event in self._answered(tag, multiple):
            reason = self._returned.pop(str(event.id), None)
            self._settled.append(Confirmed(event) if reason is None else Refused(event, reason))

    def _nack(self, tag: int, multiple: bool) -> None:
        self._settled += [Refused(event, "RabbitMQ refused it (nack)") for event in self._answered(tag, multiple)]

    def _return(self, error: Exception, exchange: str, routing_key: str, message: Any) -> None:
        """Note why a message was returned. The broker acknowledges it too, afterwards."""
        self._returned[message.properties["message_id"]] = f"no queue accepts it: {_words(error)}"

    def _answered(self, tag: int, multiple: bool) -> list[Event]:
        tags = range(self._oldest_tag, tag + 1) if multiple else (tag,)
        if multiple:
            self._oldest_tag = tag + 1
        return [event for number in tags if (event := self.outstanding.pop(number, None)) is not None]


@contextmanager
def _in_full_segments(sock: socket.socket) -> Iterator[None]:
    """Send what is written meanwhile in as few packets as possible, if the system can."""
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
