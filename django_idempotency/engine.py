"""The one engine: claim, run, complete. The only caller of the stores.

Whoever asks for an operation gets an outcome from a closed set. A ``Claimed`` one is run inside ``execution()``, which
completes the record by the verdict the door settles on.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from typing import NoReturn, TypeVar
from uuid import uuid4

from asgiref.sync import sync_to_async
from django.db import DatabaseError, InterfaceError, OperationalError, connections, transaction
from django.dispatch import Signal

from django_idempotency import privacy, signals
from django_idempotency.exceptions import (
    ClaimInsideTransaction,
    ClaimLost,
    DigestCollision,
    LateRetry,
    StoreConflict,
    StoreRefused,
    StoreUnavailable,
)
from django_idempotency.heartbeat import heartbeat
from django_idempotency.keys import child_key
from django_idempotency.logs import cause, log
from django_idempotency.models import LIVE, TERMINAL, Status
from django_idempotency.outcomes import (
    Available,
    Claimed,
    Duplicate,
    Fail,
    Held,
    InFlight,
    Keep,
    Mismatch,
    Operation,
    Outcome,
    Release,
    Replay,
    Snapshot,
    StoredResponse,
    Verdict,
)
from django_idempotency.policy import Mode, OnCrash, Policy, WhenInFlight
from django_idempotency.stores import store_for
from django_idempotency.stores.base import Lock, Seen, Store
from django_idempotency.stores.database import alias, in_foreign_transaction

T = TypeVar("T")
Told = TypeVar("Told", bound=Outcome)

# Nobody knows how long a holder in atomic mode will take, and a dead one has no lease to wait out.
ASK_AGAIN = InFlight(retry_after=1)
GRACE_PAUSE = 0.01
FIRST_PAUSE = 0.02
LONGEST_PAUSE = 0.25
PATIENCE = 5.0

CRASHED = "its lease ran out while it was running"


# --- Deciding --------------------------------------------------------------------------------------------------------


def decide(
    record: Snapshot, fingerprint: bytes, now: datetime, *, grace: float = 0
) -> Replay | InFlight | Mismatch | Held | Available:
    """What a record means for a request with ``fingerprint`` at ``now``. Pure.

    In atomic mode a record that is processing is ``Available`` to whoever gets its row lock, once ``grace`` seconds
    have passed since it was claimed: the lock is the proof of life.
    """
    if _has_expired(record, now):
        return Available()
    if record.fingerprint != fingerprint:
        return Mismatch()
    if record.response is not None:
        return Replay(record.response)
    if record.held:
        return Held(record.reason)
    if record.status == Status.FAILED:
        return Available()
    return _decide_live(record, now, grace)


def _has_expired(record: Snapshot, now: datetime) -> bool:
    return record.status in TERMINAL and record.expires_at <= now and not record.held


def _decide_live(record: Snapshot, now: datetime, grace: float) -> InFlight | Held | Available:
    assert record.locked_at is not None  # by constraint, both
    assert record.locked_until is not None
    if record.mode == Mode.ATOMIC:
        return Available(after=max(0.0, grace - (now - record.locked_at).total_seconds()))
    if now < record.locked_until:
        return InFlight(max(1, math.ceil((record.locked_until - now).total_seconds())))
    return Held(CRASHED) if record.hold_on_crash else Available()


# --- Claiming --------------------------------------------------------------------------------------------------------


def claim(operation: Operation, policy: Policy) -> Outcome:
    """Claim ``operation``, or say what became of it; ``in_flight="wait"`` waits up to ``policy.wait`` seconds first.

    Raises ``StoreUnavailable``, ``ClaimInsideTransaction`` or ``DigestCollision``; nothing was run then.
    """
    if in_foreign_transaction(connections[alias(policy)]):
        raise ClaimInsideTransaction(alias(policy))
    claimant = _Claimant(operation, policy)
    begun = time.monotonic()
    waits_until = begun + policy.wait if policy.in_flight == WhenInFlight.WAIT else begun
    gives_up = waits_until + policy.grace + PATIENCE
    pause = FIRST_PAUSE
    while (now := time.monotonic()) < gives_up:  # between rounds there is no lock and no transaction
        match outcome := claimant.ask():
            case None:
                pass
            case Available(after=after):
                time.sleep(min(after, GRACE_PAUSE))
            case InFlight() if now < waits_until:
                time.sleep(pause)
                pause = min(pause * 2, LONGEST_PAUSE)
            case _:
                outcome = _readable(outcome, operation)
                _tell(outcome, operation, policy)
                return outcome
    raise StoreUnavailable(f"The record {operation.id} changed again and again while it was being claimed.")


def refuse_late(operation: Operation, policy: Policy) -> None:
    """Raise ``LateRetry`` if the request was first sent more than ``late_after`` ago and its key is known no more.

    By the database's clock, and that of whoever told when the request was sent.
    """
    if policy.late_after is None or operation.sent is None:
        return
    store = store_for(policy)
    age = _reconnecting(store, policy, partial(store.now, policy)) - operation.sent
    if age.total_seconds() <= policy.late_after:
        return
    record = store.read(operation.id, policy)
    if record is None or _has_expired(record, record.now):
        signals.send(signals.refused_late, operation, age=age.total_seconds())
        raise LateRetry


def _reconnecting(store: Store, policy: Policy, ask: Callable[[], T]) -> T:
    try:
        return ask()
    except StoreRefused:
        raise
    except StoreUnavailable:
        # The first statement on a persistent connection finds out that the server has hung up since.
        if not store.reconnect(policy):
            raise
        return ask()


class _Claimant:
    """One caller's attempt at one operation; asks until there is an outcome, always with the same token."""

    def __init__(self, operation: Operation, policy: Policy) -> None:
        self.operation = operation
        self.policy = policy
        self.store = store_for(policy)
        self.token = uuid4()

    def ask(self) -> Outcome | Available | None:
        """An outcome; or when the record will be available; or ``None`` if it came or went just now."""
        seen = self._claim()
        if not isinstance(seen, Seen):
            return seen
        if seen.record.token == self.token:  # an earlier round got through, but its answer did not
            return Claimed(self.operation, self.token, seen.record.attempts)
        decision = self._decide(seen.record)
        if isinstance(decision, Available) and seen.busy:
            return ASK_AGAIN
        if isinstance(decision, Available) or _crashed_just_now(seen.record, decision):
            return self._change_hands()
        return decision

    def _claim(self) -> Claimed | Seen | None:
        ask = partial(self.store.claim, self.operation, self.token, self.policy)
        try:
            return _reconnecting(self.store, self.policy, ask)
        except StoreConflict:
            return None

    def _change_hands(self) -> Outcome | Available | None:
        try:
            with self.store.contend(self.operation.id, self.policy) as record:
                if record is Lock.BUSY:
                    return ASK_AGAIN
                if record is Lock.ABSENT:
                    return None
                decision = self._decide(record)
                if isinstance(decision, Available) and not decision.after:
                    return self.store.take(record, self.operation, self.token, self.policy)
                if _crashed_just_now(record, decision):
                    self.store.hold(record, CRASHED, self.policy)
                return decision
        except StoreConflict:
            return ASK_AGAIN

    def _decide(self, record: Snapshot) -> Duplicate | Available:
        if (record.scope, record.key) != (self.operation.scope, self.operation.key):
            raise DigestCollision(f"The record {record.id} belongs to another key.")
        return decide(record, self.operation.fingerprint, record.now, grace=self.policy.grace)


