"""The SQS adapter against moto's server."""

from __future__ import annotations

import time
from collections import Counter
from types import MappingProxyType

import boto3
import pytest
from botocore.config import Config

from django_idempotency.contrib.sqs import SQS
from django_idempotency.messages import Backoff, Consumer
from tests.messages.brokers import Gate, beats_of, running
from tests.messages.handlers import pay, pay_from
from tests.support.callers import references
from tests.support.private_servers import free_port
from tests.support.runner_contract import Dead, OutageContract, RunnerContract, refuse
from tests.support.waiting import eventually

pytestmark = [pytest.mark.sqs, pytest.mark.usefixtures("transactional_db")]


@pytest.fixture(scope="module")
def client(sqs_options):
    return boto3.client("sqs", **sqs_options)


@pytest.fixture
def queue(client, request):
    name = request.node.name[:70].replace("[", "-").replace("]", "-")
    url = client.create_queue(QueueName=name)["QueueUrl"]
    yield url
    client.delete_queue(QueueUrl=url)


@pytest.fixture
def dead(client):
    url = client.create_queue(QueueName="dead")["QueueUrl"]
    yield url
    client.delete_queue(QueueUrl=url)


class Queue:
    """As the contract of runners wants it."""

    def __init__(self, client, url, dead):
        self.client, self.url, self.dead = client, url, dead

    def runner(self, handler, *, identified=True, **options):
        return sqs(self.client, self.url, handler, dead_letters=self.dead, **options)

    def publish(self, *ids, body=b"{}", headers=MappingProxyType({})):
        for id in ids:
            named = {"event-id": id, **headers} if id else headers
            attributes = {
                name: {"DataType": "String", "StringValue": value}
                for name, value in named.items()
            }
            self.client.send_message(
                QueueUrl=self.url,
                MessageBody=body.decode(),
                MessageAttributes=attributes,
            )

    def take_dead(self):
        found = self.client.receive_message(
            QueueUrl=self.dead, MessageAttributeNames=["All"]
        ).get("Messages")
        if not found:
            return None
        self.client.delete_message(
            QueueUrl=self.dead, ReceiptHandle=found[0]["ReceiptHandle"]
        )
        attributes = found[0]["MessageAttributes"]
        return Dead(
            found[0]["Body"].encode(),
            {name: value["StringValue"] for name, value in attributes.items()},
        )

    def is_empty(self):
        told = self.client.get_queue_attributes(
            QueueUrl=self.url, AttributeNames=["All"]
        )["Attributes"]
        return {
            told["ApproximateNumberOfMessages"],
            told["ApproximateNumberOfMessagesNotVisible"],
        } == {"0"}


@pytest.fixture
def broker(client, queue, dead):
    return Queue(client, queue, dead)


class TestRunner(RunnerContract):
    pass


class TestOutages(OutageContract):
    redelivering = MappingProxyType({"visibility": 12})


def sqs(client, queue, handler, *, max_attempts=10, **options):
    consumer = Consumer(
        "tests", handler, backoff=Backoff(first=0.5), max_attempts=max_attempts
    )
    runner = SQS(consumer, queue, client=client, **options)
    runner.idle = 1  # a test ends when its polls do
    return runner


@pytest.mark.parametrize(("read_timeout", "idle"), [(60, 20), (10, 5)])
def test_a_poll_is_as_long_as_sqs_and_the_client_allow(sqs_options, read_timeout, idle):
    config = Config(read_timeout=read_timeout)
    client = boto3.client("sqs", config=config, **sqs_options)
    runner = SQS(Consumer("tests", pay), "http://127.0.0.1/queue", client=client)
    runner.open()
    assert runner.idle == idle


def test_messages_are_received_by_a_long_poll_and_deleted_ten_at_a_time(
    broker, client, queue
):
    broker.publish(*(f"m-{number}" for number in range(20)))
    runner, calls, waits = sqs(client, queue, pay, batch=20), Counter(), []

    def note(model, params, **_named):
        calls[model.name] += 1
        waits.extend(
            [params["WaitTimeSeconds"]] if model.name == "ReceiveMessage" else []
        )

    client.meta.events.register("provide-client-params.sqs", note, unique_id="note")
    try:
        with running(runner):
            eventually(lambda: runner.counts["Done"] == 20)
    finally:
        client.meta.events.unregister("provide-client-params.sqs", unique_id="note")
    assert (calls["DeleteMessageBatch"], calls["DeleteMessage"], waits[:2]) == (
        2,
        0,
        [1, 0],
    )


