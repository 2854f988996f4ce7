"""Amazon SQS: ten messages in a call. SQS reports each failed message."""

from __future__ import annotations

import base64
import re
import time
from collections.abc import Iterator, Sequence
from typing import Any

import boto3
from botocore.exceptions import BotoCoreError, ClientError

from django_idempotency.messages.publisher import (
    Confirmed,
    Event,
    NotSent,
    Outcome,
    Publisher,
    PublisherUnavailable,
    Refused,
)

ENTRIES = 10
CALL_BYTES = 250_000  # SQS takes 262,144; this leaves room for attributes
MOST_ATTRIBUTES = 10
# Credentials that have expired, are unknown, or don't fit the clock.
# https://docs.aws.amazon.com/AWSSimpleQueueService/latest/APIReference/CommonErrors.html
CREDENTIALS = {
    *("ExpiredToken", "ExpiredTokenException", "InvalidClientTokenId", "UnrecognizedClientException"),
    *("SignatureDoesNotMatch", "InvalidSignatureException", "RequestExpired"),
}
_NOT_TAKEN = re.compile(r"[^\t\n\r -\uD7FF\uE000-\uFFFD\U00010000-\U0010FFFF]")


class SQSPublisher(Publisher):
    """Sends to the queue at ``queue_url``, in which ``{topic}`` stands for the topic.

    In a FIFO queue, the event's id is the deduplication id and the key is the group. This orders the events of a key,
    and lets others pass. The attributes ``event-id``, ``topic`` and ``content-type`` and the event's headers are sent
    with the message; SQS takes ten. If SQS does not take the payload as text, it is sent as base64, with the attribute
    ``content-encoding``.

    Further options are those of ``boto3.client``.
    """

    def __init__(self, queue_url: str, **options: Any) -> None:
        self.queue_url = queue_url
        self.options = options
        self._client: Any = None

    def connect(self) -> None:
        if self._client is None:
            self._client = boto3.client("sqs", **self.options)

    def send(self, events: Sequence[Event], timeout: float) -> Iterator[Outcome]:
        deadline = time.monotonic() + timeout
        for call in _calls(events):
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
            yield from self._blamed(list(fitting.values()), error)
            return
        except BotoCoreError as error:
            raise PublisherUnavailable(f"SQS: {error}") from error
        yield from (Confirmed(fitting[sent["Id"]]) for sent in answer.get("Successful", ()))
        for failed in answer.get("Failed", ()):
            reason = f"{failed['Code']}: {failed.get('Message', '')}"
            yield Refused(fitting[failed["Id"]], reason, permanent=failed["SenderFault"])

    def _blamed(self, events: Sequence[Event], error: ClientError) -> Iterator[Outcome]:
        """Send each event by itself. SQS refuses a whole call for one entry, and this finds out which."""
        if len(events) == 1:
            yield Refused(events[0], str(error))
            return
        for event in events:
            yield from self._send([event])

    def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.close()


def _never_taken(event: Event) -> str | None:
    if len(_attributes(event)) > MOST_ATTRIBUTES:
        return f"SQS accepts at most {MOST_ATTRIBUTES} attributes, including headers"
    return None if event.payload else "SQS accepts no empty messages"


def _is_ill(error: ClientError) -> bool:
    """Whether SQS throttles, has a fault of its own, or accepts no call at all. None of these is an event's fault."""
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    code = error.response["Error"]["Code"]
    return status >= 500 or "Thrott" in code or code in CREDENTIALS


def _calls(events: Sequence[Event]) -> Iterator[list[Event]]:
    """Divide ``events`` into parts that one call takes. All events of a part have the same topic."""
    by_topic: dict[str, list[Event]] = {}
    for event in events:
        by_topic.setdefault(event.topic, []).append(event)
    for alike in by_topic.values():
        call: list[Event] = []
        for event in alike:
            if len(call) == ENTRIES or (call and sum(map(_size, [*call, event])) > CALL_BYTES):
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
        "MessageBody": base64.b64encode(event.payload).decode() if text is None else text,
        "MessageAttributes": {
            name: {"DataType": "String", "StringValue": value} for name, value in _attributes(event).items() if value
        },
    }
    if url.endswith(".fifo"):
        entry |= {"MessageDeduplicationId": str(event.id), "MessageGroupId": _group(event)}
    return entry


def _group(event: Event) -> str:
    """Return the group of an event. SQS takes at most 128 visible ASCII characters."""
    key = event.key or str(event.id)
    fits = len(key) <= 128 and key.isascii() and " " not in key
    return key if fits else base64.urlsafe_b64encode(key.encode()).decode()[:128]


def _attributes(event: Event) -> dict[str, str]:
    encoding = {"content-encoding": "base64"} if _text(event) is None else {}
    own = {"event-id": str(event.id), "topic": event.topic, "content-type": event.content_type}
    return {**event.headers, **encoding, **own}