def _crashed_just_now(record: Snapshot, decision: object) -> bool:
    """Whether it is to be held, and is not yet."""
    return isinstance(decision, Held) and record.status in LIVE


def duplicate(operation: Operation, policy: Policy) -> Duplicate:
    """What a claimant that lost its claim answers: as if it had come second."""
    record = store_for(policy).read(operation.id, policy)
    decision = decide(record, operation.fingerprint, record.now) if record else ASK_AGAIN
    outcome = ASK_AGAIN if isinstance(decision, Available) else _readable(decision, operation)
    _tell(outcome, operation, policy)
    return outcome


def _readable(outcome: Told, operation: Operation) -> Told | Replay:
    return Replay(privacy.opened(outcome.response, operation.id)) if isinstance(outcome, Replay) else outcome


def _tell(outcome: Outcome, operation: Operation, policy: Policy) -> None:
    match outcome:
        case Claimed(attempt=attempt, taken_over=taken_over):
            signals.send(signals.taken_over if taken_over else signals.claimed, operation, attempt=attempt)
        case Replay(response):
            heartbeat.count_replay(operation.id, policy)
            signals.send(signals.replayed, operation, response=response)
        case InFlight(retry_after):
            waited = policy.in_flight == WhenInFlight.WAIT
            signals.send(signals.pending_timeout if waited else signals.in_flight, operation, retry_after=retry_after)
        case Mismatch():
            signals.send(signals.mismatched, operation)
        case Held(reason):
            signals.send(signals.held, operation, reason=reason)