def test_a_long_message_is_not_received_again(broker, client, queue):
    gate = Gate(pay)
    # a busy machine may be late with a heartbeat, of which there are three
    first, second = (sqs(client, queue, gate, visibility=9) for _n in range(2))
    broker.publish("m")
    beats = beats_of(first), beats_of(second)
    with running(first, second):
        assert gate.entered.wait(60)
        begun = time.monotonic()
        eventually(lambda: any(beat > begun + 11 for beat in [*beats[0], *beats[1]]))
        gate.opened.set()
        eventually(lambda: first.counts["Done"] + second.counts["Done"])
    assert gate.runs == 1
    assert sum((first.counts + second.counts).values()) == 1


@pytest.mark.parametrize("identifying", ["event-id", "content-encoding"])
def test_a_dead_letter_keeps_what_makes_it_the_same_message_before_other_attributes(
    broker, identifying
):
    kept = dict.fromkeys(
        [*(f"a{number}" for number in range(9)), identifying], "base64"
    )
    for _time in range(2):
        broker.publish(None, body=b"e30=", headers=kept)
        with running(broker.runner(refuse)):
            dead = eventually(broker.take_dead)
        assert len(dead.headers) == 10
        assert identifying in dead.headers
        kept = dead.headers


def test_a_fifo_queues_groups_keep_their_order(client):
    fifo = client.create_queue(
        QueueName="orders.fifo", Attributes={"FifoQueue": "true"}
    )["QueueUrl"]
    ids = [f"{group}-{number}" for number in range(1, 6) for group in "ab"]
    for id in ids:
        client.send_message(
            QueueUrl=fifo,
            MessageBody=id,
            MessageGroupId=id[0],
            MessageDeduplicationId=id,
        )
    runner = sqs(
        client,
        fifo,
        pay_from(2, "a-2"),
        visibility=6,
        identify=lambda received: received["Body"],
    )
    with running(runner):
        eventually(lambda: runner.counts["Done"] == 10, within=120)
    paid = references()
    for group in "ab":
        assert [id for id in paid if id[0] == group] == [
            id for id in ids if id[0] == group
        ]


@pytest.mark.parametrize(
    ("sent", "body"),
    [("/wA=", b"\xff\x00"), ("no base64", b"no base64")],
    ids=["encoded", "not-encoded"],
)
def test_a_body_of_bytes_is_decoded(client, queue, sent, body):
    attributes = {"content-encoding": {"DataType": "String", "StringValue": "base64"}}
    client.send_message(QueueUrl=queue, MessageBody=sent, MessageAttributes=attributes)
    runner = sqs(client, queue, pay, identify=lambda received: received["MessageId"])
    runner.open()
    (received,) = runner.receive(1, 10)
    assert runner.message(received).body == body


def test_a_message_that_arrives_as_a_runner_stops_is_left_to_others(broker, queue):
    runner = broker.runner(pay, visibility=300)
    receive = runner.receive

    def stopping(most, timeout):
        found = receive(most, timeout)
        if found:
            runner.stop()
        return found

    runner.receive = stopping
    broker.publish("m")
    with running(runner):
        eventually(lambda: runner._stopped)
    with running(other := broker.runner(pay)):
        eventually(lambda: other.counts["Done"])


def test_runners_survive_an_error_that_sqs_returns(client, monkeypatch, caplog):
    monkeypatch.setattr("django_idempotency.messages.runner.RECONNECT", 0.1)
    queue = client.create_queue(QueueName="comes-and-goes")["QueueUrl"]
    client.delete_queue(QueueUrl=queue)
    runner = sqs(client, queue, pay)
    with running(runner):
        eventually(lambda: "the broker can't be reached" in caplog.text)
        client.create_queue(QueueName="comes-and-goes")
        Queue(client, queue, None).publish("m")
        eventually(lambda: runner.counts["Done"])
    client.delete_queue(QueueUrl=queue)


def test_health_tells_that_sqs_is_away(sqs_account, caplog):
    away = boto3.client(
        "sqs", endpoint_url=f"http://127.0.0.1:{free_port()}", **sqs_account
    )
    runner = sqs(away, "http://127.0.0.1/queue", pay)
    with running(runner):
        eventually(lambda: "the broker can't be reached" in caplog.text)
        assert not runner.is_healthy


def test_a_dead_letter_that_is_not_taken_is_sent_again_later(
    broker, client, queue, dead, monkeypatch
):
    monkeypatch.setattr("django_idempotency.messages.runner.AFTER_ERROR", 1)

    broker.publish("m")
    client.delete_queue(QueueUrl=dead)
    runner = sqs(client, queue, refuse, dead_letters=dead)
    with running(runner):
        eventually(lambda: runner.counts["Refused"])
        client.create_queue(QueueName="dead")
        eventually(lambda: "Messages" in client.receive_message(QueueUrl=dead))
