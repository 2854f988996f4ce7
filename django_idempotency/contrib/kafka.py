"""Kafka, with confluent-kafka. Events are CloudEvents in binary mode."""

from __future__ import annotations

import logging
import math
import re
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any

from confluent_kafka import Consumer as Client
from confluent_kafka import KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka import Message as KafkaMessage
from django.core.exceptions import ImproperlyConfigured

from django_idempotency import Message
from django_idempotency.extending import is_due
from django_idempotency.extending.brokers import (
    ORIGINAL_ID,
    Confirmed,
    ConnectionLost,
    Event,
    NothingHeard,
    NotSent,
    NotTaken,
    Outcome,
    Publisher,
    PublisherUnavailable,
    Refused,
    Runner,
)
from django_idempotency.messages import Consumer

CONFIRM = 30.0
# seconds of silence before the cluster is asked whether it is there, and for its answer
ASK_AFTER, ASK_FOR = 10.0, 2.0
LOGGER = logging.getLogger("django_idempotency.kafka")
# librdkafka logs each attempt to connect, several in a second and for each broker
VARYING = re.compile(r"\(after .*|\d+ms")
LOGGER.addFilter(lambda record: is_due(VARYING.sub("", record.getMessage())))
Partition = tuple[str, int]
NEVER = {
    KafkaError.MSG_SIZE_TOO_LARGE,
    KafkaError.INVALID_MSG,
    KafkaError.INVALID_RECORD,
}
# Not the event's fault. After a fatal error, this producer can send nothing more, but a
# new one can.
BROKER_FAULTS = {
    KafkaError._MSG_TIMED_OUT,
    KafkaError._TRANSPORT,
    KafkaError._ALL_BROKERS_DOWN,
    KafkaError._FATAL,
    KafkaError._PURGE_QUEUE,
    KafkaError._PURGE_INFLIGHT,
    KafkaError._TIMED_OUT,
}
CONNECTING = 5.0  # seconds


