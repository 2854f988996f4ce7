"""The Kafka adapter against librdkafka's mock cluster, across clients."""

from __future__ import annotations

import math
import threading
from contextlib import closing, nullcontext
from types import MappingProxyType, SimpleNamespace
from uuid import uuid4

import pytest
from confluent_kafka import Consumer as Client
from confluent_kafka import KafkaError, Producer, TopicPartition
from django.core.exceptions import ImproperlyConfigured

from django_idempotency.contrib import kafka as adapter
from django_idempotency.contrib.kafka import Kafka
from django_idempotency.messages import Backoff, Consumer, Done, RejectMessage
from django_idempotency.messages import runner as running_of_consumers
from django_idempotency.messages.runner import NothingHeard
from testproject.models import LedgerEntry
from tests.messages.brokers import running
from tests.messages.handlers import pay, pay_from
from tests.support.callers import all_effects as effects
from tests.support.callers import references
from tests.support.mock_kafka import MockKafka, all_of
from tests.support.runner_contract import Dead, RunnerContract, refuse
from tests.support.waiting import eventually

pytestmark = [
    pytest.mark.kafka,
    pytest.mark.usefixtures("transactional_db"),
    pytest.mark.slow,
]


class Cluster(MockKafka):
    def take_dead(self):
        """The next message of the topic of dead letters."""
        if not hasattr(self, "dead"):
            options = {"topic.metadata.refresh.interval.ms": 500}
            self.dead = Client(
                {"bootstrap.servers": self.servers, "group.id": "dead", **options}
            )
            self.dead.assign(all_of("topic.dead"))
        found = self.dead.poll(1)
        if found is None or found.error():
            return None
        return Dead(
            found.value(), {name: value.decode() for name, value in found.headers()}
        )

    def runner(self, handler, *, identified=True, **options):
        return kafka(self, handler, **options)

    def publish(self, *ids, headers=MappingProxyType({}), **options):
        for id in ids:
            super().publish(id, headers=headers.items(), **options)

    def is_empty(self):
        """Every offset is stored at once, and committed later."""
        return True

    def committed(self, group, partition):
        client = Client({"bootstrap.servers": self.servers, "group.id": group})
        try:
            return client.committed([TopicPartition("topic", partition)], timeout=60)[
                0
            ].offset
        finally:
            client.close()


@pytest.fixture
def cluster():
    cluster = Cluster()
    yield cluster
    if hasattr(cluster, "dead"):
        cluster.dead.close()


@pytest.fixture
def broker(cluster):
    return cluster


class TestRunner(RunnerContract):
    pass


def kafka(cluster, handler, *, max_attempts=10, backoff=0.2, **options):
    consumer = Consumer(
        "tests", handler, backoff=Backoff(first=backoff), max_attempts=max_attempts
    )
    config = {"session.timeout.ms": 6000, "heartbeat.interval.ms": 500}
    return Kafka(consumer, cluster.servers, "topic", config=config, **options)


class Idle(Consumer):
    """Handles everything at once, so that only the runner takes time."""

    def consume_many_in_thread(self, messages, *, in_order=False):
        return [Done(None) for _message in messages]


@pytest.mark.parametrize("batch", [1, 50])
def test_a_runner_keeps_what_was_fetched(cluster, batch):
    """It may have no room for a moment. A paused partition would be fetched anew, which
    takes half a second: a quarter of an hour for messages one by one.
    """
    cluster.publish(*map(str, range(2000)))
    runner = Kafka(Idle("tests", pay), cluster.servers, "topic", batch=batch)
    with running(runner):
        eventually(lambda: runner.counts["Done"], within=120)
        eventually(lambda: runner.counts["Done"] >= 2000, within=240)


@pytest.fixture
def clients(monkeypatch):
    """The clients that the adapter makes, with ``ASK_AFTER`` short."""
    made = []
    monkeypatch.setattr(running_of_consumers, "SILENCE", 1.5)
    monkeypatch.setattr(adapter, "ASK_AFTER", 0.2)
    monkeypatch.setattr(adapter, "ASK_FOR", 0.2)
    for name in ("Client", "Producer"):
        kind = getattr(adapter, name)
        make = lambda *given, kind=kind, **named: (  # noqa: E731
            made.append(kind.__name__) or kind(*given, **named)
        )
        monkeypatch.setattr(adapter, name, make)
    return made


def asked(runner):
    """The answers to what the runner asks of its cluster, filled in as it does."""
    answers, ask = [], runner._ask
    runner._ask = lambda: answers.append(answer := ask()) or answer
    return answers


