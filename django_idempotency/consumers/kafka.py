"""Kafka, with confluent-kafka."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Any

from confluent_kafka import Consumer as Client
from confluent_kafka import KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka import Message as KafkaMessage
from django.core.exceptions import ImproperlyConfigured

from django_idempotency.consumers.base import Consumer
from django_idempotency.consumers.messages import ORIGINAL_ID, Message
from django_idempotency.consumers.runner import DeadLetterNotTaken, Runner
from django_idempotency.logs import log

DRAIN = 20.0  # seconds for the messages at work in a partition to end when the partition is revoked
CONFIRM = 30.0
LOGGER = logging.getLogger("django_idempotency.kafka")
Partition = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Received:
    """A message, and the assignment of its partition that it came under."""

    message: KafkaMessage
    partition: Partition
    offset: int
    epoch: int


class Kafka(Runner[Received]):
    """Consumes topics as a member of ``group``, by default the consumer's name.

    The id of a message is what ``identify`` returns; by default, its CloudEvents id (``ce_id``), or else its partition
    and offset. A dead letter keeps its topic and that in the header ``idempotency-id``. Its source is the topic.

    An offset is stored only once its message, and all messages before it in the partition, are handled or
    dead-lettered. If a message has to wait, its partition waits too, which keeps the order: the partition is paused,
    sought back and resumed.

    ``dead_letters``: the topic for messages that can't be handled, by default ``<topic>.dead``. The offset is stored
    after that topic has the message.
    ``config``: further configuration of librdkafka, which logs to the logger ``django_idempotency.kafka`` unless
    ``config`` has another ``logger``.
    """

    polls_always = True
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
        self._epochs: dict[Partition, int] = {}
        self._resume_at: dict[Partition, float] = {}
        self._new: set[Partition] = set()
        self._full = False

    def open(self) -> None:
        self._epochs.clear()
        self._resume_at.clear()
        self._new.clear()
        self._full = False
        ours = {"group.id": self.group, "enable.auto.commit": True, "enable.auto.offset.store": False}
        consuming = {"auto.offset.reset": "earliest", "auto.commit.interval.ms": 500, **self.connecting, **ours}
        try:
            self.client = Client(consuming)
            self.producer = Producer({**self.connecting, "enable.idempotence": True, "acks": "all"})
        except KafkaException as error:  # neither connects yet
            raise ImproperlyConfigured(f"librdkafka does not take the configuration: {error.args[0].str()}") from error
        self.client.subscribe(self.topics, on_assign=self._assigned, on_revoke=self._revoked, on_lost=self._lost)

    # --- Which partitions are ours -----------------------------------------------------------------------------------

    def _assigned(self, _client: Client, partitions: list[TopicPartition]) -> None:
        for partition in partitions:
            place = (partition.topic, partition.partition)
            self._epochs[place] = self._epochs.get(place, 0) + 1
            self._new.add(place)

    def _revoked(self, client: Client, partitions: list[TopicPartition]) -> None:
        """Let messages at work end and store their offsets before the partitions are given up. No work is wasted."""
        places = {(partition.topic, partition.partition) for partition in partitions}
        self._waiting = [received for received in self._waiting if received.partition not in places]
        deadline = time.monotonic() + DRAIN
        while self._is_at_work(places) and time.monotonic() < deadline:
            self.wait_for_one()
            self.settle_ended()
        try:
            client.commit(asynchronous=False)
        except KafkaException as error:  # nothing to commit, or the group has moved on: both are normal
            log(logging.INFO, "offsets_not_committed", "offsets were not committed: %s", error.args[0].str())
        self._fence(places)

    def _lost(self, _client: Client, partitions: list[TopicPartition]) -> None:
        self._fence({(partition.topic, partition.partition) for partition in partitions})

    def _fence(self, places: set[Partition]) -> None:
        """Messages that are still at work in these partitions can no longer be settled."""
        self._waiting = [received for received in self._waiting if received.partition not in places]
        for place in places:
            self._epochs[place] = self._epochs.get(place, 0) + 1
            self._resume_at.pop(place, None)

    def _is_at_work(self, places: set[Partition]) -> bool:
        return any(received.partition in places for group in self._at_work.values() for received in group)

    def _is_ours(self, received: Received) -> bool:
        return self._epochs.get(received.partition) == received.epoch

    # --- Messages ----------------------------------------------------------------------------------------------------

    def receive(self, most: int, timeout: float) -> Iterable[Received]:
        self._resume_due()
        self._pause_if(full=most <= 0)
        self._begin_new()
        found = [self._received(message) for message in self.client.consume(max(1, most), timeout) if _is_one(message)]
        return [received for received in found if received.partition not in self._resume_at]

    def _received(self, message: KafkaMessage) -> Received:
        place = (str(message.topic()), int(message.partition() or 0))
        return Received(message, place, int(message.offset() or 0), self._epochs.get(place, 0))

    def _pause_if(self, *, full: bool) -> None:
        """Pause while there is no room, and go on polling: a member that does not poll is removed from its group."""
        if full != self._full:
            running = [p for p in self.client.assignment() if (p.topic, p.partition) not in self._resume_at]
            (self.client.pause if full else self.client.resume)(running)
            self._full = full

    def _begin_new(self) -> None:
        """Pause or resume new partitions. One that was paused when it was revoked comes back paused."""
        new = [p for p in self.client.assignment() if (p.topic, p.partition) in self._new - self._resume_at.keys()]
        (self.client.pause if self._full else self.client.resume)(new)
        self._new.clear()

    def _resume_due(self) -> None:
        for place, due in list(self._resume_at.items()):
            if due <= time.monotonic():
                del self._resume_at[place]
                if not self._full:
                    self.client.resume([TopicPartition(*place)])

    def lane(self, received: Received) -> Hashable:
        return received.partition

    def message(self, received: Received) -> Message:
        headers = {name: value.decode("utf-8", "replace") for name, value in _headers(received.message)}
        body = received.message.value() or b""
        return Message(received.partition[0], self.identify(received.message), body, headers)

    def ack(self, received: Received) -> None:
        """Store the offset, unless an earlier message has to wait. The partition then stays at that one's offset."""
        if self._is_ours(received) and received.partition not in self._resume_at:
            self.client.store_offsets(offsets=[TopicPartition(*received.partition, received.offset + 1)])

    def later(self, received: Received, delay: float) -> None:
        place = received.partition
        if not self._is_ours(received) or place in self._resume_at:
            return
        self._resume_at[place] = time.monotonic() + delay
        self._waiting = [waiting for waiting in self._waiting if waiting.partition != place]
        self.client.pause([TopicPartition(*place)])
        self.client.seek(TopicPartition(*place, received.offset))

    def dead_letter(self, received: Received, headers: dict[str, str]) -> None:
        if not self._is_ours(received) or received.partition in self._resume_at:
            return
        try:
            self._produce(received, headers)
        except KafkaException as error:
            if error.args[0].fatal():
                raise
            raise DeadLetterNotTaken(f"Kafka: {error.args[0].str()}") from error
        self.ack(received)

    def _produce(self, received: Received, headers: dict[str, str]) -> None:
        errors: list[KafkaError | None] = []
        message = received.message
        given = _headers(message)
        first = dict(given).get(ORIGINAL_ID) or _own(message) + _identify(message).encode("utf-8", "surrogateescape")
        self.producer.produce(
            self.dead_letters or f"{received.partition[0]}.dead",
            message.value(),
            key=message.key(),
            headers=[*given, (ORIGINAL_ID, first), *headers.items()],
            on_delivery=lambda error, _message: errors.append(error),
        )
        self.producer.flush(CONFIRM)
        if errors != [None]:
            raise KafkaException(errors[0] if errors else KafkaError(KafkaError._MSG_TIMED_OUT))

    def close(self) -> None:
        if self.client is not None:
            self.client.close()


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
