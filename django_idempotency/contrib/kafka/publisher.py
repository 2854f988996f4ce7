"""Kafka: an idempotent producer that waits for all in-sync replicas. Events are CloudEvents in binary mode."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from django_idempotency.messages.publisher import (
    Confirmed,
    ConnectionLost,
    Event,
    NotSent,
    Outcome,
    Publisher,
    PublisherUnavailable,
    Refused,
)

NEVER = {KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.INVALID_MSG, KafkaError.INVALID_RECORD}
BROKER_FAULTS = {
    *(KafkaError._MSG_TIMED_OUT, KafkaError._TRANSPORT, KafkaError._ALL_BROKERS_DOWN),
    *(KafkaError._PURGE_QUEUE, KafkaError._PURGE_INFLIGHT, KafkaError._TIMED_OUT),
}
CONNECTING = 5.0  # seconds
LOGGER = logging.getLogger("django_idempotency.kafka")


class KafkaPublisher(Publisher):
    """Publishes to the Kafka topic ``prefix`` + topic, by the event's key, so that a key stays on its partition.

    The event's id is the CloudEvents attribute ``id``, in the header ``ce_id``.

    ``config``: librdkafka's options, such as ``{"bootstrap.servers": "…"}``. librdkafka logs to the logger
    ``django_idempotency.kafka`` unless ``config`` has another ``logger``.
    ``source``: the CloudEvents attribute ``source``.
    """

    def __init__(self, config: dict[str, Any], *, prefix: str = "", source: str = "/outbox") -> None:
        self.config = {"linger.ms": 5, "logger": LOGGER, **config, "enable.idempotence": True, "acks": "all"}
        self.prefix = prefix
        self.source = source
        self._producer: Producer | None = None

    def connect(self) -> None:
        if self._producer is not None:
            return
        producer = Producer(self.config)
        try:
            producer.list_topics(timeout=CONNECTING)
        except KafkaException as error:
            raise PublisherUnavailable(f"Kafka: {error.args[0].str()}") from error
        self._producer = producer

    def send(self, events: Sequence[Event], timeout: float) -> Iterator[Outcome]:
        assert self._producer is not None
        deadline, owed = time.monotonic() + timeout, len(events)
        delivered: list[tuple[Event, KafkaError | None]] = []
        for event in events:
            if (outcome := self._produce(event, delivered)) is not None:
                owed -= 1
                yield outcome
        while owed and (left := deadline - time.monotonic()) > 0:
            self._poll(min(left, 0.1))
            for event, error in delivered:
                owed -= 1
                if error is not None and error.code() in BROKER_FAULTS:
                    raise ConnectionLost(error.str())
                yield _outcome(event, error)
            delivered.clear()

    def _produce(self, event: Event, delivered: list[tuple[Event, KafkaError | None]]) -> Refused | NotSent | None:
        def note(error: KafkaError | None, _message: Message) -> None:
            delivered.append((event, error))

        assert self._producer is not None
        try:
            self._producer.produce(
                self.prefix + event.topic,
                event.payload,
                key=event.key.encode() or None,
                headers=list(self._headers(event).items()),
                on_delivery=note,
            )
        except BufferError:
            return NotSent(event)  # librdkafka's queue is full
        except KafkaException as error:
            code: KafkaError = error.args[0]
            if code.code() == KafkaError._FATAL:
                raise ConnectionLost(code.str()) from error
            return Refused(event, code.str(), permanent=code.code() in NEVER)
        return None

    def _poll(self, seconds: float) -> None:
        assert self._producer is not None
        try:
            self._producer.poll(seconds)
        except KafkaException as error:  # a fatal one: this producer can send nothing more, but a new one can
            raise ConnectionLost(error.args[0].str()) from error

    def _headers(self, event: Event) -> dict[str, str]:
        """Return headers by the Kafka protocol binding of CloudEvents 1.0, in binary content mode."""
        return {
            **event.headers,
            "ce_specversion": "1.0",
            "ce_id": str(event.id),
            "ce_source": self.source,
            "ce_type": event.topic,
            "content-type": event.content_type,
        }

    def close(self) -> None:
        producer, self._producer = self._producer, None
        if producer is not None:
            producer.purge()
            with suppress(KafkaException):
                producer.poll(0)


def _outcome(event: Event, error: KafkaError | None) -> Outcome:
    if error is None:
        return Confirmed(event)
    return Refused(event, error.str(), permanent=error.code() in NEVER)
