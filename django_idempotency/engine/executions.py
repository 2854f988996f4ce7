"""Run claimed operations, and complete their records."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from enum import Enum, auto
from functools import partial
from threading import get_ident
from typing import NoReturn
from uuid import UUID

from django.db import DatabaseError, InterfaceError, OperationalError
from django.db.transaction import TransactionManagementError
from django.dispatch import Signal

from django_idempotency import signals
from django_idempotency.digests import child_key
from django_idempotency.engine import leases
from django_idempotency.engine.background import background
from django_idempotency.engine.claims import Pending
from django_idempotency.engine.redaction import redacted
from django_idempotency.engine.shielding import shielded
from django_idempotency.exceptions import ClaimLost, StoreConflict, StoreUnavailable, TransactionEnded
from django_idempotency.logs import cause, log
from django_idempotency.outcomes import Claimed, Fail, Keep, Release, Snapshot, StoredResponse, Verdict
from django_idempotency.policy import Mode, OnCrash, Policy
from django_idempotency.stores import store_for
from django_idempotency.stores.base import Unlocked

FIRST_PAUSE = 0.02
PATIENCE = 5.0
WRITES = 5  # attempts to write a response if other transactions are in the way


@dataclass(slots=True, eq=False)
class Context:
    """What the running view sees as ``request.idempotency``. ``running``: false once the view has ended."""

    claim: Claimed
    policy: Policy
    running: bool = True

    @property
    def key(self) -> str:
        return self.claim.operation.key

    @property
    def scope(self) -> str:
        return self.claim.operation.scope

    @property
    def record_id(self) -> UUID:
        """The id of the key's record, which is a digest of scope and key."""
        return self.claim.id

    @property
    def attempt(self) -> int:
        """1 for the first run of this key, and one more for each run after a crash or a failure."""
        return self.claim.attempt

    @property
    def database(self) -> str | None:
        """The alias of the record's database, which the effects should go to; ``None`` if the store has none."""
        store = store_for(self.policy, self.claim.operation)
        return store.name if store.transactional else None

    def child_key(self, name: str) -> str:
        """Return a key to send downstream: the same on every attempt, another for each ``name``, never the raw key."""
        return child_key(self.claim.operation, name)

    def renew(self) -> None:
        """Extend the lease now. Only work that keeps the heartbeat's thread from running needs this.

        Raises ``ClaimLost`` if another attempt has taken over: stop, and cause no further effect.
        """
        if self.policy.mode == Mode.LEASE:
            store = store_for(self.policy, self.claim.operation)
            renewed = self.claim.token in store.renew([self.claim])  # false while the row is locked
            if not renewed and not store.leases_left({self.claim.token: self.claim.id}):
                raise ClaimLost


@contextmanager
def execution(claimed: Claimed, policy: Policy) -> Iterator[Execution]:
    """Run a claimed operation in the policy's mode, and complete its record.

    In atomic mode, the block is the business transaction: on leaving it, effects and response are committed together.
    In lease mode, the block is in no transaction of ours. Raises ``ClaimLost`` if another attempt took over meanwhile,
    and ``StoreUnavailable`` if the store failed or if it is unknown whether the effects were committed.
    """
    run: Execution
    if policy.mode == Mode.ATOMIC:
        run = (LockExecution if claimed.by_lock else AtomicExecution)(claimed, policy)
    else:
        run = LeaseExecution(claimed, policy)
    with run.reporting(), run.running():
        yield run


@asynccontextmanager
async def aexecution(claimed: Claimed, policy: Policy) -> AsyncIterator[Execution]:
    """``execution`` for async callers; lease mode only, because Django's transactions are bound to a thread."""
    run = LeaseExecution(claimed, policy)
    with run.reporting():
        try:
            keeping = run.keep_lease()
        except RuntimeError as error:
            raise await shielded(partial(run.give_up, error)) from error
        with keeping:
            try:
                yield run
            except BaseException as error:  # a cancelled or exiting run leaves its record in order too
                await shielded(partial(run.end_after, error))
                raise
            await shielded(run.conclude)


def give_back(outcome: object, policy: Policy) -> None:
    """Undo a claim whose caller is gone."""
    if isinstance(outcome, Claimed):
        LeaseExecution(outcome, policy).free("CancelledError")
    elif isinstance(outcome, Pending):
        outcome.close()


