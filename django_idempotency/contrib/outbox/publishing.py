"""``publish`` writes an event in the transaction whose effects it describes."""

from __future__ import annotations

import json
import re
import secrets
import sys
import time
import zlib
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

from django.core.serializers.json import DjangoJSONEncoder
from django.db import connections, router

from django_idempotency import IdempotencyError
from django_idempotency.contrib.outbox.conf import options
from django_idempotency.contrib.outbox.models import LANES, OutboxEvent
from django_idempotency.extending import conf
from django_idempotency.extending.stores import (
    Binding,
    StoredResponse,
    decoded,
    encrypted,
    is_encrypted,
)

JSON = "application/json"
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
BYTES = "application/octet-stream"
LONGEST_NAME = 255
HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")  # RFC 9110, token
HEADER_VALUE = re.compile(r"[!-~]([\t -~]*[!-~])?|")  # RFC 9110, field-value
CONTROL_CHARACTER = re.compile(r"[\x00-\x1f\x7f]")

# The log says what could not be encrypted or decrypted, and why.
Content = tuple[bytes, dict[str, str]]


class PublishedOutsideTransaction(IdempotencyError):
    """No transaction is open on the database that ``publish`` writes to."""

    def __init__(self, using: str) -> None:
        super().__init__(
            f"No transaction is open on the database {using!r}: an event is committed"
            " with the effects or not at all. Call publish inside"
            f" transaction.atomic(using={using!r})."
        )


class InvalidEvent(IdempotencyError, ValueError):
    """The event can't be published. The message names the value, its limit and what to
    do.
    """


def publish(
    topic: str,
    payload: Any,
    *,
    key: str = "",
    headers: Mapping[str, str] | None = None,
    content_type: str | None = None,
    using: str | None = None,
) -> UUID:
    """Publish an event if, and only if, the open transaction commits. Return its id.

    Consumers recognise a redelivery by the id. It is AMQP's ``message_id``,
    ``Nats-Msg-Id``, CloudEvents' ``id``, ``webhook-id``, the deduplication id of SQS,
    or the id of a Celery task.

    ``topic``: what routes are chosen by. ``payload``: bytes are sent as they are,
    anything else as JSON. ``content_type``: overrides the usual one of bytes or JSON.
    ``key``: events with the same key are published in order. Events without a key have
    no order. ``headers``: sent with the event. A W3C ``traceparent`` is added if
    OpenTelemetry has a span open. ``using``: the alias of the database of the effects,
    which must have the outbox's tables. The default is the ``USING`` option of
    ``OUTBOX``, or else the router's choice.

    Raises ``PublishedOutsideTransaction`` outside a transaction (a test case's own
    counts as one), ``InvalidEvent`` if the event can't be sent, and ``TypeError`` if
    JSON can't hold the payload.
    """
    using = database(using)
    if not connections[using].in_atomic_block:
        raise PublishedOutsideTransaction(using)
    body, usual_type = _encoded(payload)
    event_id = new_event_id()
    content = sealed(event_id, body, _headers(headers or {}))
    if content is None:
        raise InvalidEvent(
            "The payload can't be encrypted; the log says why. See ENCRYPTION_KEYS."
        )
    OutboxEvent.objects.using(using).create(
        event_id=event_id,
        publisher=options().publisher_of(_checked_name("topic", topic)),
        lane=lane_of(key, event_id),
        topic=topic,
        key=key and _checked_name("key", key),
        payload=content[0],
        content_type=_check_value(
            "content_type", _checked_name("content_type", content_type or usual_type)
        ),
        headers=content[1],
    )
    return event_id


def database(using: str | None = None) -> str:
    """Return the alias of the outbox's database: ``using``, else the setting's, else
    the router's choice.
    """
    return using or options().using or router.db_for_write(OutboxEvent)


def new_event_id() -> UUID:
    """Return a UUID of version 7 (RFC 9562), so that ids of the same time are
    neighbours in their index.
    """
    milliseconds = time.time_ns() // 1_000_000 & (1 << 48) - 1
    return UUID(
        int=milliseconds << 80
        | 7 << 76
        | secrets.randbits(12) << 64
        | 2 << 62
        | secrets.randbits(62)
    )


