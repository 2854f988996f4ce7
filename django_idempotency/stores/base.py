"""The contract between the engine and a store. A store reads and writes records; it decides nothing.

To write your own store, subclass ``Store``, and run ``django_idempotency.testing.StoreContract`` to show that it keeps
the contract.
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
    """A record that existed already.

    ``busy``: a live owner was seen to have it locked. ``schemas``: where PostgreSQL looked for the table.
    """

    record: Snapshot
    busy: bool = False
    schemas: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Owned:
    """There is no record, but a live owner whose claim is a lock.

    ``same``: whether the owner runs the same request; ``None`` if that can't be told now, as it may be about to end.
    """

    same: bool | None


@dataclass(frozen=True)
class Store(ABC):
    """Keeps the records of one policy in one place. Threads share it.

    ``name``: the alias in ``STORES``, or in ``DATABASES`` for a store in a database. ``options``: what ``configure``
    returned for the ``OPTIONS``.

    What every store guarantees:

    - Of any number of concurrent claims of one key, one makes the record.
    - A write that names a ``claim`` changes nothing unless the claim's token is still the record's.
    - What a method has reported holds for every caller afterwards, in any process.
    - Times are timezone-aware and come from the store's own clock, never from the application's.
    - Methods raise ``StoreUnavailable`` if the store can't be reached or did not answer in time. It is unknown then
      whether the write took place, and repeating it with the same token does no harm. The subclass ``StoreRefused``
      says that the store did answer and wrote nothing. ``StoreConflict`` says that another writer was in the way.
    """

    policy: Policy
    name: str
    options: Any = field(default=None, compare=False, repr=False)

    transactional: ClassVar[bool] = False
    """Whether a run's effects can be committed together with its record, in ``transaction()``."""

    liveness_by_lock: ClassVar[bool] = False
    """Whether ``lock()`` proves that an owner is alive, and the end of the lock that it is dead, without a clock."""

    server_clock: ClassVar[bool] = True
    """Whether times are taken from one server's clock, not from that of each process."""

    listing: ClassVar[bool] = False
    """Whether the store can list its records."""

    @classmethod
    def supports_atomic(cls) -> bool:
        """Return whether atomic mode is possible. It needs a transaction and its row lock."""
        return cls.transactional and cls.liveness_by_lock

    # --- configuration

    @classmethod
    def configure(cls, **options: Any) -> Any:
        """Return what the store needs of the ``OPTIONS`` of an entry in ``STORES``, once for all its policies.

        Raises ``ImproperlyConfigured`` or ``TypeError`` for invalid options.
        """
        if options:
            raise ImproperlyConfigured(f"{cls.__name__} takes no options, but got {', '.join(sorted(options))}.")

    @classmethod
    def bind(cls, policy: Policy, operation: Operation | None, alias: str, options: Any) -> Store:
        """Return the store of ``policy`` that keeps the record of ``operation``. Called on every request."""
        return cls(policy, alias, options)

    def check(self, *, ask: bool) -> list[CheckMessage]:
        """Return system check messages. ``ask``: whether the server may be asked, as under ``check --database``."""
        return []

    # --- claiming

    @abstractmethod
    def in_foreign_transaction(self) -> bool:
        """Return whether a transaction is open, or would be, in which others could not see a claim."""

    def discard_abandoned_connection(self) -> None:  # noqa: B027 (most have none)
        """Discard a connection that was left in the middle of a transaction that no code can end any more."""

    @abstractmethod
    def claim(self, operation: Operation, token: UUID) -> Claimed | Seen | Owned | None:
        """Make a record for ``operation``, or return the existing one unchanged, in one atomic step.

        Return ``None`` if a record was just made or deleted, and the engine should ask again. The engine repeats a
        claim whose response was lost with the same token, and treats a record with that token as its own.
        """

    def claim_many(self, wanted: Sequence[tuple[Operation, UUID]]) -> Sequence[Claimed | Seen | Owned | None]:
        """Claim each of several operations with its token, always by record."""
        return [self.claim(operation, token) for operation, token in wanted]

    @abstractmethod
    def reconnect(self) -> bool:
        """Drop a connection that may be stale; return false if that would not help."""

    def give_back(self) -> bool:
        """Give back this thread's connection while it waits. The next call takes one.

        Return false if the thread has none, or if another connection would not be the same.
        """
        return False

    @abstractmethod
    def try_lock(self, id: UUID) -> AbstractContextManager[Snapshot | Unlocked]:
        """Show the record, and let ``reassign`` or ``hold`` change it unless it changes first. Never wait for an owner.

        A store may lock the record. Then show a busy one as ``Unlocked.BUSY``, or raise ``StoreConflict``. A store
        may do without a lock if ``reassign`` and ``hold`` raise ``StoreConflict`` when the record is no longer what
        was shown. A renewal of the lease is a change.
        """

    @abstractmethod
    def reassign(self, record: Snapshot, operation: Operation, token: UUID) -> Claimed:
        """Give the record of ``try_lock`` to a new token, with a new lease and the content of ``operation``.

        Its attempts go up by one, but a terminal record that has expired starts anew at attempt 1. ``taken_over`` of
        the claim says that the record was processing.
        """

    @abstractmethod
    def hold(self, record: Snapshot, reason: str) -> None:
        """Put the record of ``try_lock`` on hold, for an operator to decide. It is kept however long that takes."""

    @abstractmethod
    def read(self, id: UUID) -> Snapshot | None:
        """Return the record as it stands; ``None`` if there is none."""

    def has_owner(self, operation: Operation) -> bool:
        """Return whether the key of ``operation`` has a live owner whose claim is a lock."""
        return False

    def look(self, operation: Operation) -> Snapshot | None:
        """Return the record of ``operation``. If it has a response, it may be as it was a short while ago."""
        return self.read(operation.id)

    @abstractmethod
    def now(self) -> datetime:
        """Return the store's time."""

    # --- running

    @abstractmethod
    def complete(self, claim: Claimed, response: StoredResponse, *, failure: bool = False) -> bool:
        """Store exactly this response for ``retention`` seconds from now; return false if the claim is lost.

        ``failure``: set the status to failed, not completed. Raises ``TransactionEnded`` if the transaction in which
        the claim was locked is not the open one.
        """

    @abstractmethod
    def fail(self, claim: Claimed, reason: str, *, on_hold: bool = False) -> bool:
        """Leave the record to a retry, or put it ``on_hold`` for an operator; return false if the claim is lost.

        A claim is put on hold in any case if the transaction in which it was locked has been committed.
        """

    @abstractmethod
    def release(self, claim: Claimed) -> bool:
        """Delete the record, so that the key is free; return false if the claim is lost.

        Raises ``TransactionEnded`` as ``complete`` does.
        """

    @abstractmethod
    def renew(self, claims: Iterable[Claimed]) -> set[UUID]:
        """Extend the leases of all ``claims`` at once; return the tokens whose leases were extended.

        Tokens of lost claims are left out, and those of locked ones may be.
        """

    @abstractmethod
    def leases_left(self, records: Mapping[UUID, UUID]) -> dict[UUID, timedelta]:
        """Return how long the lease of each token lasts, negative once it has lapsed; omit tokens without a record.

        ``records``: maps each token to the id of its record.

        This must fail if the store refuses writes: an owner that can't renew its lease may be alive, and has to be
        given time once it can.
        """

    @abstractmethod
    def expire(self, records: Mapping[UUID, UUID]) -> None:
        """Let leases that are still lapsed end when they began, so that the next caller may take over.

        ``records``: maps each token to the id of its record. An owner that comes back may still ``renew``.
        """

    def own_connection(self, *, seconds: float, schemas: Sequence[str] = ()) -> AbstractContextManager[None]:
        """Have this thread use a connection of its own, which waits no longer than ``seconds`` for anything."""
        return nullcontext()

    @abstractmethod
    def count_replays(self, counts: dict[UUID, int]) -> None:
        """Add ``counts``, the replays by record id, to the records' counters. Don't make a record that is missing."""

    # --- encoding: called by the engine, so that no store can leave it out

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
        """Return when the record of ``claim`` was made, or began anew; ``None`` if only reading it would tell."""
        return None

    # --- maintenance

    def records(self) -> Iterator[Snapshot]:
        """Yield all records, in no particular order. One that is made or deleted meanwhile may be left out."""
        raise NotImplementedError(f"{type(self).__name__} can't list its records.")

    def delete(self, record: Snapshot) -> bool:
        """Delete a record that an operator was shown, so that its key is free; return false if it has changed since.

        Only stores that can list their records have this. A live owner is not asked: it will find its claim lost.
        """
        raise NotImplementedError(f"{type(self).__name__} can't delete its records.")

    # --- atomic mode; only if ``supports_atomic()``

    def transaction(self) -> AbstractContextManager[None]:
        """Return a context manager that opens the business transaction."""
        raise NotImplementedError(f"{type(self).__name__} supports lease mode only.")

    def savepoints(self) -> Callable[[Callable[[], None]], None]:
        """Return a function that runs other functions in the business transaction, each behind its own savepoint.

        If one raises, its writes and its ``on_commit`` hooks are undone. If one returns but has left the transaction
        marked for rollback, ``TransactionManagementError`` is raised.
        """
        raise NotImplementedError(f"{type(self).__name__} supports lease mode only.")

    def must_roll_back(self) -> bool:
        """Return whether the business transaction can no longer be committed."""
        raise NotImplementedError(f"{type(self).__name__} supports lease mode only.")

    def roll_back(self) -> None:
        """Have the business transaction rolled back at its end."""
        raise NotImplementedError(f"{type(self).__name__} supports lease mode only.")

    def roll_back_left_open(self, error: BaseException) -> None:
        """Roll back the business transaction if ``error`` kept it from being left."""
        raise NotImplementedError(f"{type(self).__name__} supports lease mode only.")

    def lock(self, claim: Claimed) -> Claimed | None:
        """Lock the record until the business transaction ends.

        Return the claim with its ``transaction``, or ``None`` if the claim is lost.
        """
        raise NotImplementedError(f"{type(self).__name__} supports lease mode only.")

    def look_after_commit(self, claim: Claimed) -> Snapshot | Unlocked:
        """Return the record of a claim by lock whose COMMIT was not answered; ``BUSY`` while that may still go on."""
        raise NotImplementedError(f"{type(self).__name__} does not support claims by lock.")

    def take_over_hooks(self, report: Callable[[Exception], None]) -> Callable[[], None]:
        """Have every hook of the business transaction run after COMMIT, even if others raise. Errors go to ``report``.

        Call this last inside the transaction. Return a function that runs the hooks that have not run yet.
        """
        raise NotImplementedError(f"{type(self).__name__} supports lease mode only.")

    def has_released(self, claim: Claimed) -> bool:
        """Return whether the transaction that released the claim, whose COMMIT was not answered, is committed."""
        raise NotImplementedError(f"{type(self).__name__} supports lease mode only.")

    def lock_many(self, claims: Sequence[Claimed]) -> set[UUID]:
        """Lock each of several records; return the tokens that still own theirs."""
        return {claim.token for claim in claims if self.lock(claim)}

    def watch_transaction(self, claim: Claimed) -> Callable[[], None]:
        """Return a function that raises ``TransactionEnded`` if the business transaction has been rolled back since.

        ``claim``: one of those that ``lock_many`` has locked in this transaction. Code that runs in the transaction can
        end it without Django knowing; after a COMMIT the function returns, because the effects are there.
        """
        return lambda: None

    def complete_many(self, results: Sequence[tuple[Claimed, StoredResponse]]) -> int:
        """Complete each of several claims; return how many still owned their record."""
        return sum(self.complete(claim, response) for claim, response in results)
