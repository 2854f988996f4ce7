"""The closed sets of values that pass between the doors, the engine and the stores."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any
from uuid import UUID

from django_idempotency.keys import record_id

Headers = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """An answer as it is kept and replayed.

    ``body`` is the exact bytes, or ``None`` where the body was not stored (a streaming or an oversize answer, or by
    policy). Neither it nor the headers show in the representation, which may end up in a log.
    """

    status: int
    headers: Headers = field(default=(), repr=False)
    body: bytes | None = field(default=b"", repr=False)


class Door(StrEnum):
    """Which way an operation came in."""

    MIXIN = "mixin"
    DECORATOR = "decorator"
    MIDDLEWARE = "middleware"
    CONSUMER = "consumer"
    CELERY = "celery"
    MAINTENANCE = "maintenance"


@dataclass(frozen=True, slots=True)
class Operation:
    """What a caller asks to be done once: its identity (scope and key) and its content (fingerprint)."""

    scope: str
    key: str
    fingerprint: bytes
    method: str = ""
    path: str = ""
    sender: object = field(default=None, compare=False)  # the view or consumer, for signals
    door: Door | None = field(default=None, compare=False)
    sent: datetime | None = field(default=None, compare=False)  # first sent, by the client's own account
    id: UUID = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "id", record_id(self.scope, self.key))

    @property
    def view(self) -> str:
        """The dotted name of the sender; empty without one. Never more names than there are in the code."""
        if self.sender is None:
            return ""
        named: Any = self.sender if hasattr(self.sender, "__qualname__") else type(self.sender)
        return f"{named.__module__}.{named.__qualname__}"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A record as one statement saw it, with the database's time of that statement in ``now``."""

    id: UUID
    scope: str
    key: str
    fingerprint: bytes
    mode: str
    hold_on_crash: bool
    created_at: datetime
    status: str
    attempts: int
    held: bool
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
    def response(self) -> StoredResponse | None:
        if self.response_status is None:
            return None
        headers = tuple((name, value) for name, value in self.response_headers)
        return StoredResponse(self.response_status, headers, self.response_body)


# --- The outcomes of a claim: what a door matches on -----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Claimed:
    """The caller holds the key and must run. ``token`` is the fencing token of this attempt.

    ``created``, ``place``: when and where the record was made, in the store's own words, if it told.
    """

    operation: Operation
    token: UUID
    attempt: int = 1
    taken_over: bool = False
    created: str | None = field(default=None, compare=False)
    place: str | None = field(default=None, compare=False)

    @property
    def id(self) -> UUID:
        return self.operation.id


@dataclass(frozen=True, slots=True)
class Replay:
    """The operation is done; this is its answer."""

    response: StoredResponse


@dataclass(frozen=True, slots=True)
class InFlight:
    """Somebody is running the operation now; ask again after ``retry_after`` seconds."""

    retry_after: int


@dataclass(frozen=True, slots=True)
class Mismatch:
    """The key was first used for another request."""


@dataclass(frozen=True, slots=True)
class Held:
    """The operation may or may not have happened; a person has to decide."""

    reason: str


Outcome = Claimed | Replay | InFlight | Mismatch | Held
Duplicate = Replay | InFlight | Mismatch | Held


@dataclass(frozen=True, slots=True)
class Available:
    """Not an outcome but a decision: the record may change hands, ``after`` seconds from now at the earliest."""

    after: float = 0.0


# --- Verdicts: what becomes of the record after the run --------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Keep:
    """Store the answer and replay it. ``failure`` marks a terminal failure; ``rollback`` undoes its effects first."""

    response: StoredResponse
    failure: bool = False
    rollback: bool = False


@dataclass(frozen=True, slots=True)
class Fail:
    """Roll back; a retry may run again, or ``held``, a person has to decide."""

    reason: str
    held: bool = False


@dataclass(frozen=True, slots=True)
class Release:
    """Roll back and forget: the key is as if it had never been used."""


Verdict = Keep | Fail | Release
