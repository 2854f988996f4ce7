"""The Kafka adapter against librdkafka's mock cluster, across clients."""

from __future__ import annotations

import json
import threading

import pytest
from django.core.exceptions import ImproperlyConfigured

from django_idempotency.consumers import Backoff, Consumer, RejectMessage
from django_idempotency.consumers import runner as running_of_consumers
from testproject.models import LedgerEntry
from tests.consumers.brokers import Gate, running
from tests.consumers.handlers import pay
from tests.support.callers import all_effects as effects
from tests.support.mock_kafka import MockKafka
from tests.support.waiting import eventually

pytestmark = [pytest.mark.kafka, pytest.mark.usefixtures("transactional_db"), pytest.mark.slow]


class Cluster(MockKafka):
    def dead(self):
        from confluent_kafka import Consumer as Client

        client = Client({"bootstrap.servers": self.servers, "group.id": "dead", "auto.offset.reset": "earliest"})
        client.subscribe(["topic.dead"])
        try:
            found = client.poll(20)
            while found is not None and found.error():
                found = client.poll(20)
            return found
        finally:
            client.close()

    def committed(self, group, partition):
        from confluent_kafka import Consumer as Client
        from confluent_kafka import TopicPartition

        client = Client({"bootstrap.servers": self.servers, "group.id": group})
        try:
            return client.committed([TopicPartition("topic", partition)], timeout=10)[0].offset
        finally:
            client.close()


@pytest.fixture
def cluster():
    return Cluster()


def kafka(cluster, handler, *, max_attempts=10, backoff=0.2, **options):
    from django_idempotency.consumers.kafka import Kafka

    consumer = Consumer("tests", handler, backoff=Backoff(first=backoff), max_attempts=max_attempts)
    config = {"session.timeout.ms": 6000, "heartbeat.interval.ms": 500}
    return Kafka(consumer, cluster.servers, "topic", config=config, **options)


def test_each_message_takes_effect_once_however_often_it_comes(cluster):
    cluster.publish(*(f"m-{number % 40}" for number in range(200)))
    runner = kafka(cluster, pay, concurrency=2, batch=10)
    with running(runner):
        eventually(lambda: sum(runner.counts.values()) >= 200, within=60)
    assert (effects(), runner.counts["Done"]) == (40, 40)


def test_an_offset_is_stored_only_once_its_message_is_handled(cluster):
    """What is at work when its consumer vanishes comes again; what is done does not run again."""
    cluster.publish("a", "b", "c", partition=0)
    failing = threading.Event()

    def handle(message, context):
        if message.id == "b" and not failing.is_set():
            raise LookupError("not yet")
        return pay(message, context)

    first = kafka(cluster, handle)
    with running(first):
        eventually(lambda: first.counts["Retry"] >= 2, within=60)
        assert LedgerEntry.objects.get().reference == "a"
    failing.set()
    second = kafka(cluster, handle)
    with running(second):
        eventually(lambda: second.counts["Done"] == 2, within=60)
    assert list(LedgerEntry.objects.order_by("created_at").values_list("reference", flat=True)) == ["a", "b", "c"]


def test_one_that_waits_holds_its_own_partition_alone(cluster):
    gate = Gate(pay)

    def handle(message, context):
        return gate(message, context) if message.id == "slow" else pay(message, context)

    runner = kafka(cluster, handle, concurrency=2)
    with running(runner):
        cluster.publish("slow", "behind", partition=0)
        assert gate.entered.wait(60)
        cluster.publish("a", "b", partition=1)
        eventually(lambda: runner.counts["Done"] == 2)
        done = set(LedgerEntry.objects.values_list("reference", flat=True))
        gate.opened.set()
        eventually(lambda: runner.counts["Done"] == 4)
    assert done == {"a", "b"}


def test_a_batch_keeps_the_order_of_its_partition(cluster):
    """Also where one in its middle fails, and is tried again."""
    ids = [f"m-{number}" for number in range(12)]

    def handle(message, context):
        if message.id == "m-5" and context.attempt < 3:
            raise LookupError("not yet")
        return pay(message, context)

    runner = kafka(cluster, handle, batch=8)
    cluster.publish(*ids, partition=0)
    with running(runner):
        eventually(lambda: runner.counts["Done"] == 12, within=60)
    assert list(LedgerEntry.objects.order_by("created_at").values_list("reference", flat=True)) == ids


def test_an_option_that_librdkafka_does_not_know_is_named():
    from django_idempotency.consumers.kafka import Kafka

    runner = Kafka(Consumer("tests", pay), "127.0.0.1:1", "topic", config={"sasl.usrname": "shop"})
    with pytest.raises(ImproperlyConfigured, match=r"sasl\.usrname"):
        runner.run()


def test_poison_goes_to_the_dead_letters_before_its_offset_is_stored(cluster):
    def refuse(message, context):
        raise RejectMessage("no such account")

    runner = kafka(cluster, refuse)
    with running(runner):
        cluster.publish("m", body=b'{"a": 1}', headers=[("tenant", "x")])
        eventually(lambda: runner.counts["Refused"], within=60)
    dead = cluster.dead()
    headers = {name: value.decode() for name, value in dead.headers()}
    assert (json.loads(dead.value()), dead.key(), headers["tenant"]) == ({"a": 1}, b"m", "x")
    assert headers["idempotency-reason"] == "no such account"


