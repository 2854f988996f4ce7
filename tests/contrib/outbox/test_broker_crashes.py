"""Brokers that are killed while confirmations are outstanding: all is sent, and no key
loses its order.
"""

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


@transaction.atomic
def publish_all(numbers):
    return {
        str(publish("charges", {"number": n}, key=f"key-{n % KEYS}")) for n in numbers
    }


def publish_through_a_kill(server, stop, are_outstanding=lambda relay: True):
    """Publish events; kill the broker while some are not confirmed, and start it again.
    Return their ids.
    """
    ids = publish_all(range(EVENTS))
    relay = EventRelay("default")
    with relaying(relay):
        eventually(lambda: OutboxEvent.objects.count() < EVENTS - 500, within=120)
        stop(signal.SIGSTOP)
        # the first ones may all have been confirmed by now
        ids |= publish_all(range(EVENTS, EVENTS + KEYS))
        eventually(lambda: are_outstanding(relay), within=60)
        server.kill()
        assert not none_left()
        server.start()
        eventually(none_left, within=240)
    return ids


@pytest.fixture
def rabbitmq(tmp_path):
    node = PrivateRabbitMQ(tmp_path)
    node.start()
    yield node
    node.kill()


@pytest.mark.private_rabbitmq
def test_rabbitmq_killed_with_confirms_outstanding_gets_all_in_order(rabbitmq, outbox):
    backend = {
        "BACKEND": f"{WINGS}.rabbitmq.RabbitMQPublisher",
        "OPTIONS": {"url": rabbitmq.url},
    }
    # A node that starts may refuse events for a while.
    outbox(PUBLISHERS={"default": backend}, LONGEST_DELAY=1, MAX_ATTEMPTS=1000)
    with kombu.Connection(rabbitmq.url, connect_timeout=60) as connection:
        connection.channel().queue_declare("charges", durable=True, auto_delete=False)

    def are_outstanding(relay):
        return (confirms := relay.publisher._confirms) and confirms.outstanding

    ids = publish_through_a_kill(rabbitmq, rabbitmq.send_signal, are_outstanding)
    with kombu.Connection(rabbitmq.url, connect_timeout=60) as connection:
        channel = connection.channel()
        got = list(iter(lambda: channel.basic_get("charges", no_ack=True), None))
    assert {message.properties["message_id"] for message in got} == ids
    numbers = list(dict.fromkeys(json.loads(message.body)["number"] for message in got))
    assert all(
        of_key == sorted(of_key)
        for key in range(KEYS)
        if (of_key := [n for n in numbers if n % KEYS == key])
    )


@pytest.fixture
def jetstream(tmp_path):
    server = PrivateNATS(tmp_path)
    with server.running():
        yield server


@pytest.mark.nats
@pytest.mark.private_nats
def test_jetstream_killed_in_mid_batch_gets_each_event_once(jetstream, outbox):
    options = {"servers": jetstream.url, "prefix": "shop."}
    # What was outstanding is given up only when the time for it is over.
    outbox(
        PUBLISHERS={
            "default": {"BACKEND": f"{WINGS}.nats.NATSPublisher", "OPTIONS": options}
        },
        SEND_TIMEOUT=5,
        LONGEST_DELAY=1,
        MAX_ATTEMPTS=1000,
    )
    stream = Stream(jetstream.url)
    stream.do(
        lambda context: context.add_stream(
            name=stream.name, subjects=["shop.>"], duplicate_window=600
        )
    )
    ids = publish_through_a_kill(jetstream, jetstream.process.send_signal)
    got = [message.headers["Nats-Msg-Id"] for message in stream.messages()]
    assert (set(got), len(got)) == (ids, EVENTS + KEYS)  # the stream took none twice
