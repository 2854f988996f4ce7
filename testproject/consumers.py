"""The consumer that writes a receipt for each charge, on the broker that ``BROKER_URL``
names.
"""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import urlsplit

from django.conf import settings

from django_idempotency.engine import Context
from django_idempotency.messages import Consumer, Delivery, Message, consume
from django_idempotency.messages.publisher import Event
from django_idempotency.messages.runner import Runner
from django_idempotency.values.policy import Policy
from testproject.brokers import stream_of
from testproject.models import Receipt

WEEK = 7 * 24 * 60 * 60


def write_receipt(message: Message, context: Context) -> dict[str, int]:
    charge = json.loads(message.body)
    return {
        "receipt": (
            Receipt.objects.create(event=message.id, reference=charge["reference"]).pk
        )
    }


def receive(event: Event) -> Delivery:
    """Take an event of the outbox without a broker."""
    return consume(
        Message(event.topic, str(event.id), event.payload, event.headers),
        write_receipt,
        consumer="receipts",
    )


def receipts() -> Runner[Any]:
    consumer = Consumer("receipts", write_receipt, policy=Policy(retention=WEEK))
    url, topic = settings.BROKER_URL, settings.CHARGE_TOPIC
    if urlsplit(url).scheme == "nats":
        from django_idempotency.contrib.nats import JetStream

        return JetStream(
            consumer, url, topic, stream=stream_of(topic), dead_letters=f"{topic}.dead"
        )
    if urlsplit(url).scheme == "kafka":
        from django_idempotency.contrib.kafka import Kafka

        return Kafka(consumer, urlsplit(url).netloc, topic)
    from django_idempotency.contrib.rabbitmq import RabbitMQ

    return RabbitMQ(consumer, url, topic)
