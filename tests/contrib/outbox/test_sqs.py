"""The publisher for SQS, against moto's server."""

from __future__ import annotations

import base64
import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import boto3
import pytest
from botocore.config import Config

from django_idempotency.contrib.sqs import SQSPublisher
from django_idempotency.messages.publisher import (
    Confirmed,
    PublisherUnavailable,
    Refused,
)
from tests.contrib.outbox.events import TRACE, event, sent
from tests.support.private_servers import free_port

pytestmark = [
    pytest.mark.sqs,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture
def sqs(sqs_options):
    client = boto3.client("sqs", **sqs_options)
    yield client
    client.close()


def received(sqs, url):
    found = []
    while batch := sqs.receive_message(
        QueueUrl=url,
        MaxNumberOfMessages=10,
        MessageAttributeNames=["All"],
        AttributeNames=["All"],
    ).get("Messages"):
        found += batch
        for message in batch:
            sqs.delete_message(QueueUrl=url, ReceiptHandle=message["ReceiptHandle"])
    return found


def attributes(message):
    return {
        name: value["StringValue"]
        for name, value in message["MessageAttributes"].items()
    }


def test_events_of_a_key_are_sent_one_after_the_other_in_one_call(sqs, sqs_options):
    url = sqs.create_queue(QueueName="chain")["QueueUrl"]
    events = [event("charge", key=key) for key in "abaa"]
    assert sent(SQSPublisher(url, **sqs_options), *events) == [*map(Confirmed, events)]


def test_a_message_has_the_events_id_and_headers(sqs, sqs_options):
    url = sqs.create_queue(QueueName="plain")["QueueUrl"]
    one = event("charge.created")
    assert sent(SQSPublisher(url, **sqs_options), one) == [Confirmed(one)]
    (message,) = received(sqs, url)
    assert message["Body"] == one.payload.decode()
    assert attributes(message) == {
        "event-id": str(one.id),
        "topic": "charge.created",
        "content-type": "application/json",
        "traceparent": TRACE,
    }


def test_a_fifo_queue_deduplicates_by_the_id_and_groups_by_the_key(sqs, sqs_options):
    url = sqs.create_queue(QueueName="charges.fifo", Attributes={"FifoQueue": "true"})[
        "QueueUrl"
    ]
    one, publisher = (
        event("charge.created", key="order 7"),
        SQSPublisher(url, **sqs_options),
    )
    for _ in range(2):
        assert sent(publisher, one) == [Confirmed(one)]
    (message,) = received(sqs, url)
    assert message["Attributes"]["MessageDeduplicationId"] == str(one.id)
    assert message["Attributes"]["MessageGroupId"] == "b3JkZXIgNw=="


def test_more_than_a_call_takes_go_in_several(sqs, sqs_options):
    sqs.create_queue(QueueName="many")
    url = sqs_options["endpoint_url"] + "/123456789012/{topic}"
    events = [event("many") for _ in range(23)]
    assert sent(SQSPublisher(url, **sqs_options), *events) == [
        Confirmed(one) for one in events
    ]


@pytest.mark.parametrize(
    "payload", [b"\xff\x00", b"\x00"], ids=["no text", "no text of SQS'"]
)
def test_bytes_go_as_base64(sqs, sqs_options, payload):
    url = sqs.create_queue(QueueName="bytes")["QueueUrl"]
    sent(SQSPublisher(url, **sqs_options), event("a", payload))
    (message,) = received(sqs, url)
    assert base64.b64decode(message["Body"]) == payload
    assert attributes(message)["content-encoding"] == "base64"


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        (
            {"headers": {f"name-{number}": "x" for number in range(8)}},
            "accepts at most 10 attributes, including headers",
        ),
        ({"payload": b""}, "does not accept empty messages"),
    ],
)
def test_an_event_that_sqs_never_takes_is_given_up_and_leaves_the_others_confirmed(
    sqs, sqs_options, changed, reason
):
    url = sqs.create_queue(QueueName="partial")["QueueUrl"]
    good, bad = event("a"), event("a", **changed)
    outcomes = sent(SQSPublisher(url, **sqs_options), good, bad)
    assert outcomes == [
        Confirmed(good),
        Refused(bad, f"SQS {reason}", permanent=True),
    ]


def test_an_event_that_makes_a_whole_call_fail_alone_uses_up_an_attempt(
    sqs, sqs_options
):
    """As it does for a header with a name that it does not take."""
    url = sqs.create_queue(QueueName="whole")["QueueUrl"]
    one, bad, other = event("a"), event("a", headers={"no name": "x"}), event("a")
    outcomes = sent(SQSPublisher(url, **sqs_options), one, bad, other)
    assert [outcomes[0], outcomes[2]] == [Confirmed(one), Confirmed(other)]
    assert isinstance(outcomes[1], Refused)


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (503, "ServiceUnavailable"),
        (400, "RequestThrottled"),
        (403, "ExpiredToken"),
        (403, "InvalidClientTokenId"),
        (403, "SignatureDoesNotMatch"),
    ],
)
def test_a_failing_service_is_not_blamed_on_an_event(sqs_account, status, code):
    class Ill(BaseHTTPRequestHandler):
        def do_POST(self):
            self.send_response(status)
            self.send_header("x-amzn-query-error", f"{code};Sender")
            self.end_headers()
            self.wfile.write(json.dumps({"__type": code, "message": "later"}).encode())

        def log_message(self, *given):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Ill)
    Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    config = Config(retries={"max_attempts": 0})
    try:
        with pytest.raises(PublisherUnavailable, match=code):
            sent(
                SQSPublisher(
                    f"{url}/1/q", endpoint_url=url, config=config, **sqs_account
                ),
                event("a"),
                event("a"),
            )
    finally:
        server.shutdown()
        server.server_close()


def test_a_queue_that_is_not_there_refuses(sqs_options):
    (outcome,) = sent(
        SQSPublisher(sqs_options["endpoint_url"] + "/123456789012/none", **sqs_options),
        event("a"),
    )
    assert isinstance(outcome, Refused)
    assert "NonExistentQueue" in outcome.reason


def test_a_service_that_is_down_is_said_to_be(sqs_account):
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(PublisherUnavailable):
        sent(
            SQSPublisher(f"{url}/1/queue", endpoint_url=url, **sqs_account), event("a")
        )