def test_a_dead_letter_that_is_sent_back_is_the_same_message(cluster):
    calls = []

    def refuse(message, context):
        calls.append(message.id)
        raise RejectMessage("no such account")

    runner = kafka(cluster, refuse)
    with running(runner):
        cluster.producer.produce("topic", b"{}", partition=0)
        assert cluster.producer.flush(20) == 0
        eventually(lambda: runner.counts["Refused"], within=60)
        dead = cluster.dead()
        cluster.producer.produce("topic", dead.value(), headers=dead.headers(), partition=1)
        assert cluster.producer.flush(20) == 0
        eventually(lambda: runner.counts["Refused"] == 2, within=60)
    assert len(calls) == 1


def test_dead_letters_of_two_topics_are_two_messages_where_they_meet(cluster):
    """Two topics have the same partitions and offsets. A dead letter of a dead letter is still the first message."""
    from django_idempotency.consumers.kafka import Kafka

    calls = []

    def refuse(message, context):
        calls.append(f"{message.source}/{message.id}")
        raise RejectMessage("no such account")

    for topic in ("a", "b"):
        cluster.producer.produce(topic, b"{}", partition=0)
    assert cluster.producer.flush(20) == 0
    refusing = Kafka(Consumer("tests", refuse), cluster.servers, "a", "b", dead_letters="dead")
    keeping = Kafka(Consumer("keeping", refuse), cluster.servers, "dead", dead_letters="a")
    with running(refusing):
        eventually(lambda: refusing.counts["Refused"] == 2)
        with running(keeping):
            eventually(lambda: refusing.counts["Refused"] >= 4)
    assert sorted(calls) == ["a/0-0", "a/b/0-0", "b/0-0", "dead/a/0-0", "dead/b/0-0"]


@pytest.mark.parametrize(
    ("config", "confirm", "reason"),
    [
        ({"message.max.bytes": 2000}, 30.0, "Message size too large"),
        ({"bootstrap.servers": "127.0.0.1:1"}, 0.2, "timed out"),
    ],
    ids=["too large for the topic", "not confirmed in time"],
)
def test_a_dead_letter_that_is_not_taken_commits_nothing(cluster, monkeypatch, caplog, config, confirm, reason):
    from confluent_kafka import Producer

    from django_idempotency.consumers import kafka as adapter

    def handle(message, context):
        if message.id == "poison":
            raise RejectMessage("no such account")
        return pay(message, context)

    monkeypatch.setattr(adapter, "CONFIRM", confirm)
    monkeypatch.setattr(adapter, "Producer", lambda given: Producer({**given, **config}))
    monkeypatch.setattr(running_of_consumers, "AFTER_ERROR", 0.1)
    cluster.publish("first", partition=0)
    cluster.publish("poison", body=b"x" * 3000, partition=0)
    cluster.publish("behind", partition=0)
    first = kafka(cluster, handle)

    def told():
        return [message for message in caplog.messages if "a dead letter was not accepted" in message]

    with running(first):
        eventually(lambda: len(told()) >= 3, within=60)
    assert first.counts["Refused"] >= 3
    assert all(reason in message for message in told())
    assert cluster.committed("tests", 0) == 1
    assert (first.counts["Done"], effects()) == (1, 1)

    monkeypatch.setattr(adapter, "CONFIRM", 30.0)
    monkeypatch.setattr(adapter, "Producer", Producer)
    second = kafka(cluster, handle)
    with running(second):
        eventually(lambda: second.counts["Done"], within=60)
    assert cluster.committed("tests", 0) == 3
    assert (second.counts["Refused"], cluster.dead().key()) == (1, b"poison")


def test_a_partition_that_moves_is_drained_first(cluster):
    """A second member joins while messages are at work: they end, and come to nobody else."""
    cluster.publish(*(f"m-{number}" for number in range(60)))
    first, second = kafka(cluster, pay, concurrency=4), kafka(cluster, pay, concurrency=4)
    with running(first):
        eventually(effects, within=60)
        with running(second):
            cluster.publish(*(f"n-{number}" for number in range(60)))
            eventually(lambda: effects() == 120, within=90)
    assert LedgerEntry.objects.values("reference").distinct().count() == 120
    assert first.counts["Done"] + second.counts["Done"] == 120  # both have ended, and counted what they had at work


def test_a_partition_that_was_paused_goes_on_when_it_comes_back(cluster, monkeypatch):
    """It is taken away while its consumer has no room, and comes back when the other member has left."""
    gate = Gate(pay)
    first, second = kafka(cluster, gate, ahead=1), kafka(cluster, pay)
    take_away = first._revoked

    def revoked(client, partitions):
        gate.opened.set()
        take_away(client, partitions)

    monkeypatch.setattr(first, "_revoked", revoked)
    with running(first):
        cluster.publish("before", partition=0)
        assert gate.entered.wait(60)
        eventually(lambda: first._full)
        with running(second):
            eventually(lambda: second._epochs and not first._full)
        for _topic, moved in second._epochs:
            cluster.publish(f"after-{moved}", partition=moved)
        eventually(lambda: effects() == 3)


def test_a_message_that_waits_when_its_partition_is_taken_away_is_handled(cluster):
    """Its partition is paused for a minute, and given out again before that."""
    refused = threading.Event()

    def handle(message, context):
        if not refused.is_set():
            raise LookupError("not yet")
        return pay(message, context)

    first, second = kafka(cluster, handle, backoff=60), kafka(cluster, handle)
    with running(first):
        cluster.publish(*"abcd", partition=0)
        eventually(lambda: first.counts["Retry"], within=60)
        refused.set()
        with running(second):
            eventually(lambda: second._epochs)
        eventually(lambda: effects() == 4, within=100)
