"""The message door: the same engine for what arrives by queue."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from django.core.serializers.json import DjangoJSONEncoder

from django_idempotency import engine, signals
from django_idempotency.conf import resolve
from django_idempotency.engine import Context
from django_idempotency.exceptions import ClaimLost, StoreUnavailable
from django_idempotency.fingerprints import canonical_json, digest, encode_json
from django_idempotency.outcomes import (
    Claimed,
    Door,
    Duplicate,
    Held,
    InFlight,
    Keep,
    Mismatch,
    Operation,
    Outcome,
    Replay,
    StoredResponse,
)
from django_idempotency.policy import Policy

METHOD = "MESSAGE"
DONE = 200
REJECTED = 422
HELD_DELAY = 60
REJECTED_BEFORE = "the handler rejected it before"


@dataclass(frozen=True, slots=True)
class Message:
    """A message as its broker identifies it: ``source`` (queue, topic, task) and ``id`` within that source."""

    source: str
    id: str
    body: bytes = b""


@dataclass(frozen=True, slots=True)
class Ack:
    """Acknowledge the message. ``replayed``: it was handled before, and ``result`` is what came of it then."""

    result: Any
    replayed: bool = False


@dataclass(frozen=True, slots=True)
class RetryLater:
    """Leave the message unacknowledged, or put it back; look at it again after ``delay`` seconds."""

    delay: float
    reason: str


@dataclass(frozen=True, slots=True)
class Reject:
    """The message can never be handled: dead-letter it."""

    reason: str


class RejectMessage(Exception):
    """Raise it in a handler: the message can't be handled, now or ever. Its effects are rolled back."""


Delivery = Ack | RetryLater | Reject
Handler = Callable[[Message, Context], Any]


def consume(
    message: Message,
    handler: Handler,
    *,
    policy: Policy | None = None,
    sender: object = None,
    door: Door = Door.CONSUMER,
) -> Delivery:
    """Handle a message once, however often it is delivered, and say what to tell the broker.

    In atomic mode the handler's effects, its result (anything JSON can hold) and the record are one transaction;
    acknowledge after this returns. The handler's exceptions pass through: the message is left to a redelivery.
    ``sender`` is what signals name, the handler unless stated; ``door`` what metrics and logs call this way in.

    Raises ``TypeError`` for a result that JSON can't hold; nothing is committed then.
    """
    policy = resolve(policy or Policy())
    operation = Operation(
        scope=message.source,
        key=message.id,
        fingerprint=_fingerprint(message),
        method=METHOD,
        sender=sender or handler,
        door=door,
    )
    try:
        outcome = _claim(operation, policy)
        if isinstance(outcome, Claimed):
            return _handle(message, handler, outcome, policy)
    except ClaimLost:
        outcome = engine.duplicate(operation, policy)
    except StoreUnavailable as error:
        return RetryLater(delay=1, reason=str(error))
    return _delivery(outcome)


def _claim(operation: Operation, policy: Policy) -> Outcome:
    try:
        return engine.claim(operation, policy)
    except StoreUnavailable as error:
        signals.send(signals.store_failed, operation, error=error)
        raise


def _handle(message: Message, handler: Handler, claimed: Claimed, policy: Policy) -> Delivery:
    with engine.execution(claimed, policy) as execution:
        try:
            result = handler(message, execution.context)
        except RejectMessage as rejection:
            reason = str(rejection) or "the handler rejected it"
            execution.settle(Keep(_encoded(REJECTED, reason, policy), failure=True, rollback=True))
            return Reject(reason)
        execution.settle(Keep(_encoded(DONE, result, policy)))
    return Ack(result)


def _encoded(status: int, result: Any, policy: Policy) -> StoredResponse:
    body = json.dumps(result, cls=DjangoJSONEncoder).encode()
    headers = (("Content-Type", "application/json"),)
    return StoredResponse(status, headers, body if len(body) <= policy.max_body else None)


def _delivery(outcome: Duplicate) -> Delivery:
    match outcome:
        case Replay(response):
            result = None if response.body is None else json.loads(response.body)
            return Reject(result or REJECTED_BEFORE) if response.status == REJECTED else Ack(result, replayed=True)
        case InFlight(retry_after):
            return RetryLater(retry_after, "another consumer is handling the message")
        case Held(reason):
            return RetryLater(HELD_DELAY, reason)
        case Mismatch():
            return Reject("its id was first used for a message with another body")


def _fingerprint(message: Message) -> bytes:
    try:
        body = encode_json(canonical_json(message.body))
    except ValueError:
        body = message.body
    return digest([message.source.encode(), message.id.encode(), body])