class Kafka(Runner[KafkaMessage]):
    """Consumes topics as a member of ``group``, by default the consumer's name.

    The id of a message is what ``identify`` returns; by default, its CloudEvents id
    (``ce_id``), or else its partition and offset. A dead letter keeps its topic and
    that in the header ``idempotency-id``. Its source is the topic.

    An offset is stored only once its message, and all messages before it in the
    partition, are handled or dead-lettered. If a message has to wait, its partition
    waits too, which keeps the order: the partition is paused, sought back and resumed.
    librdkafka commits what is stored twice a second, and before it gives a partition
    up, which happens only while nothing is at work.

    ``dead_letters``: the topic for messages that can't be handled, by default
    ``<topic>.dead``. The offset is stored after that topic has the message. ``config``:
    further configuration of librdkafka, which logs to the logger
    ``django_idempotency.kafka`` unless ``config`` has another ``logger``.
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
        batch: int = 50,
        **options: Any,
    ) -> None:
        super().__init__(consumer, batch=batch, **options)
        self.topics, self.dead_letters, self.identify = (
            list(topics),
            dead_letters,
            identify or _identify,
        )
        self.connecting = {
            "bootstrap.servers": servers,
            "logger": LOGGER,
            **(config or {}),
        }
        self.group = group or consumer.name
        self.client: Any = None
        # partitions that are paused, and until when
        self._waiting: dict[Partition, float] = {}
        self._asked = -math.inf
        self._trouble: str | None = None

    def open(self) -> None:
        self._waiting.clear()
        ours = {
            "group.id": self.group,
            "enable.auto.commit": True,
            "enable.auto.offset.store": False,
        }
        consuming = {
            "auto.offset.reset": "earliest",
            "auto.commit.interval.ms": 500,
            **self.connecting,
            **ours,
        }
        try:
            self.client = Client(consuming)
            self.producer = Producer(
                {**self.connecting, "enable.idempotence": True, "acks": "all"}
            )
        except KafkaException as error:  # neither connects yet
            raise ImproperlyConfigured(
                f"librdkafka rejects the configuration: {error.args[0].str()}"
            ) from error
        self.client.subscribe(self.topics, on_revoke=self._revoked)

    def _revoked(self, client: Client, partitions: list[TopicPartition]) -> None:
        """Forget that these partitions wait. One that comes back begins where the group
        is, and is not paused.
        """
        client.resume(partitions)
        for partition in partitions:
            self._waiting.pop((partition.topic, partition.partition), None)

    def receive(self, most: int, timeout: float) -> Iterable[KafkaMessage]:
        self._resume_due()
        # Each call may give partitions up, so none follows one that returned messages.
        # consume() would wait until there are as many as it may return.
        received = self.client.consume(most, 0) or [self.client.poll(timeout)]
        found = [
            message
            for message in received
            if message is not None and self._is_one(message)
        ]
        now = time.monotonic()
        if found:
            self._asked, self._trouble = now, None
        elif now - self._asked > ASK_AFTER:
            self._trouble = self._ask()
            self._asked = time.monotonic()
        if self._trouble is not None and not found:
            raise NothingHeard(f"Kafka: {self._trouble}")
        return [
            message for message in found if _partition(message) not in self._waiting
        ]

    def _is_one(self, message: KafkaMessage) -> bool:
        """Whether it is a message. An error may be, instead, such as of a topic that
        does not exist.
        """
        error = message.error()
        if error is not None and error.fatal():
            raise KafkaException(error)
        if error is not None and error.code() != KafkaError._PARTITION_EOF:
            self._trouble = error.str()
        return error is None

    def _ask(self) -> str | None:
        """Return what is wrong with the cluster or a topic. librdkafka does not say
        itself that the cluster is unreachable, and may say only once that a topic is
        missing.
        """
        for topic in self.topics:
            try:
                found = self.client.list_topics(topic, timeout=ASK_FOR).topics
            except KafkaException as error:
                return str(error.args[0].str())
            # one that begins with ^ is a pattern
            if topic in found and found[topic].error and topic[0] != "^":
                return f"{topic}: {found[topic].error.str()}"
        return None

    def _resume_due(self) -> None:
        for partition, due in list(self._waiting.items()):
            if due <= time.monotonic():
                del self._waiting[partition]
                self.client.resume([TopicPartition(*partition)])

    def lane(self, received: KafkaMessage) -> Hashable:
        return _partition(received)

    def message(self, received: KafkaMessage) -> Message:
        headers = {
            name: value.decode("utf-8", "replace") for name, value in _headers(received)
        }
        return Message(
            str(received.topic()),
            self.identify(received),
            received.value() or b"",
            headers,
        )

    def ack(self, received: Sequence[KafkaMessage]) -> None:
        """Store the offset of the last one, unless an earlier message has to wait: the
        partition stays there then.
        """
        last = received[-1]
        if _partition(last) not in self._waiting:
            self.client.store_offsets(
                offsets=[TopicPartition(*_partition(last), _offset(last) + 1)]
            )

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
        first = dict(given).get(ORIGINAL_ID) or _own(received) + _identify(
            received
        ).encode("utf-8", "surrogateescape")
        self.producer.produce(
            self.dead_letters or f"{received.topic()}.dead",
            received.value(),
            key=received.key(),
            headers=[*given, (ORIGINAL_ID, first), *headers.items()],
            on_delivery=lambda error, _message: errors.append(error),
        )
        self.producer.flush(CONFIRM)
        if errors != [None]:
            raise KafkaException(
                errors[0] if errors else KafkaError(KafkaError._MSG_TIMED_OUT)
            )

    def close(self) -> None:
        if self.client is not None:
            self.client.close()


def _partition(message: KafkaMessage) -> Partition:
    return str(message.topic()), int(message.partition() or 0)


def _offset(message: KafkaMessage) -> int:
    return int(message.offset() or 0)


def _identify(message: KafkaMessage) -> str:
    headers = dict(_headers(message))
    named = headers.get("ce_id") or headers.get(ORIGINAL_ID, b"").removeprefix(
        _own(message)
    )
    return (
        named.decode("utf-8", "surrogateescape")
        if named
        else f"{message.partition()}-{message.offset()}"
    )


def _own(message: KafkaMessage) -> bytes:
    """Return what stands before the id of a message of this topic. Two topics have the
    same partitions and offsets.
    """
    return f"{message.topic()}/".encode()


def _headers(message: KafkaMessage) -> list[tuple[str, bytes]]:
    given: Any = message.headers() or []
    return [(str(name), value or b"") for name, value in given]


# --- Publishing -----------------------------------------------------------------------


class KafkaPublisher(Publisher):
    """Publishes to the Kafka topic ``prefix`` + topic, by the event's key, so that a
    key stays on its partition.

    The event's id is the CloudEvents attribute ``id``, in the header ``ce_id``.

    ``config``: librdkafka's options, such as ``{"bootstrap.servers": "…"}``. librdkafka
    logs to the logger ``django_idempotency.kafka`` unless ``config`` has another
    ``logger``. ``source``: the CloudEvents attribute ``source``.
    """

    def __init__(
        self, config: dict[str, Any], *, prefix: str = "", source: str = "/outbox"
    ) -> None:
        self.config = {
            "linger.ms": 0,  # an event may have to wait for the previous one of its key
            "logger": LOGGER,
            **config,
            "enable.idempotence": True,
            "acks": "all",
        }
        self.prefix = prefix
        self.source = source
        self._producer: Any = None
        self._is_connected = False

    def connect(self) -> None:
        if self._is_connected:
            return
        # one that can't connect keeps trying
        self._producer = self._producer or Producer(self.config)
        try:
            self._producer.list_topics(timeout=CONNECTING)
        except KafkaException as error:
            raise PublisherUnavailable(f"Kafka: {error.args[0].str()}") from error
        self._is_connected = True

    def send(self, events: Iterable[Event], timeout: float) -> Iterator[Outcome]:
        deadline, owed = 0.0, 0
        delivered: list[tuple[Event, KafkaError | None]] = []
        while True:
            for event in events:
                deadline = time.monotonic() + timeout
                try:
                    self._produce(event, delivered)
                except BufferError:  # librdkafka's queue is full
                    yield NotSent(event)
                    continue
                except KafkaException as refused:
                    delivered.append((event, refused.args[0]))
                owed += 1
            left = deadline - time.monotonic()
            if not owed or left <= 0:
                return
            try:
                self._producer.poll(0 if delivered else min(left, 0.1))
            except KafkaException as fatal:
                raise ConnectionLost(fatal.args[0].str()) from fatal
            for event, error in delivered:
                owed -= 1
                yield _outcome(event, error)
            delivered.clear()

    def _produce(
        self, event: Event, delivered: list[tuple[Event, KafkaError | None]]
    ) -> None:
        # by the Kafka protocol binding of CloudEvents 1.0, in binary content mode
        headers = {
            **event.headers,
            "ce_specversion": "1.0",
            "ce_id": str(event.id),
            "ce_source": self.source,
            "ce_type": event.topic,
            "content-type": event.content_type,
        }
        self._producer.produce(
            self.prefix + event.topic,
            event.payload,
            key=event.key.encode() or None,
            headers=list(headers.items()),
            on_delivery=lambda error, _message: delivered.append((event, error)),
        )

    def close(self) -> None:
        if self._is_connected:
            producer, self._producer, self._is_connected = self._producer, None, False
            producer.purge()
            with suppress(KafkaException):
                producer.poll(0)


def _outcome(event: Event, error: KafkaError | None) -> Outcome:
    if error is None:
        return Confirmed(event)
    if error.code() in BROKER_FAULTS:
        raise ConnectionLost(error.str())
    return Refused(event, error.str(), permanent=error.code() in NEVER)