class Execution(ABC):
    """One run of a claimed operation. The entry point's last step inside ``execution()`` is to settle on a verdict."""

    def __init__(self, claimed: Claimed, policy: Policy) -> None:
        self.claim = claimed
        self.policy = policy
        self.store = store_for(policy, claimed.operation)
        self.context = Context(claimed, policy)
        self.verdict: Verdict | None = None
        self.passing: Exception | None = None
        self.kept: StoredResponse | None = None
        self.stored: StoredResponse | None = None  # ``kept``, as the record stores it
        self.began = time.monotonic()
        self.reported = False

    @property
    def transactional_on(self) -> str | None:
        """The alias of the database whose transaction this run is, if it is one."""
        return None

    @abstractmethod
    def running(self) -> AbstractContextManager[Execution]:
        """Run the operation inside the block, and complete its record on leaving it."""

    def settle(self, verdict: Verdict, *, passing: Exception | None = None) -> None:
        """Set what is to become of the record.

        ``passing``: the propagating exception that Django will turn into a response. It does not prevent a commit that
        the verdict allows.
        """
        self.passing = passing
        if isinstance(verdict, Keep):
            kept = redacted(verdict.response, self.claim.id, self.policy)
            verdict = verdict if kept is verdict.response else replace(verdict, response=kept)
        self.verdict = verdict

    def settled(self) -> Verdict:
        if self.verdict is None:
            raise RuntimeError("The run ended without a verdict.")
        return self.verdict

    def write(self, verdict: Verdict) -> None:
        """Write ``verdict`` to the record. Raises ``ClaimLost`` if it is no longer this run's."""
        match verdict:
            case Keep(response, failure):
                written = self.store.complete(self.claim, self._encoded(response), failure=failure)
            case Fail(reason, on_hold):
                written = self.store.fail(self.claim, reason, on_hold=on_hold)
            case Release():
                written = self.store.release(self.claim)
        if not written:
            raise ClaimLost

    def _encoded(self, response: StoredResponse) -> StoredResponse:
        """Encode the response once: encrypted again, it would be another one to a store that already has it."""
        if self.stored is None or self.kept is not response:
            self.kept, self.stored = response, self.store.encode(response, self.claim)
        return self.stored

    def finish(self, verdict: Verdict) -> None:
        """Write ``verdict`` in no transaction of ours, and announce the result."""
        try:
            self.write(verdict)
        except ClaimLost:
            self.lose(signals.stale_write_rejected)
            raise
        self.announce(verdict)

    def announce(self, verdict: Verdict) -> None:
        operation, seconds = self.claim.operation, time.monotonic() - self.began
        match verdict:
            case Keep(response):
                if operation.admission is not None:
                    operation.admission.stored(operation, response)
                signals.send(signals.key_completed, operation, response=response, seconds=seconds)
            case Fail(reason):
                signals.send(signals.key_failed, operation, reason=reason, seconds=seconds)
            case Release():
                signals.send(signals.key_released, operation, seconds=seconds)

    def lose(self, signal: Signal) -> None:
        signals.send(signal, self.claim.operation, attempt=self.claim.attempt)

    def abandon(self, verdict: Verdict) -> None:
        """Write ``verdict`` if that is still possible. An error is propagating, and no other error may replace it."""
        try:
            self.finish(verdict)
        except ClaimLost:
            pass
        except (StoreUnavailable, DatabaseError) as error:
            self.report(error)

    @contextmanager
    def reporting(self) -> Iterator[None]:
        """Make sure that every failure of the store for which a caller is refused is reported."""
        try:
            yield
        except StoreUnavailable as error:
            if not self.reported:
                self.report(error)
            raise

    def report(self, error: Exception) -> None:
        self.reported = True
        signals.send(signals.store_failed, self.claim.operation, error=error)


class Phase(Enum):
    """How far a run in atomic mode has come."""

    CLAIMED = auto()  # the row is not locked yet
    LOCKED = auto()  # the business transaction is open
    WRITTEN = auto()  # the response is written; COMMIT comes next
    ROLLING_BACK = auto()  # nothing will be committed


