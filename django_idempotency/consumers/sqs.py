"""Amazon SQS, by boto3; and its partial batch failures for AWS Lambda."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import boto3
from botocore.exceptions import BotoCoreError, ClientError

from django_idempotency.consumers.base import Consumer
from django_idempotency.consumers.messages import Ack, Delivery, Message
from django_idempotency.consumers.runner import DeadLetterNotTaken, Runner

LONGEST_DELAY = 12 * 60 * 60 - 60  # a message is invisible for twelve hours at most, from when it was received
MOST = 10  # messages in one answer of SQS'
MOST_ATTRIBUTES = 10
Received = dict[str, Any]


class SQS(Runner[Received]):
    """Consumes one queue. The id of a message is SQS' own, or what ``identify`` says; its source is the queue's URL.

    ``visibility``: seconds for which a received message is hidden; one at work is hidden anew three times as often.
    ``dead_letters``: URL of the queue for what can't be handled. Without it such a message is left where it is until
    the queue's own redrive policy takes it. ``client``: boto3's, made with the environment's credentials unless stated.
    """

    broken = (BotoCoreError, ClientError, OSError)  # SQS says of itself by a ClientError that it is throttling, or ill

    def __init__(
        self,
        consumer: Consumer,
        queue_url: str,
        *,
        dead_letters: str | None = None,
        visibility: int = 60,
        identify: Callable[[Received], Any] = lambda received: received["MessageId"],
        client: Any = None,
        **options: Any,
    ) -> None:
        super().__init__(consumer, **options)
        self.queue_url, self.dead_letters, self.identify, self._client = queue_url, dead_letters, identify, client
        self.visibility, self.redelivered_after, self.heartbeat = visibility, float(visibility), visibility / 3

    def open(self) -> None:
        self.client = self._client or boto3.client("sqs")

    def receive(self, most: int, timeout: float) -> Iterable[Received]:
        answer = self.client.receive_message(
            QueueUrl=self.queue_url,
            MaxNumberOfMessages=min(most, MOST),
            VisibilityTimeout=self.visibility,
            WaitTimeSeconds=0 if self.at_work else 1,
            AttributeNames=["All"],
            MessageAttributeNames=["All"],
        )
        found: list[Received] = answer.get("Messages", [])
        if not found:
            self.wait_for_one()
        return found

    def message(self, received: Received) -> Message:
        return _message(received, self.queue_url, received["Body"], self.identify(received), _attributes(received))

    def ack(self, received: Received) -> None:
        self.client.delete_message(QueueUrl=self.queue_url, ReceiptHandle=received["ReceiptHandle"])

    def later(self, received: Received, delay: float) -> None:
        self._hide(received, min(int(delay) or 1, LONGEST_DELAY))

    def dead_letter(self, received: Received, headers: dict[str, str]) -> None:
        if self.dead_letters is None:
            self._hide(received, self.visibility)
            return
        group = received.get("Attributes", {}).get("MessageGroupId")
        ordered = {"MessageGroupId": group, "MessageDeduplicationId": received["MessageId"]} if group else {}
        given = {name: _sendable(value) for name, value in received.get("MessageAttributes", {}).items()}
        ours = {name: {"DataType": "String", "StringValue": value or "-"} for name, value in headers.items()}
        room = MOST_ATTRIBUTES - len(ours)
        try:
            self.client.send_message(
                QueueUrl=self.dead_letters,
                MessageBody=received["Body"],
                MessageAttributes={**dict(list(given.items())[:room]), **ours},
                **ordered,
            )
        except ClientError as error:
            raise DeadLetterNotTaken(str(error)) from error
        self.ack(received)

    def extend(self, received: Received) -> None:
        self._hide(received, self.visibility)

    def _hide(self, received: Received, seconds: int) -> None:
        handle = received["ReceiptHandle"]
        try:
            self.client.change_message_visibility(
                QueueUrl=self.queue_url, ReceiptHandle=handle, VisibilityTimeout=seconds
            )
        except ClientError as error:  # it is visible again already, or deleted
            if error.response["Error"]["Code"] not in ("MessageNotInflight", "InvalidParameterValue"):
                raise


def lambda_handler(consumer: Consumer) -> Callable[[dict[str, Any], Any], dict[str, Any]]:
    """Return an AWS Lambda handler for a queue whose mapping has ``ReportBatchItemFailures``.

    Messages that are not handled are reported one by one, and come again; the others of the batch are deleted. A
    message that can't be handled comes again too, until the queue's redrive policy takes it.
    https://docs.aws.amazon.com/lambda/latest/dg/services-sqs-errorhandling.html
    """

    def handle(event: dict[str, Any], _context: Any) -> dict[str, Any]:
        records = event["Records"]
        messages = [
            _message(record, record["eventSourceARN"], record["body"], record["messageId"], _lambda_attributes(record))
            for record in records
        ]
        deliveries: list[Delivery] = consumer.consume_many(messages)
        failed = [
            {"itemIdentifier": record["messageId"]}
            for record, delivery in zip(records, deliveries, strict=True)
            if not isinstance(delivery, Ack)
        ]
        return {"batchItemFailures": failed}

    return handle


def _message(received: Received, source: str, body: str, id: Any, headers: dict[str, str]) -> Message:
    return Message(source, id, body.encode(), headers)


def _attributes(received: Received) -> dict[str, str]:
    given = received.get("MessageAttributes", {})
    return {name: value["StringValue"] for name, value in given.items() if "StringValue" in value}


def _lambda_attributes(record: Received) -> dict[str, str]:
    given = record.get("messageAttributes", {})
    return {name: value["stringValue"] for name, value in given.items() if "stringValue" in value}


def _sendable(value: dict[str, Any]) -> dict[str, Any]:
    return {name: part for name, part in value.items() if name in ("DataType", "StringValue", "BinaryValue")}
