"""The SQS adapter against moto's server."""

from __future__ import annotations

import boto3
import pytest

from django_idempotency.consumers import Backoff, Consumer, RejectMessage
from testproject.models import LedgerEntry
from tests.consumers.brokers import Gate, redeliveries, running
from tests.consumers.handlers import pay, reading
from tests.support.aliases import another_alias
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
    return SQS(consumer, queue, client=client, **options)


def test_each_message_takes_effect_once_however_often_it_comes(client, queue):
    publish(client, queue, *(f"m-{number % 10}" for number in range(30)))
    runner = sqs(client, queue, pay, concurrency=2, batch=5)
    with running(runner):
        eventually(lambda: runner.counts["Done"] + runner.counts["AlreadyDone"] == 30, within=60)
    assert (effects(), runner.counts["Done"]) == (10, 10)
    attributes = client.get_queue_attributes(QueueUrl=queue, AttributeNames=["All"])["Attributes"]
    assert (attributes["ApproximateNumberOfMessages"], attributes["ApproximateNumberOfMessagesNotVisible"]) == (
        "0",
        "0",
    )


def test_an_event_that_the_outbox_sends_twice_is_handled_once(client, queue):
    publish(client, queue, "m", "m")
    runner = sqs(client, queue, pay)
    with running(runner):
        eventually(lambda: sum(runner.counts.values()) == 2)
    assert (runner.counts["Done"], runner.counts["AlreadyDone"]) == (1, 1)
    event = record("other") | {"eventSourceARN": queue, "messageAttributes": {"event-id": {"stringValue": "m"}}}
    assert lambda_of(pay)({"Records": [event]}, None) == {"batchItemFailures": []}
    assert effects() == 1


def lambda_of(handler):
    from django_idempotency.consumers.sqs import lambda_handler

    return lambda_handler(Consumer("tests", handler))


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


def test_a_dead_letter_that_is_sent_back_is_the_same_message(client, queue, dead):
    calls = []

    def refuse(message, context):
        calls.append(message.id)
        raise RejectMessage("no such account")

    runner = sqs(client, queue, refuse, dead_letters=dead)
    client.send_message(QueueUrl=queue, MessageBody="{}")
    with running(runner):
        for count in (1, 2, 3):
            eventually(lambda expected=count: runner.counts["Refused"] == expected)
            asked = {"QueueUrl": dead, "MessageAttributeNames": ["All"], "WaitTimeSeconds": 5}
            (found,) = eventually(lambda asked=asked: client.receive_message(**asked).get("Messages"))
            client.delete_message(QueueUrl=dead, ReceiptHandle=found["ReceiptHandle"])
            client.send_message(QueueUrl=queue, MessageBody="{}", MessageAttributes=found["MessageAttributes"])
    assert len(calls) == 1
    back = {name: {"stringValue": value["StringValue"]} for name, value in found["MessageAttributes"].items()}
    lambda_of(refuse)({"Records": [record("another") | {"eventSourceARN": queue, "messageAttributes": back}]}, None)
    assert len(calls) == 1


@pytest.mark.parametrize("identifying", ["event-id", "content-encoding"])
def test_a_dead_letter_keeps_what_makes_it_the_same_message_before_other_attributes(client, queue, dead, identifying):
    def refuse(message, context):
        raise RejectMessage("no such account")

    names = [*(f"a{number}" for number in range(9)), identifying]
    attributes = {name: {"DataType": "String", "StringValue": "base64"} for name in names}
    client.send_message(QueueUrl=queue, MessageBody="e30=", MessageAttributes=attributes)
    runner = sqs(client, queue, refuse, dead_letters=dead)
    kept = []
    with running(runner):
        for count in (1, 2):
            eventually(lambda expected=count: runner.counts["Refused"] == expected)
            asked = {"QueueUrl": dead, "MessageAttributeNames": ["All"], "WaitTimeSeconds": 5}
            (found,) = eventually(lambda asked=asked: client.receive_message(**asked).get("Messages"))
            client.delete_message(QueueUrl=dead, ReceiptHandle=found["ReceiptHandle"])
            client.send_message(QueueUrl=queue, MessageBody="e30=", MessageAttributes=found["MessageAttributes"])
            kept.append(sorted(found["MessageAttributes"]))
    assert identifying in kept[0]
    assert len(kept[0]) == 10
    assert kept[0] == kept[1]


