"""Runs inside the business transaction, whose effects and response are committed
together, or not at all.

Several operations that were claimed by one statement can run in one transaction.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NoReturn
from uuid import UUID

from django.core.exceptions import ImproperlyConfigured
from django.db import InterfaceError, OperationalError
from django.db.transaction import TransactionManagementError

from django_idempotency import signals
from django_idempotency.engine.redaction import redacted
from django_idempotency.engine.run import Run
from django_idempotency.reporting.logs import cause, is_due, log
from django_idempotency.stores import DatabaseStore, PostgreSQLStore, store_for
from django_idempotency.stores.base import Unlocked
from django_idempotency.stores.transactions import (
    Committed,
    InDoubt,
    Send,
    Transaction,
    Undone,
)
from django_idempotency.values.exceptions import (
    ClaimLost,
    StoreConflict,
    StoreUnavailable,
    TransactionEnded,
)
from django_idempotency.values.outcomes import (
    Claimed,
    Fail,
    Keep,
    Operation,
    Release,
    Snapshot,
    Verdict,
)
from django_idempotency.values.policy import Policy

FIRST_PAUSE = 0.02
PATIENCE = 5.0
WRITES = 5  # attempts to write a response if other transactions are in the way
ELSEWHERE = (
    "At its end, the run did not find its record as it had claimed it: the view has"
    " changed the connection's search_path, created a temporary table of the same"
    " name, or changed the record. Undo that before the view returns."
)
HANDLED = (
    "the view has handled a database error outside an inner block, so the database has"
    " undone everything that the view had written; the response is sent but not"
    " stored. Put the statements that may fail into a block of their own: with"
    " transaction.atomic(): …"
)


class AtomicRun(Run):
    """A run inside the business transaction: effects and response are committed
    together, or not at all.
    """

    __slots__ = ("run_hooks", "transaction")
    store: DatabaseStore

    def __init__(
        self,
        claimed: Claimed,
        policy: Policy,
        store: DatabaseStore,
        transaction: Transaction,
    ) -> None:
        super().__init__(claimed, policy, store)
        self.transactional_on = store.name
        self.transaction = transaction
        self.run_hooks: Callable[[], None] = lambda: None

    def begin(self) -> None:
        """Open the transaction with the lock, which proves that the owner is alive."""
        self.transaction.owner = self.context
        try:
            self.transaction.begin()
            locked = self.store.lock(self.claim)
            if locked is None:
                raise ClaimLost
            self.claim = locked
        except BaseException as raised:
            error = self.transaction.abort(raised).error
            if isinstance(error, ClaimLost):
                self.lose(signals.claim_lost)
                raise
            self._leave_to_retry(error)
            _raise(error)

    def outlive_handled_errors(self) -> None:
        self.transaction.outlive_handled_errors()

    def _carry_out(self, verdict: Verdict, error: BaseException | None) -> None:
        if error is not None:
            _explain_durable(error)
        if self._is_undone_by_error(verdict):
            verdict = Release(rollback=True)
        match self._commit(verdict):
            case None:
                self._write_after_rollback(verdict)
            case Committed():
                self.announce(verdict)
            case InDoubt(Exception() as failure):
                self._learn_of_commit(failure)
                self.announce(verdict)
            case Undone(ClaimLost() as lost):
                self._refuse_another_table()
                self.lose(signals.stale_write_rejected)
                raise lost
            # an exiting process leaves its record in order too
            case Undone(failure) | InDoubt(failure):
                self._leave_to_retry(failure)
                raise failure from failure.__cause__

    def _commit(self, verdict: Verdict) -> Committed[None] | Undone | InDoubt | None:
        """Commit the effects with ``verdict``. Return ``None`` if they are rolled back
        because that is what it says.
        """
        try:
            if self._commits(verdict):
                self.run_hooks = self.transaction.defer_hooks(self.report_after_commit)
                return self.transaction.commit_after(partial(self._write_last, verdict))
            _refuse_phantom_success(verdict)
            self.transaction.roll_back()
        except BaseException as raised:
            return self.transaction.abort(raised)
        return None

    def _is_undone_by_error(self, verdict: Verdict) -> bool:
        """Whether the view has handled an error with which the database has ended the
        transaction: nothing can be kept, and a retry after the fix has to run.
        """
        is_success = isinstance(verdict, Keep) and verdict.response.status < 400
        if (
            isinstance(verdict, Fail)
            or verdict.rollback
            or is_success
            or not self.transaction.has_failed
        ):
            return False
        if is_due(f"handled_error {self.claim.operation.view}"):
            log(
                logging.ERROR,
                "handled_error",
                "idempotency record %s: %s",
                self.claim.id,
                HANDLED,
                operation=self.claim.operation,
                attempt=self.claim.attempt,
            )
        return True

    def _commits(self, verdict: Verdict) -> bool:
        return (
            isinstance(verdict, Keep | Release)
            and not verdict.rollback
            and not self.transaction.must_roll_back
        )

    def _write_last(self, verdict: Verdict, send: Send) -> None:
        self.write_by(self.store.sending_by(send), verdict)

    def _refuse_another_table(self) -> None:
        """Raise an error if the claim is still this run's: the view has made its
        session find another table.
        """
        record = self.store.read_after_commit(self.claim)
        # its row was locked: nobody has deleted it
        if record is Unlocked.ABSENT or self._is_undone(record):
            elsewhere = ImproperlyConfigured(ELSEWHERE)
            self._leave_to_retry(elsewhere)
            raise elsewhere

    def _abort(self, error: BaseException) -> None:
        _explain_durable(error)
        outcome = self.transaction.abort(error).error
        self._leave_to_retry(outcome)
        if outcome is not error:
            raise outcome

    def write_and_announce(self, verdict: Verdict) -> None:
        # a failure depends on what became of the transaction
        if not isinstance(verdict, Fail):
            self.claim = self.store.unlocked(self.claim)
        super().write_and_announce(verdict)

    def _write_after_rollback(self, verdict: Verdict) -> None:
        """Write the verdict after a rollback.

        Raises ``StoreUnavailable`` for a response: if it were sent but not stored, a
        retry could get another one.
        """
        if not isinstance(verdict, Keep):
            return self.abandon(verdict)
        for _attempt in range(WRITES):
            try:
                return self.write_and_announce(verdict)
            except StoreConflict as error:
                conflict = error
                time.sleep(FIRST_PAUSE)
        raise conflict

    def _leave_to_retry(self, error: BaseException) -> None:
        """Leave the record to a retry, because nothing was committed."""
        released = None if isinstance(error, TransactionEnded) else self.verdict
        self.abandon(
            released if isinstance(released, Release) else Fail(type(error).__name__)
        )

    # --- A COMMIT whose response was an error

    def _read_after_commit(self, error: Exception) -> Snapshot | Unlocked:
        """Return the record, once its row lock shows that the server is done with the
        transaction.
        """
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            try:
                record = self.store.read_after_commit(self.claim)
                if record is not Unlocked.BUSY:
                    return record
            except (
                StoreUnavailable
            ):  # or another session's lock; Django has closed a broken connection
                pass
            time.sleep(FIRST_PAUSE)
        raise StoreUnavailable(
            "The connection was lost during COMMIT; its outcome is unknown."
        ) from error

    def _learn_of_commit(self, error: Exception) -> None:
        """Return if COMMIT took place although its response was an error. Raise if it
        did not.
        """
        record = self._read_after_commit(error)
        if self._is_undone(record):
            # it did not store its response: not committed
            self.claim = self.store.unlocked(self.claim)
            self.abandon(Fail(type(error).__name__))
            _raise(error)
        if not self._is_committed(record):
            self.lose(signals.stale_write_rejected)
            raise ClaimLost from error
        self.report_after_commit(error)
        self.run_hooks()

    def _is_undone(self, record: Snapshot | Unlocked) -> bool:
        """Whether the record shows that COMMIT did not take place, and the claim is
        still this run's.
        """
        return isinstance(record, Snapshot) and record.token == self.claim.token

    def _is_committed(self, record: Snapshot | Unlocked) -> bool:
        if isinstance(self.verdict, Release):
            return self.store.has_released(self.claim)
        stored = self.stored and self.stored[1]
        return isinstance(record, Snapshot) and record.response == stored

    def report_after_commit(self, error: Exception) -> None:
        log(
            logging.ERROR,
            "committed_with_error",
            "idempotency record %s: its transaction is committed, but: %s",
            self.claim.id,
            cause(error),
            operation=self.claim.operation,
            attempt=self.claim.attempt,
            error=error,
        )


class LockRun(AtomicRun):
    """An atomic run whose claim is a lock. Its business transaction was opened by the
    claim.
    """

    __slots__ = ()

    def begin(self) -> None:
        self.transaction.owner = self.context

    def _is_undone(self, record: Snapshot | Unlocked) -> bool:
        return record is Unlocked.ABSENT and not self._is_committed(record)

    def _is_committed(self, record: Snapshot | Unlocked) -> bool:
        """Judge by the record: after a failover, another transaction with the same
        number does not make it.
        """
        if isinstance(self.verdict, Release):
            return super()._is_committed(record)
        own = isinstance(
            record, Snapshot
        ) and record.created_at == self.store.created_at(self.claim)
        return own and super()._is_committed(record)


def _refuse_phantom_success(verdict: Verdict) -> None:
    if isinstance(verdict, Keep) and verdict.response.status < 400:
        raise TransactionManagementError(
            f"The view returned {verdict.response.status}, but its transaction is"
            " marked for rollback: none of it would be committed. Return an error"
            " status, handle database errors in an inner atomic block, and do not"
            " close the connection."
        )


def _explain_durable(error: BaseException) -> None:
    if isinstance(error, RuntimeError) and str(error).startswith(
        "A durable atomic block cannot be nested"
    ):
        error.add_note(
            "The view runs in the transaction of its idempotency key, so a block inside"
            ' it can\'t be durable. Remove durable=True, or set mode="lease" for the'
            " view."
        )


def _raise(error: BaseException) -> NoReturn:
    """Raise ``error``, or ``StoreUnavailable`` because of it if the database is not
    there.
    """
    if isinstance(error, OperationalError | InterfaceError):
        raise StoreUnavailable(str(error)) from error
    raise error


# --- Several runs in one transaction --------------------------------------------------


def batched_in(operation: Operation, policy: Policy) -> str | None:
    """Return the database in which ``operation`` can be part of a batch; ``None`` if
    its store has no batches.
    """
    store = store_for(policy, operation)
    return store.name if isinstance(store, PostgreSQLStore) else None


class Batch:
    """Runs claimed operations in one business transaction, each behind its own
    savepoint.

    ``running``: whether one of them is running.
    """

    def __init__(self, claims: Sequence[Claimed], policy: Policy) -> None:
        store = store_for(policy, claims[0].operation)
        assert isinstance(store, PostgreSQLStore)
        self.claims = claims
        self.policy = policy
        self.store = store
        self.transaction = store.transaction()
        self.transaction.owner = self
        self.running = self.responding = False
        self.owned: dict[UUID, Claimed] = {}
        self.runs: list[tuple[AtomicRun, Keep]] = []

    def begin(self) -> None:
        self.transaction.begin()
        self.owned = {claim.token: claim for claim in self.store.lock_many(self.claims)}

    def run(self, claim: Claimed, work: Callable[[AtomicRun], Verdict | None]) -> bool:
        """Run ``work``, and return whether its verdict is one that a batch can write:
        to keep what was done.

        Otherwise, and if it raises, what it has written is undone, and the claim is
        still held. ``work`` is not run if the claim is lost.
        """
        owned = self.owned.get(claim.token)
        if owned is None:
            return False
        run = AtomicRun(owned, self.policy, self.store, self.transaction)
        kept: list[Keep] = []

        def keeps() -> bool:
            verdict = work(run)
            if (
                isinstance(verdict, Keep)
                and not verdict.rollback
                and not verdict.failure
            ):
                operation = run.claim.operation
                kept.append(redacted(verdict, run.policy.body, operation))
            return bool(kept)

        self.running = True
        try:
            done = self.transaction.behind_savepoint(keeps)
        finally:
            self.running = False
        self.runs += [(run, verdict) for verdict in kept]
        return done

    def commit(self) -> None:
        """Complete the records, and commit them with the effects."""
        results = [
            (run.claim, self.store.encode(verdict.response, run.claim))
            for run, verdict in self.runs
        ]
        if self.runs:
            self.transaction.defer_hooks(self.runs[0][0].report_after_commit)

        def write(send: Send) -> None:
            store = self.store.sending_by(send)
            if results and store.complete_many(results) != len(results):
                raise ClaimLost

        self.transaction.commit_after(write).expect()
        for run, verdict in self.runs:
            run.announce(verdict)

    def abort(self, error: BaseException) -> None:
        self.transaction.abort(error)