def test_a_cluster_that_is_away_is_waited_for_by_the_same_clients(clients, caplog):
    cluster = MockKafka()
    cluster.publish("m")
    runner = Kafka(Consumer("tests", pay), cluster.servers, "topic")
    runner.idle = 0.1
    answers = asked(runner)
    with running(runner):
        eventually(lambda: runner.is_healthy)
        del cluster
        # a busy cluster may be late with an answer, too
        eventually(
            lambda: (
                len(answers) > 20 and None not in answers[-5:] and not runner.is_healthy
            ),
            within=120,
        )
    assert clients == ["Consumer", "Producer"]
    ours = [each for each in caplog.messages if "the broker sends nothing" in each]
    assert 1 <= len(ours) <= len(set(answers))


def test_a_topic_that_does_not_exist_is_named_and_the_runner_is_not_healthy(
    clients, cluster, caplog
):
    runner = kafka(cluster, pay)
    with running(runner):
        # a busy cluster may be late with its first answers
        eventually(
            lambda: any(
                "the broker sends nothing" in said
                and "topic: Broker: Unknown topic or partition" in said
                for said in caplog.messages
            )
        )
        assert not runner.is_healthy
        cluster.publish("m")  # which creates it
        eventually(lambda: runner.counts["Done"] and runner.is_healthy)


@pytest.mark.parametrize(
    ("code", "is_trouble"),
    [(KafkaError.UNKNOWN_TOPIC_OR_PART, True), (KafkaError._PARTITION_EOF, False)],
)
def test_an_error_in_place_of_a_message_is_not_dropped(
    cluster, monkeypatch, code, is_trouble
):
    runner = kafka(cluster, pay)
    runner.open()
    runner._asked = math.inf
    told = SimpleNamespace(error=lambda: KafkaError(code))
    runner.client.close()
    runner.client = SimpleNamespace(
        poll=lambda timeout: told, consume=lambda most, timeout: []
    )
    with pytest.raises(NothingHeard) if is_trouble else nullcontext():
        assert runner.receive(10, 1) == []


def test_a_client_that_has_returned_messages_is_not_called_again(cluster, monkeypatch):
    """The next call could give up the partition of a message that is in hand."""
    returned, received = [], []

    class Noted(Client):
        def poll(self, *given):
            returned.append(found := super().poll(*given))
            return found

        def consume(self, *given):
            returned.append(found := super().consume(*given))
            return found

    monkeypatch.setattr(adapter, "Client", Noted)
    cluster.publish(*(f"m-{number}" for number in range(20)))
    runner = kafka(cluster, pay)
    runner.open()
    with closing(runner.client):
        while len(received) < 20:
            returned.clear()
            received += runner.receive(10, 1)
            assert not any(returned[:-1])


def test_an_offset_is_stored_only_once_its_message_is_handled(cluster):
    """A message that waits holds up its own partition, and no other."""
    cluster.publish("a", "b", "c", partition=0)
    cluster.publish("x", "y", partition=1)
    failing = threading.Event()

    def handle(message, context):
        if message.id == "b" and not failing.is_set():
            raise LookupError("not yet")
        return pay(message, context)

    first = kafka(cluster, handle)
    with running(first):
        eventually(
            lambda: first.counts["Retry"] >= 2 and first.counts["Done"] == 3, within=120
        )
    assert (sorted(references()), cluster.committed("tests", 0)) == (["a", "x", "y"], 1)
    failing.set()
    second = kafka(cluster, handle)
    with running(second):
        eventually(lambda: second.counts["Done"] == 2, within=120)
    assert references()[3:] == ["b", "c"]


def test_a_batch_keeps_the_order_of_its_partition(cluster):
    """Also where one in its middle fails, and is tried again."""
    ids = [f"m-{number}" for number in range(12)]
    runner = kafka(cluster, pay_from(3, "m-5"), batch=8)
    cluster.publish(*ids, partition=0)
    with running(runner):
        eventually(lambda: runner.counts["Done"] == 12, within=120)
    assert references() == ids


def test_an_option_that_librdkafka_does_not_know_is_named():
    runner = Kafka(
        Consumer("tests", pay), "127.0.0.1:1", "topic", config={"sasl.usrname": "shop"}
    )
    with pytest.raises(ImproperlyConfigured, match=r"sasl\.usrname"):
        runner.run()


