"""The publisher for Kafka, against librdkafka's mock cluster."""

from __future__ import annotations

import time

import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException

from django_idempotency.contrib.kafka import KafkaPublisher
from django_idempotency.messages.publisher import (
    Confirmed,
    ConnectionLost,
    NotSent,
    PublisherUnavailable,
    Refused,
)
from tests.contrib.outbox.events import TRACE, event, sent
from tests.support.mock_kafka import MockKafka
from tests.support.private_servers import free_port

pytestmark = pytest.mark.kafka


@pytest.fixture(scope="module")
def cluster():
    """The address of a cluster that lives in this process."""
    owner = MockKafka()
    yield {"bootstrap.servers": owner.servers, "log_level": 0}
    owner.producer.flush()


def read(cluster, topic, count):
    consumer = Consumer({**cluster, "group.id": topic, "auto.offset.reset": "earliest"})
    consumer.subscribe([topic])
    messages, deadline = [], time.monotonic() + 30
    while len(messages) < count and time.monotonic() < deadline:
        message = consumer.poll(0.5)
        if message is not None and not message.error():
            messages.append(message)
    consumer.close()
    return messages


def test_a_message_is_a_cloud_event_with_the_events_id(cluster):
    one = event("charge.created", key="order-7")
    assert sent(KafkaPublisher(cluster, source="/shop"), one) == [Confirmed(one)]
    (message,) = read(cluster, "charge.created", 1)
    assert (message.key(), message.value()) == (b"order-7", one.payload)
    assert {name: value.decode() for name, value in message.headers()} == {
        "traceparent": TRACE,
        "ce_specversion": "1.0",
        "ce_id": str(one.id),
        "ce_source": "/shop",
        "ce_type": "charge.created",
        "content-type": "application/json",
    }


def test_an_event_too_large_for_the_broker_is_refused_for_good(cluster):
    good, large = event("sizes"), event("sizes", b"x" * 2_000_000)
    confirmed, refused = sent(KafkaPublisher(cluster), large, good)
    assert (confirmed, type(refused), refused.event, refused.permanent) == (
        Confirmed(good),
        Refused,
        large,
        True,
    )


def test_a_full_queue_is_no_events_fault(cluster):
    events = [event("full") for _ in range(50)]
    publisher = KafkaPublisher(
        {**cluster, "queue.buffering.max.messages": 3, "linger.ms": 1000}
    )
    assert {type(outcome) for outcome in sent(publisher, *events)} == {
        Confirmed,
        NotSent,
    }


class Lost:
    """A producer whose sequence the cluster has lost. librdkafka then calls it a fatal error, and it never recovers."""

    def __init__(self, *, says_so_when):
        self.says_so_when = says_so_when

    def produce(self, *_given, **_named):
        if self.says_so_when == "producing":
            raise KafkaException(KafkaError(KafkaError._FATAL))

    def poll(self, _timeout):
        if self.says_so_when == "waiting":
            raise KafkaException(
                KafkaError(KafkaError.OUT_OF_ORDER_SEQUENCE_NUMBER, fatal=True)
            )

    def purge(self):
        pass


@pytest.mark.parametrize("moment", ["producing", "waiting"])
def test_a_producer_that_can_send_no_more_is_replaced(cluster, moment):
    one = event("fatal")
    publisher = KafkaPublisher(cluster)
    publisher._producer = Lost(says_so_when=moment)
    with pytest.raises(ConnectionLost):
        list(publisher.send([one], 10))
    publisher.close()
    assert sent(publisher, one) == [Confirmed(one)]


def test_a_cluster_that_is_down_is_reported(monkeypatch, capfd):
    monkeypatch.setattr("django_idempotency.contrib.kafka.CONNECTING", 1.0)
    with pytest.raises(PublisherUnavailable):
        KafkaPublisher({"bootstrap.servers": f"127.0.0.1:{free_port()}"}).connect()
    assert "rdkafka" not in capfd.readouterr().err, (
        "librdkafka wrote past the logging configuration"
    )
