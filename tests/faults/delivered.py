"""What runs in the processes of a campaign of messages: the consumer, and a publisher
that sends each event five times.

``CAMPAIGN`` in the environment is a JSON object: the broker's ``kind`` and ``url``, and
the file ``log``.
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any
from uuid import uuid5

from django.utils.module_loading import import_string

from django_idempotency.messages import Consumer, Delivery, Message
from django_idempotency.messages.publisher import (
    Confirmed,
    Event,
    Outcome,
    Publisher,
)
from django_idempotency.messages.runner import Runner
from testproject.models import Receipt
from tests.faults.deliveries import COPIES, ID, NAME


class _Copies:
    """The copies that may be sent now: one after the other of each event."""

    def __init__(
        self, events: Iterable[Event], copy: Callable[[Event, int], Event]
    ) -> None:
        self.events, self.copy = events, copy
        self.again = deque[tuple[Event, int]]()
        self.sent: dict[int, tuple[Event, int]] = {}  # by position

    def __iter__(self) -> Iterator[Event]:
        while self.again:
            yield self._next(*self.again.popleft())
        for event in self.events:
            yield self._next(event, 0)

    def _next(self, event: Event, copy: int) -> Event:
        self.sent[event.position] = event, copy
        return self.copy(event, copy)


class FiveTimes(Publisher):
    """Sends each event five times through another publisher, and confirms it once all
    five are confirmed.

    ``renamed``: each copy has an id of its own, because the broker would drop it
    otherwise. The header ``X-Event`` has the event's id.
    """

    def __init__(
        self, backend: str, options: dict[str, Any], *, renamed: bool = False
    ) -> None:
        self.inner: Publisher = import_string(backend)(**options)
        self.renamed = renamed
        self.connect, self.close = self.inner.connect, self.inner.close

    def connect(self) -> None:
        """Replaced by that of the other publisher."""

    def close(self) -> None:
        """Replaced by that of the other publisher."""

    def send(self, events: Iterable[Event], timeout: float) -> Iterator[Outcome]:
        copies = _Copies(events, self._copy)
        for outcome in self.inner.send(copies, timeout):
            event, copy = copies.sent[outcome.event.position]
            if not isinstance(outcome, Confirmed):
                yield replace(outcome, event=event)
            elif copy + 1 == COPIES:
                yield Confirmed(event)
            else:
                copies.again.append((event, copy + 1))

    def _copy(self, event: Event, copy: int) -> Event:
        if not self.renamed:
            return event
        return replace(
            event,
            id=uuid5(event.id, str(copy)),
            headers={**event.headers, ID: str(event.id)},
        )


@dataclass(frozen=True, eq=False)
class LoggingConsumer(Consumer):
    """Notes each message that a broker delivers before it is handled."""

    def consume_many(
        self, messages: Sequence[Message], *, in_order: bool = False
    ) -> list[Delivery]:
        descriptor = os.open(_campaign()["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        try:
            os.write(
                descriptor, "".join(f"{message.id}\n" for message in messages).encode()
            )
        finally:
            os.close(descriptor)
        return super().consume_many(messages, in_order=in_order)


def write_receipt(message: Message, context: Any) -> None:
    order = json.loads(message.body)
    Receipt.objects.create(
        event=message.id, reference=f"{order['key']}:{order['number']}"
    )


def runner() -> Runner[Any]:
    campaign = _campaign()
    consumer = LoggingConsumer(NAME, write_receipt)
    options: dict[str, Any] = {"batch": 10}
    if campaign["kind"] == "jetstream":
        from django_idempotency.contrib.nats import JetStream

        named = {
            "stream": NAME,
            "identify": lambda received: received.headers[ID],
            "ack_wait": 5,
        }
        return JetStream(
            consumer, campaign["url"], f"{NAME}.orders", **named, **options
        )
    if campaign["kind"] == "kafka":
        from django_idempotency.contrib.kafka import Kafka

        config = {"session.timeout.ms": 6000, "heartbeat.interval.ms": 500}
        return Kafka(consumer, campaign["url"], "orders", config=config, **options)
    from django_idempotency.contrib.rabbitmq import RabbitMQ

    return RabbitMQ(consumer, campaign["url"], NAME, **options)


def _campaign() -> Any:
    return json.loads(os.environ["CAMPAIGN"])
