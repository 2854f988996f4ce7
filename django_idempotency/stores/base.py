"""The contract between the engine and a store. A store reads and writes records; it
decides nothing.

To write your own store, subclass ``Store``, and run
``django_idempotency.contrib.testing.StoreContract`` to show that it keeps the contract.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import Enum, auto
from typing import Any, ClassVar
from uuid import UUID

from django.core.exceptions import ImproperlyConfigured

from django_idempotency.models import LIVE, TERMINAL, Status, check_move
from django_idempotency.stores.codec import (
    EPOCH,
    Binding,
    encrypted,
    is_encrypted,
    replayable,
)
from django_idempotency.values.outcomes import (
    Claimed,
    Operation,
    Snapshot,
    StoredResponse,
)
from django_idempotency.values.policy import REQUIRE, Policy


class Unlocked(Enum):
    """Why there is no locked record."""

    BUSY = auto()
    ABSENT = auto()


@dataclass(frozen=True, slots=True)
class Seen:
    """A record that existed already.

    ``busy``: a live owner was seen to have it locked. ``receipt``: what else the store
    wants to know of it later.
    """

    record: Snapshot
    busy: bool = False
    receipt: Any = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Owned:
    """There is no record, but a live owner whose claim is a lock.

    ``same``: whether the owner runs the same request; ``None`` if that is unknown,
    because it may be about to end.
    """

    same: bool | None


# What a claim finds: that there is a record now, which was made for it; one that was
# there; or an owner without one. ``None``: a record was just made or deleted, and the
# engine should ask again.
Found = Claimed | Seen | Owned | None


@dataclass(frozen=True)
class Store(ABC):
    """Keeps the records of one policy in one place. Threads share it.

    ``name``: the alias in ``STORES``, or in ``DATABASES`` for a store in a database.
    ``options``: what ``configure`` returned for the ``OPTIONS``. ``schemas``: where
    ``own_connection`` looks for the table on PostgreSQL.

    What every store guarantees:

    - Of any number of concurrent claims of one key, one makes the record.
    - A write that names a ``claim`` changes nothing unless the claim's token is still
      the record's.
    - What a method has reported holds for every caller afterwards, in any process.
    - Times are timezone-aware and come from the store's own clock, never from the
      application's.
    - Methods raise ``StoreUnavailable`` if the store can't be reached or did not
      respond in time. It is unknown then whether the write took place, and repeating it
      with the same token does no harm. The subclass ``StoreRefused`` says that the
      store responded and wrote nothing. ``StoreConflict`` says that another writer was
      in the way.
    """

    policy: Policy
    name: str
    options: Any = field(default=None, compare=False, repr=False)
    schemas: tuple[str, ...] = ()

    transactional: ClassVar[bool] = False
    """Whether atomic mode is possible: this is a ``DatabaseStore``."""

    # --- configuration

    @classmethod
    def configure(cls, **options: Any) -> Any:
        """Return what the store needs of the ``OPTIONS`` of an entry in ``STORES``,
        once for all its policies.

        Raises ``ImproperlyConfigured`` or ``TypeError`` for invalid options.
        """
        if options:
            raise ImproperlyConfigured(
                f"{cls.__name__} takes no options, but got"
                f" {', '.join(sorted(options))}."
            )

    @classmethod
    def bind(
        cls, policy: Policy, operation: Operation | None, alias: str, options: Any
    ) -> Store:
        """Return the store of ``policy`` that keeps the record of ``operation``. Called
        on every request.
        """
        return cls(policy, alias, options)

    @classmethod
    def unfit_for(cls, policy: Policy, alias: str) -> str | None:
        """Return why this kind of store can't keep what ``policy`` promises; ``None``
        if it can.
        """
        if not policy.is_atomic or cls.transactional:
            return None
        return (
            f"The policy is in atomic mode, but the store {alias!r} ({cls.__name__})"
            " can't commit a view's effects together with the record of its key; set"
            ' mode="lease", or use a store in the database of the effects.'
        )

    @classmethod
    def forget(cls, ids: Collection[UUID], using: str, options: Any) -> float:
        """Stop replaying records of the database ``using`` that were changed behind the
        store's back, by an erasure.

        Return for how many seconds the store may replay them all the same.
        """
        return 0.0

    def objections(self) -> Iterable[str]:
        """Return why the server can't keep what this store promises, a sentence each.
        Asked by a system check.

        Raises ``StoreUnavailable``.
        """
        return ()

    # --- claiming

    def in_foreign_transaction(self) -> bool:
        """Return whether a transaction is open, or would be, in which others could not
        see a claim. What an interrupted run has left open is rolled back first.
        """
        return False

    def recover(self) -> None:  # noqa: B027 (most have nothing to do)
        """Roll back what a claim has left open on this thread's connection, because it
        was struck before its run began.
        """

    @abstractmethod
    def claim(self, operation: Operation, token: UUID) -> Found:
        """Make a record for ``operation``, or return the existing one unchanged, in one
        atomic step.

        The engine repeats a claim whose response was lost with the same token, and
        treats a record with that token as its own.
        """

    def reconnect(self) -> bool:
        """Drop a connection that may be stale; return false if that would not help."""
        return False

    @abstractmethod
    def try_lock(self, id: UUID) -> AbstractContextManager[Snapshot | Unlocked]:
        """Show the record, and let ``reassign`` or ``hold`` change it unless it changes
        first. Never wait for an owner.

        A store may lock the record. Then show a busy one as ``Unlocked.BUSY``, or raise
        ``StoreConflict``. A store may do without a lock if ``reassign`` and ``hold``
        raise ``StoreConflict`` when the record is no longer what was shown. A renewal
        of the lease is a change.
        """

    @abstractmethod
    def reassign(self, record: Snapshot, operation: Operation, token: UUID) -> Claimed:
        """Give the record of ``try_lock`` to a new token, with a new lease and the
        content of ``operation``.

        ``successor`` says which claim that is.
        """

    @staticmethod
    def successor(record: Snapshot, operation: Operation, token: UUID) -> Claimed:
        """Return ``record`` as it is once it is reassigned: one attempt more, or
        attempt 1 once it has expired.

        Raises ``IllegalMove`` if it has a response that has not expired.
        """
        expired = record.expires_at <= record.now
        check_move(record.status, Status.PROCESSING, expired=expired)
        attempt = 1 if expired and record.status in TERMINAL else record.attempts + 1
        return Claimed(
            operation, token, attempt, taken_over=record.status == Status.PROCESSING
        )

    @abstractmethod
    def hold(self, record: Snapshot, reason: str) -> None:
        """Put the record of ``try_lock`` on hold, for an operator to decide. It is kept
        however long that takes.
        """

    @abstractmethod
    def read(self, id: UUID) -> Snapshot | None:
        """Return the record as it stands; ``None`` if there is none."""

    def has_owner(self, operation: Operation) -> bool:
        """Return whether the key of ``operation`` has a live owner whose claim is a
        lock.
        """
        return False

    def lookup(self, operation: Operation) -> Snapshot | None:
        """Return the record of ``operation``. If it has a response, it may be as it was
        a short while ago.
        """
        return self.read(operation.id)

    # --- running

    @abstractmethod
    def complete(
        self, claim: Claimed, response: StoredResponse, *, failure: bool = False
    ) -> bool:
        """Store exactly this response for ``retention`` seconds from now; return false
        if the claim is lost.

        ``failure``: set the status to failed, not completed. Raises
        ``TransactionEnded`` if the transaction in which the claim was locked is not the
        open one.
        """

    @abstractmethod
    def fail(self, claim: Claimed, reason: str, *, on_hold: bool = False) -> bool:
        """Leave the record to a retry, or put it ``on_hold`` for an operator; return
        false if the claim is lost.

        A claim is put on hold in any case if the transaction in which it was locked has
        been committed.
        """

    @abstractmethod
    def release(self, claim: Claimed) -> bool:
        """Delete the record, so that the key is free; return false if the claim is
        lost.

        Raises ``TransactionEnded`` as ``complete`` does.
        """

    def may_have_lost(self, claim: Claimed) -> bool:
        """Return whether the store itself may have lost the record of ``claim``, which
        is gone, for example in a failover. Its owner then claims the key again, to
        write its response.

        Return false if the record may have been given to another token, put on hold or
        deleted by anybody but the owner.
        """
        return False

    @abstractmethod
    def renew(self, claims: Iterable[Claimed]) -> set[UUID]:
        """Extend the leases of all ``claims`` at once; return the tokens whose leases
        were extended.

        Tokens of lost claims are left out, and those of locked ones may be.
        """

    @abstractmethod
    def leases_left(self, records: Mapping[UUID, UUID]) -> dict[UUID, timedelta]:
        """Return how long the lease of each token lasts, negative once it has lapsed;
        omit tokens without a record.

        ``records``: maps each token to the id of its record.

        This must fail if the store refuses writes: an owner that can't renew its lease
        may be alive, and has to be given time once it can.
        """

    @abstractmethod
    def expire(self, records: Mapping[UUID, UUID]) -> None:
        """Let leases that are still lapsed end when they began, so that the next caller
        may take over.

        ``records``: maps each token to the id of its record. An owner that comes back
        may still ``renew``.
        """

    def at(self, receipt: Any) -> Store:
        """Return this store, bound to where it found the record that has this
        ``receipt``, for other threads.
        """
        return self

    def own_connection(self, *, seconds: float) -> AbstractContextManager[None]:
        """Have this thread use a connection of its own, which waits no longer than
        ``seconds`` for anything.
        """
        return nullcontext()

    @abstractmethod
    def count_replays(self, counts: dict[UUID, int]) -> None:
        """Add ``counts``, the replays by record id, to the records' counters. Don't
        make a record that is missing.
        """

    # --- encoding: called by the engine, so that no store can leave it out

    def encode(self, response: StoredResponse, claim: Claimed) -> StoredResponse:
        """Return ``response`` as the record of ``claim`` stores it: encrypted, if the
        policy says so.
        """
        if not self.policy.body.encrypt:
            return response
        created_at = self.created_at(claim)
        if created_at is None:
            record = self.read(claim.id)
            # without a record, the claim is lost
            created_at = EPOCH if record is None else record.created_at
        binding = Binding.of(claim.operation, created_at, claim.operation.view)
        return encrypted(response, binding) or response.without_content()

    def decode(
        self, response: StoredResponse, record: Snapshot, view: str = ""
    ) -> StoredResponse:
        """Return what ``encode`` was given, unless the policy does not let it be
        replayed. ``view``: what the log calls the record's view or task.
        """
        if not is_encrypted(response) and self.policy.body.encrypt != REQUIRE:
            return response
        binding = Binding.of(record, record.created_at, view)
        return replayable(response, binding, self.policy)

    def created_at(self, claim: Claimed) -> datetime | None:
        """Return when the record of ``claim`` was made, or began anew; ``None`` if only
        reading it would tell.
        """
        return None

    # --- maintenance

    @abstractmethod
    def records(self) -> Iterator[Snapshot]:
        """Yield all records, in no particular order. One that is made or deleted
        meanwhile may be left out.
        """

    def unfinished(self) -> Iterator[Snapshot]:
        """Yield the records that are live or on hold, as ``records`` does, or some of
        them if there are very many.

        Figures are made of these, at each scrape, in a second or two: a store with many
        records needs an index.
        """
        return (
            record
            for record in self.records()
            if record.on_hold or record.status in LIVE
        )

    @abstractmethod
    def delete(self, record: Snapshot) -> bool:
        """Delete a record that an operator was shown, so that its key is free; return
        false if it has changed since.

        A live owner is not asked: it will find its claim lost.
        """