# --- Running and completing ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Context:
    """What the running view sees as ``request.idempotency``."""

    claim: Claimed
    policy: Policy

    @property
    def key(self) -> str:
        return self.claim.operation.key

    @property
    def scope(self) -> str:
        return self.claim.operation.scope

    @property
    def attempt(self) -> int:
        """1 for the first run of this key, one more for each run after a crash or a failure."""
        return self.claim.attempt

    def child_key(self, name: str) -> str:
        """A key to send downstream: the same on every attempt, different for each ``name``, never the raw key."""
        return child_key(self.claim.id, name)

    def renew(self) -> None:
        """Extend the lease now; needed only by work that keeps the heartbeat's thread from running.

        Raises ``ClaimLost`` if another attempt has taken over: stop, and cause no further effect.
        """
        if self.policy.mode == Mode.LEASE:
            store = store_for(self.policy)
            if self.claim.token not in store.renew([self.claim], self.policy):
                raise ClaimLost


class Execution:
    """One run of a claimed operation. The door settles on a verdict last thing inside ``execution()``."""

    def __init__(self, claimed: Claimed, policy: Policy) -> None:
        self.claim = claimed
        self.policy = policy
        self.store = store_for(policy)
        self.context = Context(claimed, policy)
        self.verdict: Verdict | None = None
        self.stored: StoredResponse | None = None
        self.began = time.monotonic()
        self.locked = self.concluded = self.rolled_back = False

    @property
    def transactional_on(self) -> str | None:
        """The alias of the database whose transaction this run is, if it is one."""
        return alias(self.policy) if self.policy.mode == Mode.ATOMIC else None

    def settle(self, verdict: Verdict) -> None:
        """Say what is to become of the record."""
        if isinstance(verdict, Keep):
            verdict = replace(verdict, response=privacy.kept(verdict.response, self.claim.id, self.policy))
        self.verdict = verdict

    def write(self, verdict: Verdict) -> None:
        """Write ``verdict`` to the record. Raises ``ClaimLost`` if it is no longer this run's."""
        match verdict:
            case Keep(response, failure):
                self.stored = privacy.sealed(response, self.claim.id, self.policy)
                written = self.store.complete(self.claim, self.stored, self.policy, failure=failure)
            case Fail(reason, held):
                written = self.store.fail(self.claim, reason, self.policy, held=held)
            case Release():
                written = self.store.release(self.claim, self.policy)
        if not written:
            raise ClaimLost

    def finish(self, verdict: Verdict) -> None:
        """``write`` in no transaction of ours, and say how that went."""
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
                signals.send(signals.completed, operation, response=response, seconds=seconds)
            case Fail(reason):
                signals.send(signals.failed, operation, reason=reason, seconds=seconds)
            case Release():
                signals.send(signals.released, operation, seconds=seconds)

    def lose(self, signal: Signal) -> None:
        signals.send(signal, self.claim.operation, attempt=self.claim.attempt)

    def abandon(self, verdict: Verdict) -> None:
        """Write ``verdict`` if that can still be done: an error is on its way up, and no other may take its place."""
        try:
            self.finish(verdict)
        except ClaimLost:
            pass
        except (StoreUnavailable, DatabaseError) as error:
            self.report(error)

    def report(self, error: Exception) -> None:
        signals.send(signals.store_failed, self.claim.operation, error=error)


@contextmanager
def execution(claimed: Claimed, policy: Policy) -> Iterator[Execution]:
    """Run a claimed operation in the policy's mode, and complete its record.

    In atomic mode the block is the business transaction: on leaving it, effects and answer are committed together. In
    lease mode the block is in no transaction of ours. Raises ``ClaimLost`` if another attempt took over meanwhile, and
    ``StoreUnavailable``, its ``ran`` true if nobody can tell whether the effects were committed.
    """
    run = Execution(claimed, policy)
    with _atomic(run) if policy.mode == Mode.ATOMIC else _leased(run):
        yield run


@asynccontextmanager
async def aexecution(claimed: Claimed, policy: Policy) -> AsyncIterator[Execution]:
    """``execution`` for async callers; lease mode only, because Django's transactions are bound to a thread."""
    run = Execution(claimed, policy)
    with heartbeat.keeping(claimed, policy):
        try:
            yield run
        except BaseException as error:
            await sync_to_async(run.abandon)(_verdict_on_leased(run, error))
            raise
        await sync_to_async(_conclude_leased)(run)


@contextmanager
def _atomic(run: Execution) -> Iterator[None]:
    try:
        with _business_transaction(run):
            yield
    except ClaimLost:
        run.lose(signals.stale_write_rejected if run.locked else signals.claim_lost)
        raise
    except BaseException as error:
        if not run.concluded or not isinstance(error, Exception):
            _give_up(run, error)
        _resolve_commit(run, error)
    verdict = _settled(run)
    if not run.rolled_back:
        run.announce(verdict)
    elif isinstance(verdict, Keep):
        _keep_after_rollback(run, verdict)
    else:
        run.abandon(verdict)


