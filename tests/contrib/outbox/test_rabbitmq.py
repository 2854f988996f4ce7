"""The publisher for RabbitMQ, against the real one."""

from __future__ import annotations

import uuid
from contextlib import suppress

import kombu
import pytest
from django.db import transaction

from django_idempotency.contrib.outbox.models import OutboxEvent, Status
from django_idempotency.contrib.outbox.publishing import publish
from django_idempotency.contrib.rabbitmq import RabbitMQPublisher
from django_idempotency.messages.publisher import (
    Confirmed,
    ConnectionLost,
    PublisherUnavailable,
    Refused,
)
from tests.contrib.outbox.events import TRACE, event, sent
from tests.support.private_servers import free_port
from tests.support.waiting import eventually

pytestmark = pytest.mark.rabbitmq


@pytest.fixture
def channel(rabbitmq_url):
    with kombu.Connection(rabbitmq_url, connect_timeout=60) as connection:
        yield connection.channel()


@pytest.fixture
def queue(channel, request):
    """A queue of the test's own, by its name."""
    name = f"outbox-{uuid.uuid4().hex}"
    channel.queue_declare(
        name, durable=True, auto_delete=False, arguments=getattr(request, "param", {})
    )
    yield name
    channel.queue_delete(name)


def test_a_message_has_the_events_id_key_and_headers(rabbitmq_url, channel, queue):
    one = event(queue, key="order-7")
    assert sent(RabbitMQPublisher(rabbitmq_url), one) == [Confirmed(one)]
    message = channel.basic_get(queue, no_ack=True)
    assert message.body == one.payload
    assert message.properties["message_id"] == str(one.id)
    assert message.properties["delivery_mode"] == 2
    assert message.properties["content_type"] == "application/json"
    assert message.properties["application_headers"] == {
        "traceparent": TRACE,
        "idempotency-outbox-key": "order-7",
    }


def test_events_of_a_key_are_sent_one_after_the_other_in_one_call(rabbitmq_url, queue):
    events = [event(queue, key=key) for key in "abaa"]
    assert sent(RabbitMQPublisher(rabbitmq_url), *events) == [*map(Confirmed, events)]


def test_an_event_without_a_queue_is_refused_among_others(rabbitmq_url, queue):
    good, lost, late = event(queue), event("nobody-listens"), event(queue)
    outcomes = sent(RabbitMQPublisher(rabbitmq_url), good, lost, late)
    assert outcomes[0::2] == [Confirmed(good), Confirmed(late)]
    assert isinstance(outcomes[1], Refused)
    assert "NO_ROUTE" in outcomes[1].reason


@pytest.mark.parametrize(
    "queue",
    [{"x-max-length": 1, "x-overflow": "reject-publish"}],
    indirect=True,
    ids=["full"],
)
def test_an_event_that_the_broker_nacks_is_refused(rabbitmq_url, queue):
    first, second = event(queue), event(queue)
    outcomes = sent(RabbitMQPublisher(rabbitmq_url), first, second)
    assert outcomes == [Confirmed(first), Refused(second, "RabbitMQ refused it (nack)")]


@pytest.mark.usefixtures("transactional_db")
def test_a_topic_that_amqp_can_not_hold_does_not_delay_other_events(
    rabbitmq_url, channel, queue, outbox, relay
):
    """It has 255 characters, which the outbox takes, but 510 bytes."""
    backend = "django_idempotency.contrib.rabbitmq.RabbitMQPublisher"
    outbox(
        PUBLISHERS={"default": {"BACKEND": backend, "OPTIONS": {"url": rabbitmq_url}}},
        MAX_ATTEMPTS=1,
    )
    with transaction.atomic():
        for topic in (queue, "é" * 255, queue):
            publish(topic, {})
    one = relay()

    def is_done():
        with suppress(PublisherUnavailable):  # as from a broker that is late
            return one.step() == 0 and OutboxEvent.objects.count() == 1

    eventually(is_done)
    assert OutboxEvent.objects.get().status == Status.DEAD
    assert one.published == 2
    got = iter(lambda: channel.basic_get(queue, no_ack=True), None)
    assert len({message.properties["message_id"] for message in got}) == 2


def test_a_missing_exchange_breaks_the_connection(rabbitmq_url):
    with pytest.raises(ConnectionLost, match="NOT_FOUND"):
        sent(RabbitMQPublisher(rabbitmq_url, f"none-{uuid.uuid4().hex}"), event("a"))


def test_a_broker_that_is_down_is_said_to_be():
    with pytest.raises(PublisherUnavailable):
        RabbitMQPublisher(f"amqp://guest:guest@127.0.0.1:{free_port()}//").connect()
