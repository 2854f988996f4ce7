"""Messages, what identifies them, and what to tell their broker."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

# on a dead letter: how often it was tried; its replay gets max_attempts more
ATTEMPTS = "idempotency-attempts"
REASON = "idempotency-reason"
# on a dead letter, whose broker gives it another id when it is sent back
ORIGINAL_ID = "idempotency-id"
SHOWN = 64
_PLAIN = re.compile(r"[!-~]{1,255}")
_HASHED = re.compile(r".*~sha256:[0-9a-f]{64}", re.DOTALL)
_UNSHOWN = re.compile(r"[^!-~]+")


@dataclass(frozen=True, slots=True)
class Message:
    """A message as its broker identifies it.

    ``source``: the queue, topic or task that it came from; for CloudEvents, the
    ``source`` attribute. ``id``: its id within that source, the same in every
    redelivery. ``headers``: text by name, such as ``traceparent``. ``redelivered``:
    whether the broker says that it has delivered the message before; false if it can't
    tell.

    ``headers`` and ``redelivered`` are not compared.
    """

    source: str
    id: str
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict, compare=False)
    redelivered: bool = field(default=False, compare=False)

    def __post_init__(self) -> None:
        # a broker's client may say None
        object.__setattr__(self, "headers", self.headers or {})

    @property
    def attempts_before(self) -> int:
        """How often the message was tried before it became a dead letter."""
        attempts = str(self.headers.get(ATTEMPTS, ""))
        return int(attempts) if re.fullmatch(r"[0-9]{1,6}", attempts) else 0


class Unidentifiable(ValueError):
    """The message can't be identified, or its body is not bytes. No delivery of it can
    be handled.
    """


def identified(message: Message) -> Message:
    """Return ``message`` with a source and an id that a record can hold, and a body of
    bytes.

    Numbers and UUIDs are converted to text. A source or an id that is longer than 255
    characters, or contains anything but visible ASCII, is hashed; the hash follows the
    readable part. Raises ``Unidentifiable``.
    """
    if not isinstance(message.body, bytes | bytearray | memoryview):
        raise Unidentifiable(
            f"its body is of type {type(message.body).__name__}; it must be bytes"
        )
    source, id = _text(message.source, "source"), _text(message.id, "id")
    return Message(
        storable(source),
        storable(id),
        bytes(message.body),
        message.headers,
        message.redelivered,
    )


def _text(value: Any, what: str) -> str:
    if isinstance(value, bytes):
        value = value.decode("utf-8", "surrogateescape")
    if isinstance(value, int | UUID) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str):
        raise Unidentifiable(f"its {what} is {value!r}; it must be text or a number")
    if not value:
        raise Unidentifiable(
            f"its {what} is empty: a redelivery can't be distinguished from another"
            " message"
        )
    return value


def storable(text: str) -> str:
    """Return ``text`` if it is 1 to 255 visible ASCII characters, else its readable
    part followed by its digest.
    """
    if _PLAIN.fullmatch(text) and not _HASHED.fullmatch(text):
        return text
    shown = _UNSHOWN.sub("_", text)[:SHOWN]
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass"))
    return f"{shown}~sha256:{digest.hexdigest()}"


# --- What to tell the broker ----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ack:
    """Acknowledge the message: it has been handled. ``result``: what the handler
    returned, or ``NOT_KEPT``.
    """

    result: Any


class Done(Ack):
    """The handler ran, and its effects are committed."""


class AlreadyDone(Ack):
    """The message was handled before. The handler did not run again."""


@dataclass(frozen=True, slots=True)
class RetryLater:
    """Deliver the message again after ``delay`` seconds. Neither skip nor delete it."""

    delay: float
    reason: str


class InFlightElsewhere(RetryLater):
    """Another consumer is handling the message now."""


class OutOfTurn(RetryLater):
    """An earlier message has to be handled first. This one was not tried, and its
    broker keeps it behind that one.
    """


class AwaitsOperator(RetryLater):
    """The message is on hold until an operator decides whether it was handled."""


@dataclass(frozen=True, slots=True)
class AwaitsStore(RetryLater):
    """The idempotency store can't be reached.

    ``has_run``: whether the handler ran. It is unknown then whether its effects were
    committed.
    """

    has_run: bool = False


@dataclass(frozen=True, slots=True)
class Retry(RetryLater):
    """The handler raised ``error`` in this ``attempt``, and its effects were rolled
    back.
    """

    attempt: int
    error: Exception = field(compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Reject:
    """The message will not be handled. Dead-letter it with ``reason``."""

    reason: str


class Refused(Reject):
    """The handler raised ``RejectMessage``, now or before."""


class MarkedFailed(Reject):
    """An operator has decided that the message failed."""


class Malformed(Reject):
    """The message can't be identified, or its body differs from the first one under its
    id.
    """


@dataclass(frozen=True, slots=True)
class Exhausted(Reject):
    """All ``attempts`` to handle the message have failed."""

    attempts: int


Delivery = Ack | RetryLater | Reject


class RejectMessage(Exception):
    """Raise this in a handler if the message can never be handled. The handler's
    effects are rolled back.
    """