def test_a_lambda_reports_the_messages_that_failed_one_by_one():
    def handle(message, context):
        if message.id == "bad":
            raise LookupError("not yet")
        return pay(message, context)

    handler = lambda_of(handle)
    event = {"Records": [{"messageId": id, "body": "{}", "eventSourceARN": "arn:queue"} for id in ("a", "bad", "b")]}
    assert handler(event, None) == {"batchItemFailures": [{"itemIdentifier": "bad"}]}
    assert handler(event, None) == {"batchItemFailures": [{"itemIdentifier": "bad"}]}
    assert sorted(LedgerEntry.objects.values_list("reference", flat=True)) == ["a", "b"]


def record(id, group=None, received=1):
    attributes = {"ApproximateReceiveCount": str(received)} | ({"MessageGroupId": group} if group else {})
    return {"messageId": id, "body": "{}", "eventSourceARN": "arn:queue", "attributes": attributes}


def test_a_lambda_keeps_the_order_of_a_fifo_queues_groups():
    """https://docs.aws.amazon.com/lambda/latest/dg/services-sqs-errorhandling.html"""

    def handle(message, context):
        if message.id == "a-2" and context.attempt == 1:
            raise LookupError("not yet")
        return pay(message, context)

    handler = lambda_of(handle)
    records = [record(f"{group}-{number}", group) for number in (1, 2, 3) for group in "ab"]
    failed = [item["itemIdentifier"] for item in handler({"Records": records}, None)["batchItemFailures"]]
    assert failed == ["a-2", "a-3"]
    again = [record(id, "a", received=2) for id in failed]
    assert handler({"Records": again}, None) == {"batchItemFailures": []}
    paid = list(LedgerEntry.objects.order_by("created_at").values_list("reference", flat=True))
    assert [id for id in paid if id[0] == "a"] == ["a-1", "a-2", "a-3"]
    assert len(paid) == 6


def test_a_lambda_replaces_a_broken_connection():
    with another_alias("elsewhere", CONN_MAX_AGE=None) as alias:
        handler = lambda_of(reading(alias))
        told = [handler({"Records": [record(id)]}, None) for id in ("last", "breaks", "next")]
    failed = [[item["itemIdentifier"] for item in answer["batchItemFailures"]] for answer in told]
    assert failed == [[], ["breaks"], []]


@pytest.fixture
def fifo(client):
    url = client.create_queue(QueueName="orders.fifo", Attributes={"FifoQueue": "true"})["QueueUrl"]
    yield url
    client.delete_queue(QueueUrl=url)


def test_a_fifo_queues_groups_keep_their_order(client, fifo):
    def handle(message, context):
        if message.id == "a-2" and context.attempt == 1:
            raise LookupError("not yet")
        return pay(message, context)

    ids = [f"{group}-{number}" for number in range(1, 6) for group in "ab"]
    for id in ids:
        client.send_message(QueueUrl=fifo, MessageBody=id, MessageGroupId=id[0], MessageDeduplicationId=id)
    runner = sqs(client, fifo, handle, concurrency=4, visibility=6, identify=lambda received: received["Body"])
    with running(runner):
        eventually(lambda: runner.counts["Done"] == 10, within=60)
    paid = list(LedgerEntry.objects.order_by("created_at").values_list("reference", flat=True))
    for group in "ab":
        assert [id for id in paid if id[0] == group] == [id for id in ids if id[0] == group]


@pytest.mark.parametrize(
    ("sent", "body"), [("/wA=", b"\xff\x00"), ("no base64", b"no base64")], ids=["encoded", "not-encoded"]
)
def test_a_body_of_bytes_is_decoded(client, queue, sent, body):
    attributes = {"content-encoding": {"DataType": "String", "StringValue": "base64"}}
    client.send_message(QueueUrl=queue, MessageBody=sent, MessageAttributes=attributes)
    runner = sqs(client, queue, pay, identify=lambda received: received["MessageId"])
    runner.open()
    (received,) = runner.receive(1, 10)
    assert runner.message(received).body == body


def test_a_message_says_that_it_was_received_before(client, queue):
    publish(client, queue, "m")
    assert redeliveries(sqs(client, queue, pay)) == [False, True]


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
