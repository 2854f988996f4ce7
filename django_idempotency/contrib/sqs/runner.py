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

from django_idempotency.messages.consumer import Consumer
from django_idempotency.messages.message import ORIGINAL_ID, Ack, Message
from django_idempotency.messages.runner import NotTaken, Runner

LONGEST_DELAY = 12 * 60 * 60 - 60  # seconds; a message is invisible for at most twelve hours after it was received
MOST = 10  # messages in one response of SQS
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
        found: list[Received] = []
        while len(found) < most:
            answer = self.client.receive_message(
                QueueUrl=self.queue_url,
                MaxNumberOfMessages=min(most - len(found), MOST),
                VisibilityTimeout=self.visibility,
                WaitTimeSeconds=0 if found else math.ceil(timeout),
                AttributeNames=["All"],
                MessageAttributeNames=["All"],
            )
            if not (received := answer.get("Messages")):
                break
            found += received
        return found

    def message(self, received: Received) -> Message:
        return _message(self.queue_url, self.identify(received), received)

    def ack(self, received: Sequence[Received]) -> None:
        """Delete the messages. One that SQS does not delete is redelivered, and is ``AlreadyDone``."""
        for start in range(0, len(received), MOST):
            handles = [each["ReceiptHandle"] for each in received[start : start + MOST]]
            entries = [{"Id": str(number), "ReceiptHandle": handle} for number, handle in enumerate(handles)]
            self.client.delete_message_batch(QueueUrl=self.queue_url, Entries=entries)

    def lane(self, received: Received) -> Hashable:
        """Return the group in a FIFO queue."""
        group: str | None = received["Attributes"].get("MessageGroupId")
        return group

    def later(self, received: Received, delay: float) -> None:
        """Hide the message. Until it was handled, SQS delivers none of those behind it in its group."""
        self._hide(received, min(math.ceil(delay), LONGEST_DELAY))

    def dead_letter(self, received: Received, headers: dict[str, str]) -> None:
        if self.dead_letters is None:
            self._hide(received, self.visibility)
            return
        group = self.lane(received)
        ordered = {"MessageGroupId": group, "MessageDeduplicationId": received["MessageId"]} if group else {}
        attributes = received.get("MessageAttributes", {})
        added = headers if EVENT_ID in attributes else {ORIGINAL_ID: _identify(received), **headers}
        ours = {name: {"DataType": "String", "StringValue": value or "-"} for name, value in added.items()}
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
            raise NotTaken(str(error)) from error
        self.ack([received])

    def keep_alive(self) -> None:
        for received in self.at_work:
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

    Messages that are not handled are reported one by one, and redelivered. The others of the batch are deleted. A
    message that can't be handled is redelivered too, until the queue's redrive policy takes it. In a group of a FIFO
    queue, no message is handled behind one that must be redelivered.
    https://docs.aws.amazon.com/lambda/latest/dg/services-sqs-errorhandling.html
    """

    def handle(event: dict[str, Any], _context: Any) -> dict[str, Any]:
        groups: dict[str | None, list[Received]] = defaultdict(list)
        for record in event["Records"]:
            groups[record.get("attributes", {}).get("MessageGroupId")].append(record)
        failed = [id for group, records in groups.items() for id in _failed(consumer, records, in_order=bool(group))]
        return {"batchItemFailures": [{"itemIdentifier": id} for id in failed]}

    return handle


def _failed(consumer: Consumer, records: Sequence[Received], *, in_order: bool) -> list[str]:
    """Return the ids of the messages that are not handled."""
    found = [_from_lambda(record) for record in records]
    messages = [
        _message(record["eventSourceARN"], _identify(each), each) for record, each in zip(records, found, strict=True)
    ]
    outcomes = zip(records, consumer.consume_many_in_thread(messages, in_order=in_order), strict=True)
    return [record["messageId"] for record, delivery in outcomes if not isinstance(delivery, Ack)]


def _from_lambda(record: Received) -> Received:
    """Return a message as SQS' own API has it. Lambda's names begin with small letters."""
    given = record.get("messageAttributes", {})
    return {
        "MessageId": record["messageId"],
        "Body": record["body"],
        "Attributes": record.get("attributes", {}),
        "MessageAttributes": {
            name: {"StringValue": value["stringValue"]} for name, value in given.items() if "stringValue" in value
        },
    }


def _message(source: str, id: Any, received: Received) -> Message:
    headers = _attributes(received)
    redelivered = int(received.get("Attributes", {}).get("ApproximateReceiveCount", 1)) > 1
    return Message(source, id, _body(received["Body"], headers), headers, redelivered)


def _identify(received: Received) -> str:
    headers = _attributes(received)
    return headers.get(EVENT_ID) or headers.get(ORIGINAL_ID) or str(received["MessageId"])


def _attributes(received: Received) -> dict[str, str]:
    given = received.get("MessageAttributes", {})
    return {name: value["StringValue"] for name, value in given.items() if "StringValue" in value}


def _body(text: str, headers: Mapping[str, str]) -> bytes:
    """Return the body, decoded if its attributes say that it is base64, as the outbox sends bytes."""
    if headers.get(ENCODING) == "base64":
        with suppress(ValueError):
            return base64.b64decode(text, validate=True)
    return text.encode()


def _is_optional(name: str) -> bool:
    """Whether a message without the attribute ``name`` would still be the same message."""
    return name not in (EVENT_ID, ENCODING)


def _sendable(value: dict[str, Any]) -> dict[str, Any]:
    return {name: part for name, part in value.items() if name in ("DataType", "StringValue", "BinaryValue")}
