"""Amazon SQS, with boto3."""

from __future__ import annotations

import base64
import math
import re
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import boto3
from botocore.exceptions import BotoCoreError, ClientError

from django_idempotency import Message
from django_idempotency.extending.brokers import (
    ORIGINAL_ID,
    Confirmed,
    Event,
    NotSent,
    NotTaken,
    Outcome,
    Publisher,
    PublisherUnavailable,
    Refused,
    Runner,
)
from django_idempotency.messages import Consumer

# seconds; a message is invisible for at most twelve hours after it was received
LONGEST_DELAY = 12 * 60 * 60 - 60
MOST = 10  # messages in one call
MOST_ATTRIBUTES = 10
EVENT_ID, ENCODING = "event-id", "content-encoding"
SENDABLE = ("DataType", "StringValue", "BinaryValue")  # of an attribute
Received = dict[str, Any]
CALL_BYTES = 250_000  # SQS takes 262,144; this leaves room for attributes
# Credentials that have expired, are unknown, or don't fit the clock.
# https://docs.aws.amazon.com/AWSSimpleQueueService/latest/APIReference/CommonErrors.html
CREDENTIALS = {
    "ExpiredToken",
    "ExpiredTokenException",
    "InvalidClientTokenId",
    "UnrecognizedClientException",
    "SignatureDoesNotMatch",
    "InvalidSignatureException",
    "RequestExpired",
}
_NOT_TAKEN = re.compile(r"[^\t\n\r -\uD7FF\uE000-\uFFFD\U00010000-\U0010FFFF]")


class SQS(Runner[Received]):
    """Consumes one queue, whose URL is the source of its messages.

    The id of a message is what ``identify`` returns; by default, its attribute
    ``event-id``, which the outbox sets, or else the id that SQS gave it. A dead letter
    keeps that one in the attribute ``idempotency-id``.

    ``visibility``: seconds for which a received message is hidden. A message at work is
    hidden again three times as often. ``dead_letters``: URL of the queue for messages
    that can't be handled. Without it, such a message stays where it is until the
    queue's own redrive policy takes it. ``client``: a boto3 client; by default, one
    with the environment's credentials.
    """

    tells_redeliveries = True
    idle = 20.0  # the longest poll of SQS
    # SQS reports throttling and its own faults as ClientError
    broken = (BotoCoreError, ClientError, OSError)

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
        self.queue_url, self.dead_letters, self._client = (
            queue_url,
            dead_letters,
            client,
        )
        self.identify = identify or _identify
        self.visibility, self.redelivered_after, self.heartbeat = (
            visibility,
            float(visibility),
            visibility / 3,
        )

    def open(self) -> None:
        self.client = self._client or boto3.client("sqs")
        read_timeout = self.client.meta.config.read_timeout or math.inf
        self.idle = min(self.idle, read_timeout / 2)

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
        headers = _attributes(received)
        redelivered = int(received["Attributes"]["ApproximateReceiveCount"]) > 1
        body = _body(received["Body"], headers)
        return Message(
            self.queue_url, self.identify(received), body, headers, redelivered
        )

    def ack(self, received: Sequence[Received]) -> None:
        """Delete the messages. One that SQS does not delete is redelivered, and is
        ``AlreadyDone``.
        """
        for start in range(0, len(received), MOST):
            handles = [each["ReceiptHandle"] for each in received[start : start + MOST]]
            entries = [
                {"Id": str(number), "ReceiptHandle": handle}
                for number, handle in enumerate(handles)
            ]
            self.client.delete_message_batch(QueueUrl=self.queue_url, Entries=entries)

    def lane(self, received: Received) -> Hashable:
        """Return the group in a FIFO queue."""
        group: str | None = received["Attributes"].get("MessageGroupId")
        return group

    def later(self, received: Received, delay: float) -> None:
        """Hide the message. Until it was handled, SQS delivers none of those behind it
        in its group.
        """
        self._hide(received, min(math.ceil(delay), LONGEST_DELAY))

    def dead_letter(self, received: Received, headers: dict[str, str]) -> None:
        if self.dead_letters is None:
            self._hide(received, self.visibility)
            return
        group = self.lane(received)
        ordered = (
            {"MessageGroupId": group, "MessageDeduplicationId": received["MessageId"]}
            if group
            else {}
        )
        attributes = received.get("MessageAttributes", {})
        added = (
            headers
            if EVENT_ID in attributes
            else {ORIGINAL_ID: _identify(received), **headers}
        )
        ours = {
            name: {"DataType": "String", "StringValue": value or "-"}
            for name, value in added.items()
        }
        # Those without which it would be another message come first.
        others = sorted(
            (name for name in attributes if name not in ours),
            key=lambda name: name not in (EVENT_ID, ENCODING),
        )
        kept = {
            name: {
                part: value
                for part, value in attributes[name].items()
                if part in SENDABLE
            }
            for name in others[: MOST_ATTRIBUTES - len(ours)]
        }
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

    def close(self) -> None:
        """Make messages visible that were received as the runner stopped."""
        with suppress(*self.broken):
            for received in self.at_work:
                self._hide(received, 0)

    def _hide(self, received: Received, seconds: int) -> None:
        handle = received["ReceiptHandle"]
        try:
            self.client.change_message_visibility(
                QueueUrl=self.queue_url, ReceiptHandle=handle, VisibilityTimeout=seconds
            )
        except ClientError as error:  # it is visible again already, or deleted
            if error.response["Error"]["Code"] not in (
                "MessageNotInflight",
                "InvalidParameterValue",
            ):
                raise


def _identify(received: Received) -> str:
    headers = _attributes(received)
    return (
        headers.get(EVENT_ID) or headers.get(ORIGINAL_ID) or str(received["MessageId"])
    )


