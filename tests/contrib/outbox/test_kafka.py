"""The publisher for Kafka, against librdkafka's mock cluster."""

from __future__ import annotations

import time

import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, Producer

from django_idempotency.contrib import kafka
from django_idempotency.contrib.kafka import KafkaPublisher
from django_idempotency.messages.publisher import (
    Confirmed,
    ConnectionLost,
    NotSent,
    PublisherUnavailable,
    Refused,
)
from django_idempotency.reporting import logs
from tests.contrib.outbox.events import TRACE, event, sent
from tests.support.mock_kafka import MockKafka, all_of
from tests.support.private_servers import free_port

pytestmark = pytest.mark.kafka


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """As much as a busy machine needs."""
    monkeypatch.setattr(kafka, "CONNECTING", 60.0)


@pytest.fixture(scope="module")
def cluster():
    """The address of a cluster that lives in this process."""
    owner = MockKafka()
    yield {"bootstrap.servers": owner.servers, "log_level": 0}
    owner.producer.flush()


def read(cluster, topic, count):
    consumer = Consumer({**cluster, "group.id": topic})
    consumer.assign(all_of(topic))
    messages, deadline = [], time.monotonic() + 120
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


def test_events_of_a_key_are_sent_one_after_the_other_in_one_call(cluster):
    events = [event("chain", key=key) for key in "abaa"]
    assert sent(KafkaPublisher(cluster), *events) == [*map(Confirmed, events)]


def test_the_same_producer_waits_for_a_cluster_that_is_unavailable(monkeypatch):
    made = []
    monkeypatch.setattr(kafka, "CONNECTING", 0.2)
    monkeypatch.setattr(
        kafka, "Producer", lambda config: made.append(Producer(config)) or made[-1]
    )
    publisher = KafkaPublisher({"bootstrap.servers": f"127.0.0.1:{free_port()}"})
    for _attempt in range(3):
        with pytest.raises(PublisherUnavailable):
            publisher.connect()
        publisher.close()
    assert len(made) == 1


def test_a_line_of_librdkafka_is_logged_once(monkeypatch, caplog):
    """Whatever its times are."""
    monkeypatch.setattr(logs, "_said", {})
    for attempt in range(3):
        after = f"(after {attempt}ms in state CONNECT, {attempt} suppressed)"
        kafka.LOGGER.error("FAIL Connect to a:9092 failed: refused %s", after)
    kafka.LOGGER.error("FAIL Connect to b:9092 failed: refused")
    assert len(caplog.messages) == 2


def test_an_event_too_large_for_the_broker_is_refused_for_good(cluster):
    good, large = event("sizes"), event("sizes", b"x" * 2_000_000)
    confirmed, refused = sent(KafkaPublisher(cluster), large, good)
    assert (confirmed, type(refused), refused.event, refused.permanent) == (
        Confirmed(good),
        Refused,
        large,
        True,
    )


def test_a_full_queue_is_not_blamed_on_an_event(cluster):
    events = [event("full") for _ in range(50)]
    publisher = KafkaPublisher(
        {**cluster, "queue.buffering.max.messages": 3, "linger.ms": 1000}
    )
    assert {type(outcome) for outcome in sent(publisher, *events)} == {
        Confirmed,
        NotSent,
    }


class Lost:
    """A producer whose sequence the cluster has lost. librdkafka then calls it a fatal
    error, and it never recovers.
    """

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
def test_a_broken_producer_is_replaced(cluster, moment):
    one = event("fatal")
    publisher = KafkaPublisher(cluster)
    publisher.connect()
    publisher._producer = Lost(says_so_when=moment)
    with pytest.raises(ConnectionLost):
        list(publisher.send(iter([one]), 60))
    publisher.close()
    assert sent(publisher, one) == [Confirmed(one)]


def test_a_cluster_that_is_down_is_reported(monkeypatch, capfd):
    monkeypatch.setattr("django_idempotency.contrib.kafka.CONNECTING", 1.0)
    with pytest.raises(PublisherUnavailable):
        KafkaPublisher({"bootstrap.servers": f"127.0.0.1:{free_port()}"}).connect()
    assert "rdkafka" not in capfd.readouterr().err, (
        "librdkafka wrote past the logging configuration"
    )
