"""Claim operations: ask the store, decide, and take over if the owner is gone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any, TypeVar
from uuid import uuid4

from asgiref.sync import sync_to_async
from django.db import Error

from django_idempotency import signals
from django_idempotency.digests import as_recorded
from django_idempotency.engine import leases
from django_idempotency.engine.background import background
from django_idempotency.engine.decisions import ASK_AGAIN, LEASE_LAPSED, decide, has_expired, lapsed_just_now
from django_idempotency.engine.shielding import has_thread_of_its_own, lookout
from django_idempotency.engine.waiters import waiters
from django_idempotency.exceptions import (
    ClaimInsideTransaction,
    DigestCollision,
    LateRetry,
    NotAdmitted,
    ReplayForbidden,
    StoreConflict,
    StoreRefused,
    StoreUnavailable,
)
from django_idempotency.log_ids import shown_id
from django_idempotency.outcomes import (
    Available,
    Claimed,
    Duplicate,
    InFlight,
    Mismatch,
    OnHold,
    Operation,
    Outcome,
    Rejection,
    Replay,
    Snapshot,
)
from django_idempotency.policy import Mode, OnConflict, Policy
from django_idempotency.stores import store_for, stores_of
from django_idempotency.stores.base import Owned, Seen, Store, Unlocked
from django_idempotency.traces import current_trace

T = TypeVar("T")
Told = TypeVar("Told", bound=Outcome)

GRACE_PAUSE = 0.01
# The outcome if the key has an owner whose claim is a lock, by whether that owner runs the same request.
MEETINGS: Mapping[bool | None, InFlight | Mismatch | Available] = {
    True: ASK_AGAIN,
    False: Mismatch(running=True),
    None: Available(after=GRACE_PAUSE),
}
FIRST_PAUSE = 0.02
LONGEST_PAUSE = 0.25
PATIENCE = 5.0


def claim(operation: Operation, policy: Policy) -> Outcome:
    """Claim ``operation``, or return what became of it. With ``on_conflict="wait"``, wait first.

    Raises ``LateRetry``, ``NotAdmitted``, ``ReplayForbidden``, ``StoreUnavailable``, ``ClaimInsideTransaction`` or
    ``DigestCollision``. Nothing was run in these cases.
    """
    return _waited_for(begin_claim(operation, policy))


def _waited_for(pending: Outcome | Pending) -> Outcome:
    if not isinstance(pending, Pending):
        return pending
    with closing(pending):
        outcome: Outcome | Pending = pending
        while isinstance(outcome, Pending):  # no lock and no transaction is held in between
            outcome.wait()
            outcome = outcome.ask()
        return outcome


def claim_many(operations: Sequence[Operation], policy: Policy) -> list[Outcome | None]:
    """Claim different operations of one policy in one statement, by record.

    The outcome is ``None`` if an operation takes more than that statement, such as a takeover. Claim it by itself,
    right before it is run. Raises what ``claim`` raises; operations claimed by then are left to a takeover.
    """
    claimants = [_Claimant(operation, policy.by_record) for operation in operations]
    claimants[0].refuse_inside_transaction()
    outcomes: list[Outcome | None] = []
    for claimant, seen in zip(claimants, _claim_together(claimants), strict=True):
        outcome = claimant.settled(seen)
        outcomes.append(outcome and claimant.announce(outcome))
    return outcomes


def _claim_together(claimants: Sequence[_Claimant]) -> Sequence[Claimed | Seen | Owned | None]:
    first = claimants[0]
    wanted = [(claimant.operation, claimant.token) for claimant in claimants]
    try:
        return first.reconnecting(partial(first.store.claim_many, wanted))
    except StoreConflict:
        return [None] * len(claimants)


def begin_claim(operation: Operation, policy: Policy) -> Outcome | Pending:
    """Do as much of ``claim`` as is possible without waiting."""
    claimant = _Claimant(operation, policy)
    claimant.refuse_inside_transaction()
    claimant.refuse_late()
    return Pending(claimant).ask()


class Pending:
    """A claim that is not decided yet. Call ``ask()`` again in ``pause`` seconds. It holds no lock and no transaction.

    ``in_flight``: another owner is running the operation. Call ``close()`` however the wait ends, because the claim
    counts as a waiter.
    """

    def __init__(self, claimant: _Claimant) -> None:
        self.claimant = claimant
        self.operation = claimant.operation
        policy = claimant.policy
        begun = time.monotonic()
        self.waits_until = begun + policy.wait_timeout if policy.on_conflict == OnConflict.WAIT else begun
        self.gives_up = self.waits_until + policy.takeover_grace + PATIENCE
        self.asked = 0
        self.pause = 0.0
        self.in_flight = False
        self.counted = False
        self._pauses = self.pauses()

    def ask(self) -> Outcome | Pending:
        """Return an outcome, or this object if there is none yet. Raises what ``claim`` raises."""
        try:
            return self._ask()
        except BaseException as error:
            if self.claimant.policy.claims_by_lock:  # else the transaction that it opened would stay open
                self.claimant.store.roll_back_left_open(error)
            raise

    def _ask(self) -> Outcome | Pending:
        # At least twice: the first attempt may have waited longer for the table, only to find another one in its place.
        while (now := time.monotonic()) < self.gives_up or self.asked < 2:
            self.asked += 1
            outcome = self.claimant.ask()
            if outcome is None:
                continue
            self.in_flight = isinstance(outcome, InFlight)
            if isinstance(outcome, Available):
                self.pause = min(outcome.after, GRACE_PAUSE)
            elif self.in_flight and now < self.waits_until and self._may_wait():
                self.pause = next(self._pauses, LONGEST_PAUSE)
            else:
                return self.claimant.announce(outcome, waited=self.counted)
            return self
        id = shown_id(self.operation.id)
        raise StoreUnavailable(f"The record {id} changed again and again while it was being claimed.")

    def _may_wait(self) -> bool:
        self.counted = self.counted or waiters.enter(self.operation.id, self.claimant.policy.max_waiters)
        return self.counted

    def close(self) -> None:
        """Let another caller wait."""
        if self.counted:
            self.counted = False
            waiters.leave(self.operation.id)

    def pauses(self) -> Iterator[float]:
        """Yield the seconds between two looks, doubled each time up to a limit, until the wait is over."""
        pause = FIRST_PAUSE
        while time.monotonic() < self.waits_until:
            yield pause
            pause = min(pause * 2, LONGEST_PAUSE)

    def left(self) -> Iterator[float]:
        """Return the remaining pauses, starting with the one that is due now."""
        return chain([self.pause], self._pauses)

    def wait(self) -> None:
        """Wait until it is time to ask again. To wait for another owner, let go of this thread's connection."""
        if self.in_flight and self.let_go():
            lookout.wait(self.seems_in_flight, self.left())
        else:
            time.sleep(self.pause)

    def seems_in_flight(self) -> bool:
        """Return whether the owner seems to be running still. This only reads, on a connection of this thread's own."""
        try:
            with self.claimant.store.own_connection(seconds=PATIENCE, schemas=self.claimant.schemas):
                return self.claimant.sees_owner()
        except (StoreUnavailable, Error):
            return False  # ask() will find out and report it

    def let_go(self) -> bool:
        """Close this thread's connection, or give it back to its pool. The next ``ask()`` takes another one.

        Return false if the connection is kept.
        """
        try:
            return self.claimant.store.give_back()
        except StoreUnavailable:
            return False  # ask() will find out and report it


