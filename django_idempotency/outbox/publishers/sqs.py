"""Amazon SQS: ten messages a call, with what failed of them told one by one."""

from __future__ import annotations

import base64
import time
from collections.abc import Iterator, Sequence
from typing import Any

import boto3
from botocore.exceptions import BotoCoreError, ClientError

from django_idempotency.outbox.publishers.base import (
    Confirmed,
    Event,
    NotSent,
    Outcome,
    Publisher,
    PublisherUnavailable,
    Refused,
)

ENTRIES = 10
CALL_BYTES = 250_000  # of 262,144, with room for attributes
MOST_ATTRIBUTES = 10


class SQSPublisher(Publisher):
    """Sends to the queue at ``queue_url``, in which ``{topic}`` stands for the topic.

    In a FIFO queue the event's id is the deduplication id, and the key the group: that orders the events of a key and
    lets others pass. The attributes ``event-id``, ``topic`` and ``content-type`` and the event's headers go along; SQS
    takes ten. A payload that is no UTF-8 text goes as base64, with the attribute ``content-encoding``.

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
            if len(_attributes(event)) > MOST_ATTRIBUTES:
                yield Refused(fitting.pop(number), f"SQS takes {MOST_ATTRIBUTES} attributes, headers among them", True)
        if not fitting:
            return
        url = self.queue_url.format(topic=events[0].topic)
        entries = [_entry(number, event, url) for number, event in fitting.items()]
        try:
            answer = self._client.send_message_batch(QueueUrl=url, Entries=entries)
        except ClientError as error:
            yield from (Refused(event, str(error)) for event in fitting.values())
            return
        except BotoCoreError as error:
            raise PublisherUnavailable(f"SQS: {error}") from error
        yield from (Confirmed(fitting[sent["Id"]]) for sent in answer.get("Successful", ()))
        for failed in answer.get("Failed", ()):
            reason = f"{failed['Code']}: {failed.get('Message', '')}"
            yield Refused(fitting[failed["Id"]], reason, permanent=failed["SenderFault"])

    def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.close()


def _calls(events: Sequence[Event]) -> Iterator[list[Event]]:
    """Divide ``events`` into what one call takes; all of one have the same topic."""
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
    try:
        return event.payload.decode() or None
    except UnicodeDecodeError:
        return None


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
    """A group takes 128 visible ASCII characters."""
    key = event.key or str(event.id)
    fits = len(key) <= 128 and key.isascii() and " " not in key
    return key if fits else base64.urlsafe_b64encode(key.encode()).decode()[:128]


def _attributes(event: Event) -> dict[str, str]:
    encoding = {"content-encoding": "base64"} if _text(event) is None else {}
    own = {"event-id": str(event.id), "topic": event.topic, "content-type": event.content_type}
    return {**event.headers, **encoding, **own}
