"""Runners for ``idempotency_consume``, in processes of their own."""

from __future__ import annotations

import os
import time
from typing import Any

from django_idempotency.messages import Consumer, Message
from django_idempotency.messages.runner import Runner
from tests.messages.handlers import pay


def slowly(message: Message, context: Any) -> Any:
    paid = pay(message, context)
    time.sleep(0.005)
    return paid


def rabbitmq() -> Runner[Any]:
    from django_idempotency.contrib.rabbitmq import RabbitMQ

    url = os.environ.get("CELERY_BROKER_URL") or "amqp://guest:guest@127.0.0.1:5672//"
    return RabbitMQ(Consumer("tests", slowly), url, os.environ["TEST_QUEUE"])


def jetstream() -> Runner[Any]:
    from django_idempotency.contrib.nats import JetStream

    name = os.environ["TEST_STREAM"]
    options: dict[str, Any] = {
        "stream": name,
        "dead_letters": f"{name}.dead",
        "ack_wait": 2,
    }
    consumer = Consumer("tests", slowly)
    return JetStream(
        consumer,
        os.environ["NATS_URL"],
        f"{name}.in",
        identify=lambda received: received.headers["X-Id"],
        **options,
    )
