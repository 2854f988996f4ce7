"""The SQS adapter against moto's server."""

from __future__ import annotations

import boto3
import pytest

from django_idempotency.consumers import Backoff, Consumer, RejectMessage
from testproject.models import LedgerEntry
from tests.consumers.brokers import Gate, running
from tests.consumers.handlers import pay
from tests.support.callers import all_effects as effects
from tests.support.waiting import eventually

pytestmark = [pytest.mark.sqs, pytest.mark.usefixtures("transactional_db")]


@pytest.fixture(scope="module")
def client():
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    credentials = {"aws_access_key_id": "none", "aws_secret_access_key": "none", "region_name": "eu-west-1"}
    yield boto3.client("sqs", endpoint_url=f"http://{host}:{port}", **credentials)
    server.stop()


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


def publish(client, queue, *ids, body="{}"):
    for id in ids:
        attributes = {"event-id": {"DataType": "String", "StringValue": id}}
        client.send_message(QueueUrl=queue, MessageBody=body, MessageAttributes=attributes)


def sqs(client, queue, handler, **options):
    from django_idempotency.consumers.sqs import SQS

    consumer = Consumer("tests", handler, backoff=Backoff(first=1))
    options = {"identify": lambda received: received["MessageAttributes"]["event-id"]["StringValue"], **options}
    return SQS(consumer, queue, client=client, **options)


def test_each_message_takes_effect_once_however_often_it_comes(client, queue):
    publish(client, queue, *(f"m-{number % 10}" for number in range(30)))
    runner = sqs(client, queue, pay, concurrency=2, batch=5)
    with running(runner):
        eventually(lambda: sum(runner.counts.values()) >= 30, within=60)
    assert (effects(), runner.counts["Done"]) == (10, 10)
    attributes = client.get_queue_attributes(QueueUrl=queue, AttributeNames=["All"])["Attributes"]
    assert (attributes["ApproximateNumberOfMessages"], attributes["ApproximateNumberOfMessagesNotVisible"]) == (
        "0",
        "0",
    )


def test_a_long_message_is_not_received_again(client, queue):
    gate = Gate(pay)
    first, second = (sqs(client, queue, gate, visibility=2) for _n in range(2))
    publish(client, queue, "m")
    hidden = []
    original = first._hide
    for runner in (first, second):
        runner._hide = lambda received, seconds, hide=original: (hidden.append(seconds), hide(received, seconds))
    with running(first, second):
        assert gate.entered.wait(30)
        eventually(lambda: len(hidden) >= 8, within=60)
        gate.opened.set()
        eventually(lambda: first.counts["Done"] + second.counts["Done"])
    assert gate.runs == 1
    assert sum((first.counts + second.counts).values()) == 1


def test_a_handler_that_fails_is_tried_again_until_it_succeeds(client, queue):
    def handle(message, context):
        pay(message, context)
        if context.attempt < 2:
            raise LookupError("not yet")

    runner = sqs(client, queue, handle)
    publish(client, queue, "m")
    with running(runner):
        eventually(lambda: runner.counts["Done"], within=60)
    assert (runner.counts["Retry"], effects()) == (1, 1)


def test_a_message_that_can_not_be_handled_goes_to_the_dead_letters(client, queue, dead):
    def refuse(message, context):
        raise RejectMessage("no such account")

    runner = sqs(client, queue, refuse, dead_letters=dead)
    publish(client, queue, "m", body='{"a": 1}')
    with running(runner):
        eventually(lambda: runner.counts["Refused"], within=60)
    (found,) = client.receive_message(QueueUrl=dead, MessageAttributeNames=["All"], WaitTimeSeconds=5)["Messages"]
    assert found["Body"] == '{"a": 1}'
    assert found["MessageAttributes"]["idempotency-reason"]["StringValue"] == "no such account"
    assert found["MessageAttributes"]["event-id"]["StringValue"] == "m"


def test_a_lambda_reports_the_messages_that_failed_one_by_one():
    from django_idempotency.consumers.sqs import lambda_handler

    def handle(message, context):
        if message.id == "bad":
            raise LookupError("not yet")
        return pay(message, context)

    handler = lambda_handler(Consumer("tests", handle))
    event = {"Records": [{"messageId": id, "body": "{}", "eventSourceARN": "arn:queue"} for id in ("a", "bad", "b")]}
    assert handler(event, None) == {"batchItemFailures": [{"itemIdentifier": "bad"}]}
    assert handler(event, None) == {"batchItemFailures": [{"itemIdentifier": "bad"}]}
    assert sorted(LedgerEntry.objects.values_list("reference", flat=True)) == ["a", "b"]


def test_an_error_that_sqs_returns_ends_no_runner(client, monkeypatch):
    monkeypatch.setattr("django_idempotency.consumers.runner.RECONNECT", 0.1)
    queue = client.create_queue(QueueName="comes-and-goes")["QueueUrl"]
    client.delete_queue(QueueUrl=queue)
    runner = sqs(client, queue, pay)
    with running(runner):
        eventually(lambda: runner.ticked)
        client.create_queue(QueueName="comes-and-goes")
        publish(client, queue, "m")
        eventually(lambda: runner.counts["Done"])
    client.delete_queue(QueueUrl=queue)


def test_a_dead_letter_that_is_not_taken_is_sent_again_later(client, queue, dead, monkeypatch):
    monkeypatch.setattr("django_idempotency.consumers.runner.AFTER_ERROR", 1)

    def refuse(message, context):
        raise RejectMessage("no such account")

    publish(client, queue, "m")
    client.delete_queue(QueueUrl=dead)
    runner = sqs(client, queue, refuse, dead_letters=dead)
    with running(runner):
        eventually(lambda: runner.counts["Refused"])
        client.create_queue(QueueName="dead")
        eventually(lambda: "Messages" in client.receive_message(QueueUrl=dead))