def lane_of(key: str, event_id: UUID) -> int:
    """Return the lane of all events with this key. An event without a key goes to any
    lane.
    """
    return zlib.crc32(key.encode() or event_id.bytes) % LANES


def _encoded(payload: Any) -> tuple[bytes, str]:
    if isinstance(payload, bytes | bytearray | memoryview):
        body, usual_type = bytes(payload), BYTES
    else:
        try:
            body, usual_type = (
                json.dumps(payload, cls=DjangoJSONEncoder, allow_nan=False).encode(),
                JSON,
            )
        except ValueError as error:
            raise InvalidEvent(
                f"The payload can't be sent as JSON: {error}. Send bytes, or replace"
                " the value."
            ) from error
    if len(body) > (most := options().max_payload):
        raise InvalidEvent(
            f"The payload has {len(body)} bytes, but at most {most} are allowed. Send a"
            " reference to it, or raise MAX_PAYLOAD."
        )
    return body, usual_type


def _checked_name(what: str, value: object) -> str:
    if (
        not isinstance(value, str)
        or not 0 < len(value) <= LONGEST_NAME
        or CONTROL_CHARACTER.search(value)
    ):
        raise InvalidEvent(
            f"{what} is {value!r:.300}; it must be a string of 1 to {LONGEST_NAME}"
            " characters, none of them control characters."
        )
    return value


def _headers(stated: Mapping[str, str]) -> dict[str, str]:
    for name, value in stated.items():
        if not isinstance(name, str) or not HEADER_NAME.fullmatch(name):
            raise InvalidEvent(
                f"A header is called {name!r}; its name must be a token of RFC 9110,"
                " such as 'tenant-id'."
            )
        _check_value(f"The header {name!r}", value)
    return {
        **_trace_context(),
        **{name.lower(): value for name, value in stated.items()},
    }


def _check_value(what: str, value: object) -> str:
    if not isinstance(value, str) or not HEADER_VALUE.fullmatch(value):
        raise InvalidEvent(
            f"{what} is {value!r:.300}; it must be a string of visible ASCII"
            " characters, with spaces only between them. Percent-encode others."
        )
    return value


def _trace_context() -> dict[str, str]:
    """Return the W3C trace context of the open span, if the process has OpenTelemetry
    loaded.
    """
    if "opentelemetry" not in sys.modules:
        return {}
    from opentelemetry.trace.propagation.tracecontext import (
        TraceContextTextMapPropagator,
    )

    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier)
    return carrier


# --- Encryption, with the keys of stored responses ------------------------------------


def sealed(
    event_id: UUID, payload: bytes, headers: Mapping[str, str]
) -> Content | None:
    """Return payload and headers as they are to be stored; ``None`` if they can't be
    encrypted.
    """
    if not conf().policy.body.encrypt:
        return payload, dict(headers)
    stored = encrypted(_content(payload, headers), _binding(event_id))
    return None if stored is None else (stored.body or b"", dict(stored.headers))


def opened(
    event_id: UUID, payload: bytes, headers: Mapping[str, str]
) -> Content | None:
    """Return payload and headers as they were published; ``None`` if they can't be
    decrypted.
    """
    if not is_sealed(headers):
        return payload, dict(headers)
    content = decoded(_content(payload, headers), _binding(event_id))
    return None if content.body is None else (content.body, dict(content.headers))


def is_sealed(headers: Mapping[str, str]) -> bool:
    """Return whether an event with these headers is encrypted."""
    return is_encrypted(_content(b"", headers))


def _content(payload: bytes, headers: Mapping[str, str]) -> StoredResponse:
    return StoredResponse(200, tuple(headers.items()), payload)


def _binding(event_id: UUID) -> Binding:
    return Binding(event_id, "outbox", str(event_id), b"", EPOCH, "outbox")
