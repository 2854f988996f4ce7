"""Brokers that are killed while confirmations are outstanding: all is sent, and no key loses its order."""

from __future__ import annotations

import json
import signal
import threading
from contextlib import contextmanager

import kombu
import pytest
from django.db import transaction

from django_idempotency.contrib.outbox.models import OutboxEvent
from django_idempotency.contrib.outbox.publishing import publish
from django_idempotency.contrib.outbox.relay import EventRelay
from tests.contrib.outbox.events import none_left
from tests.contrib.outbox.test_nats import Stream
from tests.support.private_servers import PrivateNATS, PrivateRabbitMQ
from tests.support.waiting import eventually

pytestmark = [pytest.mark.row_locks, pytest.mark.slow]
WINGS = "django_idempotency.contrib"
EVENTS, KEYS = 1500, 100


@contextmanager
def relaying(relay):
    stop = threading.Event()
    thread = threading.Thread(target=relay.run, args=(stop,))
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(60)


def publish_many(topic):
    with transaction.atomic():
        return {str(publish(topic, {"number": number}, key=f"key-{number % KEYS}")) for number in range(EVENTS)}


@pytest.fixture
def rabbitmq(tmp_path):
    node = PrivateRabbitMQ(tmp_path)
    node.start()
    yield node
    node.kill()


@pytest.mark.private_rabbitmq
def test_rabbitmq_killed_with_confirms_outstanding_gets_all_in_order(rabbitmq, outbox):
    backend = {"BACKEND": f"{WINGS}.rabbitmq.RabbitMQPublisher", "OPTIONS": {"url": rabbitmq.url}}
    outbox(PUBLISHERS={"default": backend}, LONGEST_DELAY=1)  # a node that starts may refuse events for a while
    with kombu.Connection(rabbitmq.url) as connection:
        connection.channel().queue_declare("charges", durable=True, auto_delete=False)
    ids = publish_many("charges")
    relay = EventRelay("default")
    with relaying(relay):
        eventually(lambda: OutboxEvent.objects.count() < EVENTS - 500, within=60)
        rabbitmq.send_signal(signal.SIGSTOP)
        eventually(lambda: relay.publisher._confirms and relay.publisher._confirms.outstanding, within=60)
        rabbitmq.kill()
        assert not none_left()
        rabbitmq.start()
        eventually(none_left, within=120)
    with kombu.Connection(rabbitmq.url) as connection:
        channel = connection.channel()
        got = list(iter(lambda: channel.basic_get("charges", no_ack=True), None))
    assert {message.properties["message_id"] for message in got} == ids
    numbers = list(dict.fromkeys(json.loads(message.body)["number"] for message in got))
    assert all(of_key == sorted(of_key) for key in range(KEYS) if (of_key := [n for n in numbers if n % KEYS == key]))


@pytest.fixture
def jetstream(tmp_path):
    server = PrivateNATS(tmp_path)
    server.start()
    yield server
    server.kill()


@pytest.mark.nats
@pytest.mark.private_nats
def test_jetstream_killed_in_mid_batch(jetstream, outbox):
    options = {"servers": jetstream.url, "prefix": "shop."}
    outbox(PUBLISHERS={"default": {"BACKEND": f"{WINGS}.nats.NATSPublisher", "OPTIONS": options}})
    stream = Stream(jetstream.url)
    stream.do(lambda context: context.add_stream(name=stream.name, subjects=["shop.>"]))
    ids = publish_many("charges")
    with relaying(EventRelay("default")):
        eventually(lambda: OutboxEvent.objects.count() < EVENTS - 500, within=60)
        jetstream.process.send_signal(signal.SIGSTOP)
        jetstream.kill()
        assert not none_left()
        jetstream.start()
        eventually(none_left, within=120)
    got = [message.headers["Nats-Msg-Id"] for message in stream.messages()]
    assert set(got) == ids
    assert len(got) == EVENTS  # the stream took none twice
