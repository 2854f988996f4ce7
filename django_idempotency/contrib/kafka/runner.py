"""Kafka, with confluent-kafka."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

from confluent_kafka import Consumer as Client
from confluent_kafka import KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka import Message as KafkaMessage
from django.core.exceptions import ImproperlyConfigured

from django_idempotency.messages.consumer import Consumer
from django_idempotency.messages.message import ORIGINAL_ID, Message
from django_idempotency.messages.runner import NotTaken, Runner

CONFIRM = 30.0
ASK_AFTER, ASK_FOR = 10.0, 2.0  # seconds of silence before the cluster is asked whether it is there, and for its answer
LOGGER = logging.getLogger("django_idempotency.kafka")
Partition = tuple[str, int]


class Kafka(Runner[KafkaMessage]):
    """Consumes topics as a member of ``group``, by default the consumer's name.

    The id of a message is what ``identify`` returns; by default, its CloudEvents id (``ce_id``), or else its partition
    and offset. A dead letter keeps its topic and that in the header ``idempotency-id``. Its source is the topic.

    An offset is stored only once its message, and all messages before it in the partition, are handled or
    dead-lettered. If a message has to wait, its partition waits too, which keeps the order: the partition is paused,
    sought back and resumed. librdkafka commits what is stored twice a second, and before it gives a partition up, which
    happens only while nothing is at work.

    ``dead_letters``: the topic for messages that can't be handled, by default ``<topic>.dead``. The offset is stored
    after that topic has the message.
    ``config``: further configuration of librdkafka, which logs to the logger ``django_idempotency.kafka`` unless
    ``config`` has another ``logger``.
    """

    broken = (KafkaException, OSError)

    def __init__(
        self,
        consumer: Consumer,
        servers: str,
        *topics: str,
        group: str | None = None,
        dead_letters: str | None = None,
        identify: Callable[[KafkaMessage], Any] | None = None,
        config: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(consumer, **options)
        self.topics, self.dead_letters, self.identify = list(topics), dead_letters, identify or _identify
        self.connecting = {"bootstrap.servers": servers, "logger": LOGGER, **(config or {})}
        self.group = group or consumer.name
        self.client: Any = None
        self._waiting: dict[Partition, float] = {}  # partitions that are paused, and until when
        self._asked = -math.inf

    def open(self) -> None:
        self._waiting.clear()
        ours = {"group.id": self.group, "enable.auto.commit": True, "enable.auto.offset.store": False}
        consuming = {"auto.offset.reset": "earliest", "auto.commit.interval.ms": 500, **self.connecting, **ours}
        try:
            self.client = Client(consuming)
            self.producer = Producer({**self.connecting, "enable.idempotence": True, "acks": "all"})
        except KafkaException as error:  # neither connects yet
            raise ImproperlyConfigured(f"librdkafka does not take the configuration: {error.args[0].str()}") from error
        self.client.subscribe(self.topics, on_revoke=self._revoked)

    def _revoked(self, client: Client, partitions: list[TopicPartition]) -> None:
        """Forget that these partitions wait. One that comes back begins where the group is, and is not paused."""
        client.resume(partitions)
        for partition in partitions:
            self._waiting.pop((partition.topic, partition.partition), None)

    def receive(self, most: int, timeout: float) -> Iterable[KafkaMessage]:
        self._resume_due()
        first = self.client.poll(timeout)  # consume() would wait until there are as many as it may return
        others = [] if first is None or most == 1 else self.client.consume(most - 1, 0)
        found = [message for message in (first, *others) if message is not None and _is_one(message)]
        if found:
            self._asked = time.monotonic()
        elif time.monotonic() - self._asked > ASK_AFTER:  # librdkafka does not say that the cluster is unreachable
            self.client.list_topics(self.topics[0], timeout=ASK_FOR)
            self._asked = time.monotonic()
        return [message for message in found if _partition(message) not in self._waiting]

    def _resume_due(self) -> None:
        for partition, due in list(self._waiting.items()):
            if due <= time.monotonic():
                del self._waiting[partition]
                self.client.resume([TopicPartition(*partition)])

    def lane(self, received: KafkaMessage) -> Hashable:
        return _partition(received)

    def message(self, received: KafkaMessage) -> Message:
        headers = {name: value.decode("utf-8", "replace") for name, value in _headers(received)}
        return Message(str(received.topic()), self.identify(received), received.value() or b"", headers)

    def ack(self, received: Sequence[KafkaMessage]) -> None:
        """Store the offset of the last one, unless an earlier message has to wait: the partition stays there then."""
        last = received[-1]
        if _partition(last) not in self._waiting:
            self.client.store_offsets(offsets=[TopicPartition(*_partition(last), _offset(last) + 1)])

    def later(self, received: KafkaMessage, delay: float) -> None:
        partition = _partition(received)
        if partition in self._waiting:  # for an earlier message
            return
        self._waiting[partition] = time.monotonic() + delay
        self.client.pause([TopicPartition(*partition)])
        self.client.seek(TopicPartition(*partition, _offset(received)))

    def dead_letter(self, received: KafkaMessage, headers: dict[str, str]) -> None:
        if _partition(received) in self._waiting:
            return
        try:
            self._produce(received, headers)
        except KafkaException as error:
            if error.args[0].fatal():
                raise
            raise NotTaken(f"Kafka: {error.args[0].str()}") from error
        self.ack([received])

    def _produce(self, received: KafkaMessage, headers: dict[str, str]) -> None:
        errors: list[KafkaError | None] = []
        given = _headers(received)
        first = dict(given).get(ORIGINAL_ID) or _own(received) + _identify(received).encode("utf-8", "surrogateescape")
        self.producer.produce(
            self.dead_letters or f"{received.topic()}.dead",
            received.value(),
            key=received.key(),
            headers=[*given, (ORIGINAL_ID, first), *headers.items()],
            on_delivery=lambda error, _message: errors.append(error),
        )
        self.producer.flush(CONFIRM)
        if errors != [None]:
            raise KafkaException(errors[0] if errors else KafkaError(KafkaError._MSG_TIMED_OUT))

    def close(self) -> None:
        if self.client is not None:
            self.client.close()


def _partition(message: KafkaMessage) -> Partition:
    return str(message.topic()), int(message.partition() or 0)


def _offset(message: KafkaMessage) -> int:
    return int(message.offset() or 0)


def _is_one(message: KafkaMessage) -> bool:
    error = message.error()
    if error is not None and error.fatal():
        raise KafkaException(error)
    return error is None


def _identify(message: KafkaMessage) -> str:
    headers = dict(_headers(message))
    named = headers.get("ce_id") or headers.get(ORIGINAL_ID, b"").removeprefix(_own(message))
    return named.decode("utf-8", "surrogateescape") if named else f"{message.partition()}-{message.offset()}"


def _own(message: KafkaMessage) -> bytes:
    """Return what stands before the id of a message of this topic. Two topics have the same partitions and offsets."""
    return f"{message.topic()}/".encode()


def _headers(message: KafkaMessage) -> list[tuple[str, bytes]]:
    given: Any = message.headers() or []
    return [(str(name), value or b"") for name, value in given]
