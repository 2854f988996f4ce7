"""The contract between the engine and a store. A store reads and writes records; it decides nothing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime
from enum import Enum, auto
from uuid import UUID

from django_idempotency.outcomes import Claimed, Operation, Snapshot, StoredResponse
from django_idempotency.policy import Policy


class Lock(Enum):
    """Why there is no locked record."""

    BUSY = auto()
    ABSENT = auto()


@dataclass(frozen=True, slots=True)
class Seen:
    """A record that was there before. ``busy``: a live holder was seen to have it locked."""

    record: Snapshot
    busy: bool = False


class Store(ABC):
    """Keeps records. Every write that names a ``claim`` changes nothing unless the claim's token is still the record's.

    Methods raise ``StoreUnavailable`` when the store can't be reached, and its kind ``StoreConflict`` when another
    transaction was in the way. Times are the store's own clock.
    """

    @abstractmethod
    def claim(self, operation: Operation, token: UUID, policy: Policy) -> Claimed | Seen | None:
        """Make a record for ``operation``, or show the one there is. ``None``: it came or went just now, ask again."""

    @abstractmethod
    def reconnect(self, policy: Policy) -> bool:
        """Drop a connection that may be stale; false where that would not help."""

    @abstractmethod
    def contend(self, id: UUID, policy: Policy) -> AbstractContextManager[Snapshot | Lock]:
        """A short transaction that holds the record's lock, unless it is absent or busy. Never waits for a holder.

        A busy record shows as ``Lock.BUSY`` or raises ``StoreConflict``.
        """

    @abstractmethod
    def take(self, record: Snapshot, operation: Operation, token: UUID, policy: Policy) -> Claimed:
        """Hand a locked record to a new token."""

    @abstractmethod
    def hold(self, record: Snapshot, reason: str, policy: Policy) -> None:
        """Set a locked record aside for a person to decide."""

    @abstractmethod
    def read(self, id: UUID, policy: Policy) -> Snapshot | None:
        """The record as it stands."""

    @abstractmethod
    def now(self, policy: Policy) -> datetime:
        """The store's clock."""

    @abstractmethod
    def lock(self, claim: Claimed, policy: Policy) -> bool:
        """Lock the record for as long as the open transaction lasts; false if the claim is lost."""

    @abstractmethod
    def complete(self, claim: Claimed, response: StoredResponse, policy: Policy, *, failure: bool = False) -> bool:
        """Store the answer; false if the claim is lost."""

    @abstractmethod
    def fail(self, claim: Claimed, reason: str, policy: Policy, *, held: bool = False) -> bool:
        """Leave the record to a retry, or ``held`` for a person; false if the claim is lost."""

    @abstractmethod
    def release(self, claim: Claimed, policy: Policy) -> bool:
        """Forget the record; false if the claim is lost."""

    @abstractmethod
    def renew(self, claims: Iterable[Claimed], policy: Policy) -> set[UUID]:
        """Extend the claims' leases in one statement; the tokens that still hold theirs."""

    @abstractmethod
    def count_replays(self, counts: dict[UUID, int], policy: Policy) -> None:
        """Add replays to the records' counters."""