def test_dead_letters_of_two_topics_are_two_messages_where_they_meet(cluster):
    """Two topics have the same partitions and offsets. A dead letter of a dead letter
    is still the first message.
    """
    calls = []

    def refuse(message, context):
        calls.append(f"{message.source}/{message.id}")
        raise RejectMessage("no such account")

    for topic in ("a", "b"):
        cluster.producer.produce(topic, b"{}", partition=0)
    assert cluster.producer.flush(60) == 0
    refusing = Kafka(
        Consumer("tests", refuse), cluster.servers, "a", "b", dead_letters="dead"
    )
    keeping = Kafka(
        Consumer("keeping", refuse), cluster.servers, "dead", dead_letters="a"
    )
    with running(refusing):
        eventually(lambda: refusing.counts["Refused"] >= 2)
        with running(keeping):
            eventually(lambda: refusing.counts["Refused"] >= 4)
    assert sorted(set(calls)) == [
        "a/0-0",
        "a/b/0-0",
        "b/0-0",
        "dead/a/0-0",
        "dead/b/0-0",
    ]


@pytest.mark.parametrize(
    ("config", "confirm", "reason"),
    [
        ({"message.max.bytes": 2000}, 30.0, "Message size too large"),
        ({"bootstrap.servers": "127.0.0.1:1"}, 0.2, "timed out"),
    ],
    ids=["too large for the topic", "not confirmed in time"],
)
def test_a_dead_letter_that_is_not_taken_commits_nothing(
    cluster, monkeypatch, caplog, config, confirm, reason
):
    def handle(message, context):
        return (
            refuse(message, context)
            if message.id == "poison"
            else pay(message, context)
        )

    monkeypatch.setattr(adapter, "CONFIRM", confirm)
    monkeypatch.setattr(
        adapter, "Producer", lambda given: Producer({**given, **config})
    )
    monkeypatch.setattr(running_of_consumers, "AFTER_ERROR", 0.1)
    cluster.publish("first", partition=0)
    cluster.publish("poison", body=b"x" * 3000, partition=0)
    cluster.publish("behind", partition=0)
    first = kafka(cluster, handle)

    def told():
        return [
            message
            for message in caplog.messages
            if "a dead letter was not accepted" in message
        ]

    with running(first):
        eventually(lambda: len(told()) >= 3, within=120)
    assert first.counts["Refused"] >= 3
    assert all(reason in message for message in told())
    assert cluster.committed("tests", 0) == 1

    monkeypatch.setattr(adapter, "CONFIRM", 30.0)
    monkeypatch.setattr(adapter, "Producer", Producer)
    second = kafka(cluster, handle)
    with running(second):
        eventually(
            lambda: second.counts["AlreadyDone"] or second.counts["Done"], within=120
        )
    assert (cluster.committed("tests", 0), effects()) == (3, 2)
    assert (
        second.counts["Refused"],
        eventually(cluster.take_dead).headers["ce_id"],
    ) == (1, "poison")


def test_a_partition_that_moves_is_drained_first(cluster):
    """A second member joins while messages are at work: they end, and are done by
    nobody else.
    """
    cluster.publish(*(f"m-{number}" for number in range(60)))
    first, second = kafka(cluster, pay), kafka(cluster, pay)
    with running(first):
        eventually(effects, within=120)
        with running(second):
            cluster.publish(*(f"n-{number}" for number in range(60)))
            eventually(lambda: effects() == 120, within=180)
    assert LedgerEntry.objects.values("reference").distinct().count() == 120
    assert first.counts["Done"] + second.counts["Done"] == 120


def test_messages_that_wait_when_their_partitions_are_taken_away_are_handled(cluster):
    """Each partition is paused for five minutes, and given out again before that: half
    of them to the same member.
    """
    refused, waiting = threading.Event(), set()

    def handle(message, context):
        if not refused.is_set():
            waiting.add(message.id)
            raise LookupError("not yet")
        return pay(message, context)

    first, second = kafka(cluster, handle, backoff=300), kafka(cluster, handle)
    with running(first):
        for partition in range(4):
            cluster.publish(f"m-{partition}", partition=partition)
        eventually(lambda: len(waiting) == 4 and first.counts["Retry"] >= 4)
        refused.set()
        with running(second):
            waited = {f"m-{partition}" for partition in range(4)}
            eventually(lambda: waited <= {*references()}, within=120)

            def second_has_some():
                """The first one of a busy machine may have had all once more."""
                if not second.counts["Done"]:
                    for partition in range(4):
                        cluster.publish(uuid4().hex, partition=partition)
                return second.counts["Done"]

            eventually(second_has_some, within=120, every=2)
