"""Amazon SQS, with boto3, and its partial batch failures for AWS Lambda."""

from __future__ import annotations

import base64
import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import boto3
from botocore.exceptions import BotoCoreError, ClientError

from django_idempotency.consumers.base import Consumer
from django_idempotency.consumers.messages import ORIGINAL_ID, Ack, Message
from django_idempotency.consumers.runner import DeadLetterNotTaken, Runner

LONGEST_DELAY = 12 * 60 * 60 - 60  # seconds; a message is invisible for at most twelve hours after it was received
MOST = 10  # messages in one answer of SQS
MOST_ATTRIBUTES = 10
EVENT_ID = "event-id"
ENCODING = "content-encoding"
Received = dict[str, Any]


class SQS(Runner[Received]):
    """Consumes one queue, whose URL is the source of its messages.

    The id of a message is what ``identify`` returns; by default, its attribute ``event-id``, which the outbox sets, or
    else the id that SQS gave it. A dead letter keeps that one in the attribute ``idempotency-id``.

    ``visibility``: seconds for which a received message is hidden. A message at work is hidden again three times as
    often.
    ``dead_letters``: URL of the queue for messages that can't be handled. Without it, such a message stays where it is
    until the queue's own redrive policy takes it.
    ``client``: a boto3 client; by default, one with the environment's credentials.
    """

    tells_redeliveries = True
    broken = (BotoCoreError, ClientError, OSError)  # SQS reports throttling and its own faults as ClientError

    def __init__(
        self,
        consumer: Consumer,
        queue_url: str,
        *,
        dead_letters: str | None = None,
        visibility: int = 60,
        identify: Callable[[Received], Any] | None = None,
        client: Any = None,
        **options: Any,
    ) -> None:
        super().__init__(consumer, **options)
        self.queue_url, self.dead_letters, self._client = queue_url, dead_letters, client
        self.identify = identify or _identify
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
        headers = _attributes(received)
        redelivered = _is_redelivered(received.get("Attributes", {}))
        return Message(self.queue_url, self.identify(received), _body(received["Body"], headers), headers, redelivered)

    def ack(self, received: Received) -> None:
        self.client.delete_message(QueueUrl=self.queue_url, ReceiptHandle=received["ReceiptHandle"])

    def lane(self, received: Received) -> Hashable:
        return _group(received.get("Attributes", {}))

    def later(self, received: Received, delay: float) -> None:
        """Hide the message, and give back those behind it in its group: SQS keeps them until this one was handled."""
        self._hide(received, min(math.ceil(delay), LONGEST_DELAY))
        group = self.lane(received)
        behind = [waiting for waiting in self._waiting if group and self.lane(waiting) == group]
        self._waiting = [waiting for waiting in self._waiting if not group or self.lane(waiting) != group]
        for waiting in behind:
            self._hide(waiting, 0)

    def dead_letter(self, received: Received, headers: dict[str, str]) -> None:
        if self.dead_letters is None:
            self._hide(received, self.visibility)
            return
        group = self.lane(received)
        ordered = {"MessageGroupId": group, "MessageDeduplicationId": received["MessageId"]} if group else {}
        attributes = received.get("MessageAttributes", {})
        told = headers if EVENT_ID in attributes else {ORIGINAL_ID: _identify(received), **headers}
        ours = {name: {"DataType": "String", "StringValue": value or "-"} for name, value in told.items()}
        others = sorted((name for name in attributes if name not in ours), key=_is_optional)
        kept = {name: _sendable(attributes[name]) for name in others[: MOST_ATTRIBUTES - len(ours)]}
        try:
            self.client.send_message(
                QueueUrl=self.dead_letters,
                MessageBody=received["Body"],
                MessageAttributes={**kept, **ours},
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

    Messages that are not handled are reported one by one, and come again. The others of the batch are deleted. A
    message that can't be handled comes again too, until the queue's redrive policy takes it. In a group of a FIFO
    queue, no message is handled behind one that has to come again.
    https://docs.aws.amazon.com/lambda/latest/dg/services-sqs-errorhandling.html
    """

    def handle(event: dict[str, Any], _context: Any) -> dict[str, Any]:
        groups: dict[str | None, list[Received]] = defaultdict(list)
        for record in event["Records"]:
            groups[_group(record.get("attributes", {}))].append(record)
        failed = [id for group, records in groups.items() for id in _failed(consumer, records, in_order=bool(group))]
        return {"batchItemFailures": [{"itemIdentifier": id} for id in failed]}

    return handle


def _failed(consumer: Consumer, records: Sequence[Received], *, in_order: bool) -> list[str]:
    """Return the ids of the messages that are not handled."""
    deliveries = consumer.consume_many_in_thread([_message(record) for record in records], in_order=in_order)
    told = zip(records, deliveries, strict=True)
    return [record["messageId"] for record, delivery in told if not isinstance(delivery, Ack)]


def _message(record: Received) -> Message:
    headers = _lambda_attributes(record)
    redelivered = _is_redelivered(record.get("attributes", {}))
    id = _id(headers, record["messageId"])
    return Message(record["eventSourceARN"], id, _body(record["body"], headers), headers, redelivered)


def _identify(received: Received) -> str:
    return _id(_attributes(received), received["MessageId"])


def _id(headers: Mapping[str, str], given: str) -> str:
    return headers.get(EVENT_ID) or headers.get(ORIGINAL_ID) or given


def _body(text: str, headers: Mapping[str, str]) -> bytes:
    """Return the body, decoded if its attributes say that it is base64, as the outbox sends bytes."""
    if headers.get(ENCODING) == "base64":
        with suppress(ValueError):
            return base64.b64decode(text, validate=True)
    return text.encode()


def _is_redelivered(attributes: Mapping[str, str]) -> bool:
    return int(attributes.get("ApproximateReceiveCount", 1)) > 1


def _group(attributes: Mapping[str, str]) -> str | None:
    """Return the group of a FIFO queue's message. SQS keeps the order in a group."""
    return attributes.get("MessageGroupId")


def _attributes(received: Received) -> dict[str, str]:
    given = received.get("MessageAttributes", {})
    return {name: value["StringValue"] for name, value in given.items() if "StringValue" in value}


def _lambda_attributes(record: Received) -> dict[str, str]:
    given = record.get("messageAttributes", {})
    return {name: value["stringValue"] for name, value in given.items() if "stringValue" in value}


def _is_optional(name: str) -> bool:
    """Whether a message without the attribute ``name`` would still be the same message."""
    return name not in (EVENT_ID, ENCODING)


def _sendable(value: dict[str, Any]) -> dict[str, Any]:
    return {name: part for name, part in value.items() if name in ("DataType", "StringValue", "BinaryValue")}