@contextmanager
def _business_transaction(run: Execution) -> Iterator[None]:
    """Opens with the row lock, which proves the holder alive, and closes with the answer, in the same transaction."""
    using = alias(run.policy)
    with transaction.atomic(using=using, durable=True):
        run.locked = run.store.lock(run.claim, run.policy)
        if not run.locked:
            raise ClaimLost
        yield
        _conclude_atomic(run, using)


def _conclude_atomic(run: Execution, using: str) -> None:
    verdict = _settled(run)
    if isinstance(verdict, Keep) and not verdict.rollback and not transaction.get_rollback(using):
        run.write(verdict)
    else:
        _refuse_phantom_success(verdict)
        run.rolled_back = True
        transaction.set_rollback(True, using=using)
    run.concluded = True


def _refuse_phantom_success(verdict: Verdict) -> None:
    if isinstance(verdict, Keep) and verdict.response.status < 400:
        raise transaction.TransactionManagementError(
            f"The view answered {verdict.response.status}, but its transaction is marked for rollback: nothing of it "
            "would be committed. Answer with an error status, or handle database errors in an inner atomic block."
        )


def _keep_after_rollback(run: Execution, verdict: Keep) -> None:
    try:
        run.finish(verdict)
    except StoreUnavailable as error:
        run.report(error)


def _give_up(run: Execution, error: BaseException) -> NoReturn:
    """Nothing was committed: leave the record to a retry, and let the error pass."""
    run.abandon(run.verdict if isinstance(run.verdict, Release) else Fail(type(error).__name__))
    if _is_unreachable(error) and not run.locked:  # an error of ours, not of the view's
        raise StoreUnavailable(str(error)) from error
    raise error


def _resolve_commit(run: Execution, error: Exception) -> None:
    """COMMIT was sent and an error came back: return if it took place all the same, raise if it did not.

    The record knows, once its row lock shows that the server is done with the transaction.
    """
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        try:
            with run.store.contend(run.claim.id, run.policy) as record:
                if record is not Lock.BUSY:
                    break
        except StoreUnavailable:  # or in somebody's way; Django has closed a connection that broke
            pass
        time.sleep(FIRST_PAUSE)
    else:
        raise StoreUnavailable("The connection was lost during COMMIT; its outcome is unknown.", ran=True) from error
    _judge_commit(run, record, error)


def _judge_commit(run: Execution, record: Snapshot | Lock, error: Exception) -> None:
    if run.rolled_back:  # then only the rollback went wrong
        return
    if isinstance(record, Snapshot) and record.token == run.claim.token:
        run.abandon(Fail(type(error).__name__))
        if _is_unreachable(error):
            raise StoreUnavailable(str(error)) from error
        raise error
    stored = record.response if isinstance(record, Snapshot) else None
    if stored != run.stored:
        run.lose(signals.stale_write_rejected)
        raise ClaimLost from error
    log(
        logging.ERROR,
        "committed_with_error",
        "idempotency record %s: its transaction is committed, but: %s",
        run.claim.id,
        cause(error),
        operation=run.claim.operation,
        attempt=run.claim.attempt,
        error=error,
    )


def _is_unreachable(error: BaseException) -> bool:
    return isinstance(error, (OperationalError, InterfaceError))


@contextmanager
def _leased(run: Execution) -> Iterator[None]:
    with heartbeat.keeping(run.claim, run.policy):
        try:
            yield
        except BaseException as error:
            run.abandon(_verdict_on_leased(run, error))
            raise
        _conclude_leased(run)


def _verdict_on_leased(run: Execution, error: BaseException) -> Verdict:
    """Effects outside the database stay: a verdict that was reached before the error stands."""
    crashed = not isinstance(error, Exception)
    return run.verdict or Fail(type(error).__name__, held=crashed and run.policy.on_crash == OnCrash.HOLD)


def _conclude_leased(run: Execution) -> None:
    verdict = _settled(run)
    try:
        _write_leased(run, verdict)
    except StoreUnavailable as error:
        # The effects have happened. The heartbeat keeps the lease, and writes once the store is back.
        run.report(error)
        heartbeat.finish_later(run.claim, partial(_write_leased, run, verdict))


def _write_leased(run: Execution, verdict: Verdict) -> None:
    try:
        run.finish(verdict)
    except DatabaseError as error:
        if not isinstance(verdict, Keep):
            raise
        run.report(error)
        run.finish(replace(verdict, response=StoredResponse(verdict.response.status, body=None)))


def _settled(run: Execution) -> Verdict:
    if run.verdict is None:
        raise RuntimeError("The run ended without a verdict.")
    return run.verdict
