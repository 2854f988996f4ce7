"""The contract between the engine and a store. A store reads and writes records; it decides nothing.

A store of your own subclasses ``Store``, and shows that it keeps the contract by running
``django_idempotency.testing.StoreContract``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import Enum, auto
from typing import Any, ClassVar
from uuid import UUID

from django.core.checks import CheckMessage
from django.core.exceptions import ImproperlyConfigured

from django_idempotency.outcomes import Claimed, Operation, Snapshot, StoredResponse
from django_idempotency.policy import Policy
from django_idempotency.stores.codec import EPOCH, Life, encoded, replayable


class Unlocked(Enum):
    """Why there is no locked record."""

    BUSY = auto()
    ABSENT = auto()


@dataclass(frozen=True, slots=True)
class Seen:
    """A record that was there before.

    ``busy``: a live owner was seen to have it locked. ``schemas``: where PostgreSQL looked for the table.
    """

    record: Snapshot
    busy: bool = False
    schemas: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Owned:
    """There is no record, but a live owner: its claim is a lock.

    ``same``: whether it runs the same request; ``None`` where that can't be told just now, as it may be about to end.
    """

    same: bool | None


@dataclass(frozen=True)
class Store(ABC):
    """Keeps the records of one policy in one place. Threads share it.

    ``name``: the alias in ``STORES``, or for a store in a database that in ``DATABASES``. ``options``: what
    ``configure`` made of the ``OPTIONS``.

    What every store guarantees:

    - Of any number of concurrent claims of one key, one makes the record.
    - A write that names a ``claim`` changes nothing unless the claim's token is still the record's.
    - What a method has told is so for every caller afterwards, in whatever process.
    - Times are the store's own clock, timezone-aware, and never the application's.
    - Methods raise ``StoreUnavailable`` when the store can't be reached or did not answer in time: whether the write
      took place is unknown then, and repeating it with the same token does no harm. Its kind ``StoreRefused`` says that
      the store did answer, and wrote nothing; ``StoreConflict``, that another writer was in the way.
    """

    policy: Policy
    name: str
    options: Any = field(default=None, compare=False, repr=False)

    transactional: ClassVar[bool] = False
    """Whether a run's effects can be committed together with its record, in ``transaction()``."""

    liveness_by_lock: ClassVar[bool] = False
    """Whether ``lock()`` proves an owner alive, and its end the owner dead, without a clock."""

    server_clock: ClassVar[bool] = True
    """Whether times are those of one server, and not of each process."""

    listing: ClassVar[bool] = False
    """Whether the store can list its records."""

    @classmethod
    def supports_atomic(cls) -> bool:
        """Return whether atomic mode is possible; it takes a transaction and its row lock."""
        return cls.transactional and cls.liveness_by_lock

    # --- configuration

    @classmethod
    def configure(cls, **options: Any) -> Any:
        """Return what the ``OPTIONS`` of an entry in ``STORES`` come to, once for all its policies.

        Raises ``ImproperlyConfigured`` or ``TypeError`` for options that can't be meant.
        """
        if options:
            raise ImproperlyConfigured(f"{cls.__name__} has no options, but got {', '.join(sorted(options))}.")

    @classmethod
    def bind(cls, policy: Policy, operation: Operation | None, alias: str, options: Any) -> Store:
        """Return the store of ``policy`` that keeps the record of ``operation``. Called on every request."""
        return cls(policy, alias, options)

    def check(self, *, ask: bool) -> list[CheckMessage]:
        """Return system check messages. ``ask``: the server may be asked, as under ``check --database``."""
        return []

    # --- claiming

    @abstractmethod
    def in_foreign_transaction(self) -> bool:
        """Return whether a transaction is open, or would be, in which others could not see a claim."""

    def discard_abandoned_connection(self) -> None:  # noqa: B027 (most have none)
        """Discard a connection that was left in the middle of a transaction that no code can end any more."""

    @abstractmethod
    def claim(self, operation: Operation, token: UUID) -> Claimed | Seen | Owned | None:
        """Make a record for ``operation``, or show the one there is, unchanged. In one atomic act.

        ``None``: it came or went just now, ask again. The engine repeats a claim whose response was lost with the same
        token, and takes a record of that token for its own.
        """

    def claim_many(self, wanted: Sequence[tuple[Operation, UUID]]) -> Sequence[Claimed | Seen | Owned | None]:
        """``claim`` each of several operations with its token, always by a record."""
        return [self.claim(operation, token) for operation, token in wanted]

    @abstractmethod
    def reconnect(self) -> bool:
        """Drop a connection that may be stale; return false where that would not help."""

    def give_back(self) -> bool:
        """Give back this thread's connection while it waits; return false if it has none, or another is not the same.

        The next call takes one.
        """
        return False

    @abstractmethod
    def try_lock(self, id: UUID) -> AbstractContextManager[Snapshot | Unlocked]:
        """Show the record, and let ``reassign`` or ``hold`` change it unless it changes first. Never wait for an owner.

        By a lock, which a busy record shows as ``Unlocked.BUSY`` or by ``StoreConflict``; or without one, if
        ``reassign`` and ``hold`` raise ``StoreConflict`` when the record is no longer what was shown. A renewal of the
        lease is a change.
        """

    @abstractmethod
    def reassign(self, record: Snapshot, operation: Operation, token: UUID) -> Claimed:
        """Give the record of ``try_lock`` to a new token, with a new lease and the content of ``operation``.

        Its attempts go up by one; a terminal record that has expired starts anew, at attempt 1. ``taken_over`` tells
        that it was processing.
        """

    @abstractmethod
    def hold(self, record: Snapshot, reason: str) -> None:
        """Put the record of ``try_lock`` on hold, for an operator to decide. It stays, however long that takes."""

    @abstractmethod
    def read(self, id: UUID) -> Snapshot | None:
        """Return the record as it stands; ``None`` if there is none."""

    def has_owner(self, operation: Operation) -> bool:
        """Return whether a live owner has the key whose claim is a lock."""
        return False

    def look(self, operation: Operation) -> Snapshot | None:
        """``read`` the record of ``operation``, perhaps as it was a short while ago if it has a response."""
        return self.read(operation.id)

    @abstractmethod
    def now(self) -> datetime:
        """Return the store's time."""

    # --- running

    @abstractmethod
    def complete(self, claim: Claimed, response: StoredResponse, *, failure: bool = False) -> bool:
        """Store the response, exactly, for ``retention`` seconds from now; return false if the claim is lost.

        ``failure``: the status is failed, not completed. Raises ``TransactionEnded`` if the transaction in which the
        claim was locked is not the open one.
        """

    @abstractmethod
    def fail(self, claim: Claimed, reason: str, *, on_hold: bool = False) -> bool:
        """Leave the record to a retry, or put it ``on_hold`` for an operator; return false if the claim is lost.

        A claim that was locked in a transaction which has been committed is put on hold in any case.
        """

    @abstractmethod
    def release(self, claim: Claimed) -> bool:
        """Delete the record, so that the key is free; return false if the claim is lost.

        Raises ``TransactionEnded``.
        """

    @abstractmethod
    def renew(self, claims: Iterable[Claimed]) -> set[UUID]:
        """Extend the claims' leases, all in one go; return the tokens whose leases were extended.

        Those that are lost are left out, and so may be those that are locked.
        """

    @abstractmethod
    def leases_left(self, records: Mapping[UUID, UUID]) -> dict[UUID, timedelta]:
        """Return how long the lease of each token lasts, negative once it has lapsed; less the tokens without a record.

        ``records``: from each token to the id of its record.
        """

    @abstractmethod
    def expire(self, records: Mapping[UUID, UUID]) -> None:
        """Let leases that have lapsed, and still have, end where they began: the next caller may take over.

        ``records``: from each token to the id of its record. An owner that comes back may still ``renew``.
        """

    def own_connection(self, *, seconds: float, schemas: Sequence[str] = ()) -> AbstractContextManager[None]:
        """Have this thread use a connection of its own, which waits no longer than ``seconds`` for anything."""
        return nullcontext()

    @abstractmethod
    def count_replays(self, counts: dict[UUID, int]) -> None:
        """Add replays to the records' counters; make no record of an id that has none."""

    # --- encoding: the engine asks for it, so that no store can leave it out

    def encode(self, response: StoredResponse, claim: Claimed) -> StoredResponse:
        """Return ``response`` as the record of ``claim`` stores it: encrypted, if the policy says so."""
        if not self.policy.encrypt:
            return response
        created_at = self.created_at(claim)
        if created_at is None:
            record = self.read(claim.id)
            created_at = EPOCH if record is None else record.created_at  # without a record, the claim is lost
        return encoded(response, Life.of(claim.operation, created_at), self.policy)

    def decode(self, response: StoredResponse, record: Snapshot) -> StoredResponse:
        """Return what ``encode`` was given, unless the policy does not let it be replayed."""
        return replayable(response, Life.of(record, record.created_at), self.policy)

    def created_at(self, claim: Claimed) -> datetime | None:
        """Return when the record of ``claim`` was made, or began anew; ``None`` where that takes a look at it."""
        return None

    # --- maintenance

    def records(self) -> Iterator[Snapshot]:
        """Yield the records there are, in no order; one that comes or goes meanwhile may be left out."""
        raise NotImplementedError(f"{type(self).__name__} can't list its records.")

    def delete(self, record: Snapshot) -> bool:
        """Delete a record that an operator was shown, so that its key is free; return false if it has changed since.

        Wherever records can be listed. An owner that lives is not asked: it finds that its claim is lost.
        """
        raise NotImplementedError(f"{type(self).__name__} can't delete its records.")

    # --- atomic mode; only where ``supports_atomic()``

    def transaction(self) -> AbstractContextManager[None]:
        """The business transaction."""
        raise NotImplementedError(f"{type(self).__name__} supports lease mode only.")

    def must_roll_back(self) -> bool:
        """Return whether the business transaction can't be committed any more."""
        raise NotImplementedError(f"{type(self).__name__} supports lease mode only.")

    def roll_back(self) -> None:
        """Have the business transaction rolled back at its end."""
        raise NotImplementedError(f"{type(self).__name__} supports lease mode only.")

    def roll_back_left_open(self, error: BaseException) -> None:
        """Roll back the business transaction if ``error`` kept it from being left."""
        raise NotImplementedError(f"{type(self).__name__} supports lease mode only.")

    def lock(self, claim: Claimed) -> Claimed | None:
        """Lock the record for as long as the business transaction lasts; ``None`` if the claim is lost.

        Returns the claim with its ``transaction``.
        """
        raise NotImplementedError(f"{type(self).__name__} supports lease mode only.")

    def look_after_commit(self, claim: Claimed) -> Snapshot | Unlocked:
        """Return the record of a claim by lock whose COMMIT was not answered; ``BUSY`` while that is not over."""
        raise NotImplementedError(f"{type(self).__name__} has no claims by lock.")

    def take_over_hooks(self, report: Callable[[Exception], None]) -> Callable[[], None]:
        """Have every hook of the business transaction run after COMMIT, whatever the others raise; it is reported.

        Call it last thing inside the transaction. Returns what runs those that have not run yet.
        """
        raise NotImplementedError(f"{type(self).__name__} supports lease mode only.")

    def has_released(self, claim: Claimed) -> bool:
        """Whether the transaction is committed in which the claim was released, whose COMMIT was not answered."""
        raise NotImplementedError(f"{type(self).__name__} supports lease mode only.")

    def lock_many(self, claims: Sequence[Claimed]) -> set[UUID]:
        """``lock`` each of several records; the tokens that still own theirs."""
        return {claim.token for claim in claims if self.lock(claim)}

    def complete_many(self, results: Sequence[tuple[Claimed, StoredResponse]]) -> int:
        """``complete`` each of several claims; how many still owned their record."""
        return sum(self.complete(claim, response) for claim, response in results)
