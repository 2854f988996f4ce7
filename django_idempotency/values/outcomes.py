"""The closed sets of values that pass between the entry points, the engine and the
stores.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any
from uuid import UUID

from django_idempotency.values.keys import record_id

Headers = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response as it is kept and replayed, with its HTTP ``status``.

    ``body`` is the exact bytes, or ``None`` if the body was not stored (a streaming or
    oversize response, or by policy). ``repr()`` shows neither body nor headers, because
    it may end up in a log.
    """

    status: int
    headers: Headers = field(default=(), repr=False)
    body: bytes | None = field(default=b"", repr=False)

    @classmethod
    def of(
        cls, status: int, headers: Any, body: bytes | memoryview | None
    ) -> StoredResponse:
        """Return the response in a record's columns; without headers and body if the
        stored headers are damaged.
        """
        if not (isinstance(headers, list | tuple) and are_headers(headers)):
            return cls(status, body=None)
        body = None if body is None else bytes(body)
        return cls(status, tuple(map(tuple, headers)), body)

    @property
    def has_content(self) -> bool:
        return self.body is not None or bool(self.headers)

    def without_content(self) -> StoredResponse:
        return StoredResponse(self.status, body=None)


# RFC 9110, section 5.6.2; a leading colon for what is no header
_NAME = re.compile(r":?[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_VALUE = re.compile(r"[^\0\r\n\u0100-\U0010ffff]*")


def are_headers(pairs: Iterable[Any]) -> bool:
    """Whether these are pairs of a header name and a value that a server can send."""
    for pair in pairs:  # a generator would cost each replay as much again
        is_pair = isinstance(pair, list | tuple) and len(pair) == 2
        if not (is_pair and is_header(*pair)):
            return False
    return True


def is_header(name: object, value: object) -> bool:
    """Whether this is the name and the value of a header that a server can send."""
    if not (isinstance(name, str) and isinstance(value, str)):
        return False
    return bool(_NAME.fullmatch(name) and _VALUE.fullmatch(value))


def is_storable(response: Any) -> bool:
    """Return whether this is a response that can be stored and sent: real headers, and
    a body of bytes or ``None``.
    """
    return (
        isinstance(response, StoredResponse)
        and (response.body is None or isinstance(response.body, bytes))
        and are_headers(response.headers)
        and not any(name.startswith(":") for name, _value in response.headers)
    )


def dotted_name(sender: object) -> str:
    """Return the module and name of a function or a class; those of its class for any
    other object.
    """
    named: Any = sender if hasattr(sender, "__qualname__") else type(sender)
    return f"{named.__module__}.{named.__qualname__}"


class EntryPoint(StrEnum):
    """The kind of entry point through which an operation came in."""

    MIXIN = "mixin"
    DECORATOR = "decorator"
    MIDDLEWARE = "middleware"
    CONSUMER = "consumer"
    CELERY = "celery"
    FUNCTION = "function"
    MAINTENANCE = "maintenance"


class Rejection(StrEnum):
    """Why a request is neither run nor replayed."""

    IN_FLIGHT = "in_flight"
    WAIT_TIMEOUT = "wait_timeout"
    KEY_REUSED = "key_reused"
    ON_HOLD = "on_hold"
    FORBIDDEN = "forbidden"
    NOT_ADMITTED = "not_admitted"


class Unprotected(StrEnum):
    """Why a request with a key is run without a claim."""

    NO_SCOPE = "no_scope"
    NO_HANDLER = "no_handler"
    ASYNC_CLASS = "async_class"
    FAIL_OPEN = "fail_open"


@dataclass(frozen=True, slots=True)
class StoredRecord:
    """The record as ``may_replay`` gets it: whose it is, and the stored ``response``
    that would be replayed.
    """

    id: UUID
    scope: str
    key: str
    method: str
    path: str
    response: StoredResponse


@dataclass(frozen=True, slots=True)
class Operation:
    """What a caller wants to be done once: its identity (scope and key) and its content
    (fingerprint).

    ``fingerprint``: as a store keeps it. ``digest``: that of the request, without a
    digest key; ``None`` if unknown. ``database``: the alias of the record's database,
    if the routers or a callable ``using`` have chosen it for the run.
    """

    scope: str
    key: str
    fingerprint: bytes
    method: str = ""
    path: str = ""
    # the view or consumer, for signals
    sender: object = field(default=None, compare=False)
    entry_point: EntryPoint | None = field(default=None, compare=False)
    database: str | None = field(default=None, compare=False)
    permits: Callable[[StoredRecord], object] | None = field(
        default=None, compare=False, repr=False
    )
    digest: bytes | None = field(default=None, compare=False, repr=False)
    id: UUID = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "id", record_id(self.scope, self.key))

    def may_get(self, response: StoredResponse) -> bool:
        record = StoredRecord(
            self.id, self.scope, self.key, self.method, self.path, response
        )
        return self.permits is None or self.permits(record) is True

    @property
    def view(self) -> str:
        """The dotted name of the sender; empty without one. The number of names is
        limited by the code.
        """
        return "" if self.sender is None else dotted_name(self.sender)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A record as one statement saw it. ``now`` is the database's time of that
    statement.
    """

    id: UUID
    scope: str
    key: str
    fingerprint: bytes
    mode: str
    hold_on_crash: bool
    created_at: datetime
    status: str
    attempts: int
    on_hold: bool
    reason: str
    token: UUID | None
    locked_at: datetime | None
    locked_until: datetime | None
    expires_at: datetime
    response_status: int | None
    response_headers: Any = field(repr=False)
    response_body: bytes | None = field(repr=False)
    now: datetime

    @property
    def version(self) -> tuple[object, ...]:
        """Values that change whenever the record does, except for the count of
        replays.
        """
        return (
            self.status,
            self.token,
            self.attempts,
            self.locked_until,
            self.expires_at,
            self.created_at,
        )

    @property
    def lease_expired(self) -> bool:
        """Whether its lease was watched for a heartbeat's time without being renewed.
        Its end is its start then.
        """
        return (
            self.locked_at is not None
            and self.locked_until is not None
            and self.locked_until <= self.locked_at
        )

    @property
    def response(self) -> StoredResponse | None:
        if self.response_status is None:
            return None
        return StoredResponse.of(
            self.response_status, self.response_headers, self.response_body
        )


# --- The outcomes of a claim: what an entry point matches on --------------------------


@dataclass(frozen=True, slots=True)
class Claimed:
    """The caller holds the key and must run. ``token`` is the fencing token of this
    attempt.

    ``by_lock``: the claim is a lock held by the business transaction, and there is no
    record yet. ``receipt``: what the store wants to know of the claim later, in its own
    format.
    """

    operation: Operation
    token: UUID
    attempt: int = 1
    taken_over: bool = False
    by_lock: bool = field(default=False, compare=False)
    receipt: Any = field(default=None, compare=False, repr=False)

    @property
    def id(self) -> UUID:
        return self.operation.id

    def with_receipt(self, receipt: Any) -> Claimed:
        return Claimed(
            self.operation,
            self.token,
            self.attempt,
            self.taken_over,
            self.by_lock,
            receipt,
        )


@dataclass(frozen=True, slots=True)
class Replay:
    """The operation is done; this is its response."""

    response: StoredResponse


@dataclass(frozen=True, slots=True)
class InFlight:
    """Another caller is running the operation; ask again after ``retry_after``
    seconds.
    """

    retry_after: int


@dataclass(frozen=True, slots=True)
class Mismatch:
    """The key was first used for another request. ``running``: that one may not have
    ended yet.
    """

    running: bool = field(default=False, compare=False)


@dataclass(frozen=True, slots=True)
class OnHold:
    """The operation may or may not have happened; an operator has to decide."""

    reason: str


Outcome = Claimed | Replay | InFlight | Mismatch | OnHold
Duplicate = Replay | InFlight | Mismatch | OnHold


@dataclass(frozen=True, slots=True)
class Available:
    """Not an outcome but a decision: the record may change owner, ``after`` seconds
    from now at the earliest.
    """

    after: float = 0.0


# --- Verdicts: what happens to the record after the run -------------------------------


@dataclass(frozen=True, slots=True)
class Keep:
    """Store the response and replay it. ``failure`` marks a terminal failure;
    ``rollback`` undoes its effects first.
    """

    response: StoredResponse
    failure: bool = False
    rollback: bool = False


@dataclass(frozen=True, slots=True)
class Fail:
    """Roll back. A retry may run again; with ``on_hold``, an operator has to decide
    instead.
    """

    reason: str
    on_hold: bool = False


@dataclass(frozen=True, slots=True)
class Release:
    """Delete the record: the key is as if it had never been used. ``rollback`` undoes
    the effects first.
    """

    rollback: bool = False


Verdict = Keep | Fail | Release