class AtomicExecution(Execution):
    """A run inside the business transaction: effects and response are committed together, or not at all."""

    def __init__(self, claimed: Claimed, policy: Policy) -> None:
        super().__init__(claimed, policy)
        self.thread = get_ident()
        self.phase = Phase.CLAIMED
        self.run_hooks: Callable[[], None] = lambda: None

    @property
    def transactional_on(self) -> str | None:
        return self.store.name

    @contextmanager
    def running(self) -> Iterator[Execution]:
        try:
            with self._business_transaction():
                yield self
        except ClaimLost:
            self.lose(signals.claim_lost if self.phase is Phase.CLAIMED else signals.stale_write_rejected)
            raise
        except BaseException as error:  # an exiting process leaves its record in order too
            if self.thread != get_ident():  # the garbage collector's thread, whose transactions are not this run's
                raise
            if self.phase is not Phase.CLAIMED:
                self.store.roll_back_left_open(error)
            if self.phase not in (Phase.WRITTEN, Phase.ROLLING_BACK) or not isinstance(error, Exception):
                self._give_up(error)
            self._resolve_commit(error)
        self._conclude()
        if self.passing is not None:
            raise self.passing

    @contextmanager
    def _business_transaction(self) -> Iterator[None]:
        """Begin with the lock, which proves that the owner is alive, and end with the response."""
        with self._locked():
            try:
                yield
            except Exception as error:  # the view's own: whether it undoes the transaction depends on the verdict
                if error is not self.passing or not self._may_commit():
                    _explain_durable(error)
                    raise
            self._write_or_roll_back()

    def _locked(self) -> AbstractContextManager[object]:
        """Return the business transaction, in which the claim is locked."""
        return self._row_locked()

    @contextmanager
    def _row_locked(self) -> Iterator[None]:
        with self.store.transaction():
            locked = self.store.lock(self.claim)
            if locked is None:
                raise ClaimLost
            self.claim, self.phase = locked, Phase.LOCKED
            yield

    def _may_commit(self) -> bool:
        return isinstance(self.verdict, Keep | Release) and not self.verdict.rollback

    def _write_or_roll_back(self) -> None:
        verdict = self.settled()
        if self._may_commit() and not self.store.must_roll_back():
            self.write(verdict)
            self.run_hooks = self.store.take_over_hooks(self.report_after_commit)
            self.phase = Phase.WRITTEN
        else:
            _refuse_phantom_success(verdict)
            self.store.roll_back()
            self.phase = Phase.ROLLING_BACK

    def finish(self, verdict: Verdict) -> None:
        if not isinstance(verdict, Fail):  # a failure depends on what became of the transaction
            self.claim = replace(self.claim, transaction=None)
        super().finish(verdict)

    def _conclude(self) -> None:
        verdict = self.settled()
        if self.phase is Phase.WRITTEN:
            self.announce(verdict)
        elif isinstance(verdict, Keep):
            self._keep_after_rollback(verdict)
        else:
            self.abandon(verdict)

    def _keep_after_rollback(self, verdict: Keep) -> None:
        """Write the verdict after a rollback.

        Raises ``StoreConflict``: if a response were sent but not stored, a retry could get another one.
        """
        for _attempt in range(WRITES):
            try:
                return self.finish(verdict)
            except StoreConflict as error:
                conflict = error
                time.sleep(FIRST_PAUSE)
            except StoreUnavailable as error:
                return self.report(error)
        raise conflict

    def _give_up(self, error: BaseException) -> NoReturn:
        """Leave the record to a retry, because nothing was committed, and let the error propagate."""
        released = None if isinstance(error, TransactionEnded) else self.verdict
        self.abandon(released if isinstance(released, Release) else Fail(type(error).__name__))
        if _is_unreachable(error) and self.phase is Phase.CLAIMED:  # an error of ours, not of the view's
            raise StoreUnavailable(str(error)) from error
        raise error

    def _resolve_commit(self, error: Exception) -> None:
        """Resolve an error that came back from COMMIT: return if it took place all the same, raise if it did not.

        The record tells, once its row lock shows that the server is done with the transaction.
        """
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            try:
                record = self._look_after_commit()
                if record is not Unlocked.BUSY:
                    break
            except StoreUnavailable:  # or another session's lock; Django has closed a broken connection
                pass
            time.sleep(FIRST_PAUSE)
        else:
            lost = "The connection was lost during COMMIT; its outcome is unknown."
            raise StoreUnavailable(lost) from error
        self._learn_of_commit(record, error)

    def _look_after_commit(self) -> Snapshot | Unlocked:
        with self.store.try_lock(self.claim.id) as record:
            return record

    def _is_undone(self, record: Snapshot | Unlocked) -> bool:
        """Whether the record shows that COMMIT did not take place, and the claim is still this run's."""
        return isinstance(record, Snapshot) and record.token == self.claim.token

    def _learn_of_commit(self, record: Snapshot | Unlocked, error: Exception) -> None:
        if self.phase is Phase.ROLLING_BACK:  # then only the rollback went wrong
            return
        if self._is_undone(record):
            self.claim = replace(self.claim, transaction=None)  # it did not store its response: not committed
            self.abandon(Fail(type(error).__name__))
            if _is_unreachable(error):
                raise StoreUnavailable(str(error)) from error
            raise error
        if not self._is_committed(record):
            self.lose(signals.stale_write_rejected)
            raise ClaimLost from error
        self.report_after_commit(error)
        self.run_hooks()

    def _is_committed(self, record: Snapshot | Unlocked) -> bool:
        if isinstance(self.verdict, Release):
            return self.store.has_released(self.claim)
        return isinstance(record, Snapshot) and record.response == self.stored

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