async def until_due(pending: Pending) -> None:
    """Wait in the event loop until it is time to ask again, without a connection and without blocking a thread."""
    if not pending.in_flight:
        await asyncio.sleep(pending.pause)
        return
    if has_thread_of_its_own():
        await sync_to_async(pending.let_go)()
    await lookout.watch(pending.seems_in_flight, pending.left())


class _Claimant:
    """One caller's attempt at one operation. It asks until there is an outcome, always with the same token."""

    def __init__(self, operation: Operation, policy: Policy) -> None:
        self.policy = policy
        self.store = store_for(policy, operation)
        self.operation = operation
        if callable(policy.using) and self.store.transactional:  # the choice holds for the whole run
            self.operation = replace(operation, database=self.store.name)
        if trace := current_trace():
            self.operation = replace(self.operation, trace=trace)
        self.token = uuid4()
        self.schemas: tuple[str, ...] = ()
        self.may_claim = operation.admission is None

    def refuse_inside_transaction(self) -> None:
        """Raise ``ClaimInsideTransaction`` if others would not see the claim."""
        self.store.discard_abandoned_connection()
        if self.store.in_foreign_transaction():
            raise ClaimInsideTransaction(self.store.name)

    def refuse_late(self) -> None:
        """Raise ``LateRetry`` if the request is older than ``max_request_age`` and its key is no longer known.

        The age depends on two clocks: the store's, and that of the client that stated when the request was first sent.
        """
        if self.policy.max_request_age is None or self.operation.sent is None:
            return
        age = self.reconnecting(self.store.now) - self.operation.sent
        if age.total_seconds() <= self.policy.max_request_age:
            return
        record = self.store.read(self.operation.id)
        if record is None or has_expired(record, record.now):
            _reject(self.operation, Rejection.TOO_OLD, age=age.total_seconds())
            raise LateRetry

    def refuse_new(self) -> None:
        """Raise ``NotAdmitted`` for a new key that is not admitted. A known key is claimed without asking.

        The key may become known between the look and the claim. Then it is given back, or counts as one more key.
        """
        if self.may_claim:
            return
        admission = self.operation.admission
        assert admission is not None
        if self._is_new():
            seconds = admission.refused_for(self.operation)
            # Another caller may have claimed it meanwhile, or hold a claim by lock.
            if seconds is not None and self._is_new() and not self.store.has_owner(self.operation):
                _reject(self.operation, Rejection.NOT_ADMITTED, retry_after=seconds)
                raise NotAdmitted(seconds)
        self.may_claim = True

    def _is_new(self) -> bool:
        record = self.reconnecting(partial(self.store.look, self.operation))
        return record is None or has_expired(record, record.now)

    def announce(self, outcome: Told, *, waited: bool = False) -> Told:
        """Send the signals for ``outcome`` and return it. Raises ``ReplayForbidden``."""
        if not isinstance(outcome, Claimed):
            self.give_back()
        _announce(outcome, self.operation, self.store, self.schemas, waited=waited)
        return outcome

    def give_back(self) -> None:
        """Stop counting the key if it was counted as a new one."""
        if self.operation.admission is not None:
            self.operation.admission.give_back()

    def ask(self) -> Outcome | Available | None:
        """Return an outcome, or when the record will be available, or ``None`` if it was just made or deleted.

        Raises ``NotAdmitted``.
        """
        self.refuse_new()
        try:
            return self.interpret(self._claim())
        except StoreUnavailable:  # nothing is stored, and the retry will be counted
            self.give_back()
            raise

    def interpret(self, seen: Claimed | Seen | Owned | None) -> Outcome | Available | None:
        """Return what the store's result of a claim means, and take over if necessary."""
        if isinstance(seen, Owned):
            return MEETINGS[seen.same]
        if not isinstance(seen, Seen):
            return seen
        self.schemas = seen.schemas
        if seen.record.token == self.token:  # an earlier claim was made, but its response was lost
            operation = as_recorded(self.operation, seen.record.fingerprint) or self.operation
            return Claimed(operation, self.token, seen.record.attempts, schemas=self.schemas)
        decision = self._decide(seen.record)
        if isinstance(decision, Available) and seen.busy:
            return ASK_AGAIN
        if isinstance(decision, Available) or lapsed_just_now(seen.record, decision):
            return self._take_over()
        if isinstance(decision, InFlight):
            self._watch(seen.record)
        return decision

    def settled(self, seen: Claimed | Seen | Owned | None) -> Outcome | None:
        """Return what the store's result of a claim means; ``None`` for a record that has, or had, another owner."""
        if isinstance(seen, Seen) and seen.record.response is None and seen.record.token != self.token:
            return None
        outcome = self.interpret(seen)
        return None if isinstance(outcome, Available) else outcome

    def _watch(self, record: Snapshot) -> None:
        if record.mode == Mode.LEASE:
            leases.suspect(record, self.store, self.schemas)

    def _claim(self) -> Claimed | Seen | Owned | None:
        try:
            return self.reconnecting(partial(self.store.claim, self.operation, self.token))
        except StoreConflict:
            return None

    def reconnecting(self, ask: Callable[[], T]) -> T:
        """Return what ``ask`` returns, on a new connection if the old one turns out to be broken."""
        try:
            return ask()
        except StoreRefused:
            raise
        except StoreUnavailable:
            # Only the first statement on a persistent connection finds out that the server has closed it.
            if not self.store.reconnect():
                raise
            return ask()

    def _take_over(self) -> Outcome | Available | None:
        try:
            return self._try_to_take_over()
        except StoreRefused:
            raise
        except StoreUnavailable:
            # The response to COMMIT may have been lost: then the record is this attempt's, and nobody else runs it.
            if not self.store.reconnect():
                raise
            seen = self._claim()
            if isinstance(seen, Seen) and seen.record.token != self.token:
                return ASK_AGAIN
            return self.interpret(seen)

    def _try_to_take_over(self) -> Outcome | Available | None:
        try:
            with self.store.try_lock(self.operation.id) as record:
                if record is Unlocked.BUSY:
                    return ASK_AGAIN
                if record is Unlocked.ABSENT:
                    return None
                decision = self._decide(record)
                if isinstance(decision, Available) and not decision.after:
                    return self._reassigned(record)
                if lapsed_just_now(record, decision):
                    self.store.hold(record, LEASE_LAPSED)
                return decision
        except StoreConflict:
            return ASK_AGAIN

    def sees_owner(self) -> bool:
        """Return whether the record has a live owner, as far as that can be told without a claim."""
        record = self.store.read(self.operation.id)
        if record is None:
            return self.store.has_owner(self.operation)
        decision = _decide(record, self.operation, grace=self.policy.takeover_grace)
        if not isinstance(decision, Available) or record.token is None:
            return isinstance(decision, InFlight)
        if decision.after:
            return True
        try:
            with self.store.try_lock(self.operation.id) as locked:
                return locked is Unlocked.BUSY
        except StoreConflict:
            return True

    def _decide(self, record: Snapshot) -> Duplicate | Available:
        if (record.scope, record.key) != (self.operation.scope, self.operation.key):
            raise DigestCollision(f"The record {shown_id(record.id)} belongs to another key.")
        decision = _decide(record, self.operation, grace=self.policy.takeover_grace, lease=self.policy.lease)
        return _decoded(decision, record, self.store)

    def _reassigned(self, record: Snapshot) -> Claimed | Mismatch:
        """Give the record to this attempt. It keeps its digest key, and so its child keys, unless it begins anew.

        A request that can't be compared is not run.
        """
        begins_anew = has_expired(record, record.now)
        operation = self.operation if begins_anew else as_recorded(self.operation, record.fingerprint)
        if operation is None:
            return Mismatch()
        return replace(self.store.reassign(record, operation, self.token), schemas=self.schemas)