def _attributes(received: Received) -> dict[str, str]:
    given = received.get("MessageAttributes", {})
    return {
        name: value["StringValue"]
        for name, value in given.items()
        if "StringValue" in value
    }


def _body(text: str, headers: Mapping[str, str]) -> bytes:
    """Return the body, decoded if its attributes say that it is base64, as the outbox
    sends bytes.
    """
    if headers.get(ENCODING) == "base64":
        with suppress(ValueError):
            return base64.b64decode(text, validate=True)
    return text.encode()


# --- Publishing -----------------------------------------------------------------------


class SQSPublisher(Publisher):
    """Sends to the queue at ``queue_url``, in which ``{topic}`` stands for the topic.

    In a FIFO queue, the event's id is the deduplication id and the key is the group.
    This orders the events of a key, and lets others pass. The attributes ``event-id``,
    ``topic`` and ``content-type`` and the event's headers are sent with the message;
    SQS takes ten. If SQS does not take the payload as text, it is sent as base64, with
    the attribute ``content-encoding``.

    Further options are those of ``boto3.client``.
    """

    def __init__(self, queue_url: str, **options: Any) -> None:
        self.queue_url = queue_url
        self.options = options
        self._client: Any = None

    def connect(self) -> None:
        if self._client is None:
            self._client = boto3.client("sqs", **self.options)

    def send(self, events: Iterable[Event], timeout: float) -> Iterator[Outcome]:
        deadline = time.monotonic() + timeout
        while free := list(events):
            for call in _calls(free):
                if time.monotonic() > deadline:
                    yield from map(NotSent, call)
                else:
                    yield from self._send(call)

    def _send(self, events: Sequence[Event]) -> Iterator[Outcome]:
        fitting = {str(number): event for number, event in enumerate(events)}
        for number, event in list(fitting.items()):
            if reason := _never_taken(event):
                yield Refused(fitting.pop(number), reason, permanent=True)
        if not fitting:
            return
        url = self.queue_url.format(topic=events[0].topic)
        entries = [_entry(number, event, url) for number, event in fitting.items()]
        try:
            answer = self._client.send_message_batch(QueueUrl=url, Entries=entries)
        except ClientError as error:
            if _is_ill(error):
                raise PublisherUnavailable(f"SQS: {error}") from error
            # SQS refuses a whole call for one entry, and this finds out which
            for event in fitting.values():
                yield from (
                    [Refused(event, str(error))]
                    if len(fitting) == 1
                    else self._send([event])
                )
            return
        except BotoCoreError as error:
            raise PublisherUnavailable(f"SQS: {error}") from error
        yield from (
            Confirmed(fitting[sent["Id"]]) for sent in answer.get("Successful", ())
        )
        for failed in answer.get("Failed", ()):
            reason = f"{failed['Code']}: {failed.get('Message', '')}"
            yield Refused(
                fitting[failed["Id"]], reason, permanent=failed["SenderFault"]
            )

    def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.close()


def _never_taken(event: Event) -> str | None:
    if len(_attributes_of(event)) > MOST_ATTRIBUTES:
        return f"SQS accepts at most {MOST_ATTRIBUTES} attributes, including headers"
    return None if event.payload else "SQS does not accept empty messages"


def _is_ill(error: ClientError) -> bool:
    """Whether SQS throttles, has a fault of its own, or accepts no call at all. None of
    these is an event's fault.
    """
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    code = error.response["Error"]["Code"]
    return status >= 500 or "Thrott" in code or code in CREDENTIALS


def _calls(events: Sequence[Event]) -> Iterator[list[Event]]:
    """Divide ``events`` into parts that one call takes. All events of a part have the
    same topic.
    """
    by_topic: dict[str, list[Event]] = {}
    for event in events:
        by_topic.setdefault(event.topic, []).append(event)
    for alike in by_topic.values():
        call: list[Event] = []
        for event in alike:
            if len(call) == MOST or (
                call and sum(map(_size, [*call, event])) > CALL_BYTES
            ):
                yield call
                call = []
            call.append(event)
        yield call


def _size(event: Event) -> int:
    return len(event.payload) * (1 if _text(event) is not None else 2)


def _text(event: Event) -> str | None:
    """Return the payload if it is text that SQS takes.

    https://docs.aws.amazon.com/AWSSimpleQueueService/latest/APIReference/API_SendMessage.html
    """
    try:
        text = event.payload.decode()
    except UnicodeDecodeError:
        return None
    return None if _NOT_TAKEN.search(text) else text


def _entry(number: str, event: Event, url: str) -> dict[str, Any]:
    text = _text(event)
    entry = {
        "Id": number,
        "MessageBody": (
            base64.b64encode(event.payload).decode() if text is None else text
        ),
        "MessageAttributes": {
            name: {"DataType": "String", "StringValue": value}
            for name, value in _attributes_of(event).items()
            if value
        },
    }
    if url.endswith(".fifo"):
        entry |= {
            "MessageDeduplicationId": str(event.id),
            "MessageGroupId": _group(event),
        }
    return entry


def _group(event: Event) -> str:
    """Return the group of an event. SQS takes at most 128 visible ASCII characters."""
    key = event.key or str(event.id)
    fits = len(key) <= 128 and key.isascii() and " " not in key
    return key if fits else base64.urlsafe_b64encode(key.encode()).decode()[:128]


def _attributes_of(event: Event) -> dict[str, str]:
    encoding = {"content-encoding": "base64"} if _text(event) is None else {}
    own = {
        "event-id": str(event.id),
        "topic": event.topic,
        "content-type": event.content_type,
    }
    return {**event.headers, **encoding, **own}