class LockExecution(AtomicExecution):
    """An atomic run whose claim is a lock. Its business transaction was opened by the claim."""

    def __init__(self, claimed: Claimed, policy: Policy) -> None:
        super().__init__(claimed, policy)
        self.phase = Phase.LOCKED

    def _locked(self) -> AbstractContextManager[object]:
        assert self.claim.opened is not None
        return self.claim.opened

    def _look_after_commit(self) -> Snapshot | Unlocked:
        return self.store.look_after_commit(self.claim)

    def _is_undone(self, record: Snapshot | Unlocked) -> bool:
        return record is Unlocked.ABSENT and not self._is_committed(record)

    def _is_committed(self, record: Snapshot | Unlocked) -> bool:
        """Judge by the record: after a failover, another transaction with the same number does not make it."""
        if isinstance(self.verdict, Release):
            return super()._is_committed(record)
        own = isinstance(record, Snapshot) and record.created_at == self.store.created_at(self.claim)
        return own and super()._is_committed(record)


def _refuse_phantom_success(verdict: Verdict) -> None:
    if isinstance(verdict, Keep) and verdict.response.status < 400:
        raise TransactionManagementError(
            f"The view returned {verdict.response.status}, but its transaction is marked for rollback: none of it "
            "would be committed. Return an error status, or handle database errors in an inner atomic block."
        )


def _explain_durable(error: Exception) -> None:
    if isinstance(error, RuntimeError) and str(error).startswith("A durable atomic block cannot be nested"):
        error.add_note(
            "The view runs in the transaction of its idempotency key, so a block inside it can't be durable. Remove "
            'durable=True, or set mode="lease" for the view.'
        )


def _is_unreachable(error: BaseException) -> bool:
    return isinstance(error, (OperationalError, InterfaceError))


class LeaseExecution(Execution):
    """A run in no transaction of ours, with a lease that the heartbeat renews."""

    @contextmanager
    def running(self) -> Iterator[Execution]:
        try:
            keeping = self.keep_lease()
        except RuntimeError as error:
            raise self.give_up(error) from error
        with keeping:
            try:
                yield self
            except BaseException as error:  # an exiting process leaves its record in order too
                self.end_after(error)
                raise
            self.conclude()

    def keep_lease(self) -> ExitStack:
        """Have the lease renewed until the returned stack is closed. Raises ``RuntimeError`` if no thread can start."""
        self.lease = leases.keep(self.claim, self.store)
        return self.lease

    def give_up(self, error: RuntimeError) -> StoreUnavailable:
        """Free the key before anything was run, and return the error to raise."""
        self.free(type(error).__name__)
        return StoreUnavailable(f"No thread can be started to renew the lease, so nothing was run: {error}")

    def free(self, reason: str) -> None:
        """Undo a claim before anything was run. A record of earlier attempts stays: they may have had effects."""
        self.abandon(Release() if self.claim.attempt == 1 else Fail(reason))

    def end_after(self, error: BaseException) -> None:
        """Complete the record while an error propagates. Effects stay, so a verdict reached before the error stands."""
        if self.verdict is None:
            crashed = not isinstance(error, Exception)
            self.abandon(Fail(type(error).__name__, on_hold=crashed and self.policy.on_crash == OnCrash.HOLD))
            return
        try:
            self.conclude()
        except (ClaimLost, DatabaseError) as failed:
            self.report(failed)

    def conclude(self) -> None:
        """Write the verdict, at once or as soon as the store is back."""
        verdict = self.settled()
        try:
            self._write_verdict(verdict)
        except StoreUnavailable as error:
            # The effects have happened. The lease is kept until the verdict is written, once the store is back.
            self.report(error)
            leases.keep_finished(self.claim, self.store)
            write = partial(self._write_late, verdict, self.lease.pop_all())
            background.complete(write, self.store, self.claim.schemas)

    def _write_late(self, verdict: Verdict, lease: ExitStack) -> None:
        try:
            self._write_verdict(verdict)
        except ClaimLost:
            lease.close()
            raise
        lease.close()

    def _write_verdict(self, verdict: Verdict) -> None:
        try:
            self.finish(verdict)
        except DatabaseError as error:
            if not isinstance(verdict, Keep):
                raise
            self.report(error)
            self.finish(replace(verdict, response=StoredResponse(verdict.response.status, body=None)))