def _decide(record: Snapshot, operation: Operation, **times: float) -> Duplicate | Available:
    same = as_recorded(operation, record.fingerprint)
    return decide(record, None if same is None else same.fingerprint, record.now, **times)


def in_transaction(policy: Policy) -> bool:
    """Whether a transaction that would hide a claim from others is open in any database where one may be made."""
    return any(store.in_foreign_transaction() for store in stores_of(policy))


def duplicate(operation: Operation, policy: Policy) -> Duplicate:
    """Return the outcome for a claimant that lost its claim: the same as if it had come second.

    Raises ``StoreUnavailable`` or ``ReplayForbidden``.
    """
    store = store_for(policy, operation)
    record = store.read(operation.id)
    decision = _decoded(_decide(record, operation, lease=policy.lease), record, store) if record else ASK_AGAIN
    outcome = ASK_AGAIN if isinstance(decision, Available) else decision
    _announce(outcome, operation, store)
    return outcome


def _decoded(decision: Duplicate | Available, record: Snapshot, store: Store) -> Duplicate | Available:
    if not isinstance(decision, Replay):
        return decision
    return replace(decision, response=store.decode(decision.response, record))


def _announce(
    outcome: Outcome, operation: Operation, store: Store, schemas: tuple[str, ...] = (), *, waited: bool = False
) -> None:
    """Send the signals for the outcome that a caller gets. Raises ``ReplayForbidden``."""
    match outcome:
        case Claimed(attempt=attempt, taken_over=taken_over):
            signals.send(signals.key_taken_over if taken_over else signals.key_claimed, operation, attempt=attempt)
        case Replay(response) if not operation.may_get(response):
            _reject(operation, Rejection.FORBIDDEN)
            raise ReplayForbidden
        case Replay(response, trace):
            background.count_replay(operation.id, store, schemas)
            signals.send(signals.response_replayed, operation, response=response, trace=trace)
        case InFlight(retry_after):
            _reject(operation, Rejection.WAIT_TIMEOUT if waited else Rejection.IN_FLIGHT, retry_after=retry_after)
        case Mismatch():
            _reject(operation, Rejection.KEY_REUSED)
        case OnHold(reason):
            _reject(operation, Rejection.ON_HOLD, hold_reason=reason)


def _reject(operation: Operation, reason: Rejection, **details: Any) -> None:
    signals.send(signals.request_rejected, operation, reason=reason, **details)
