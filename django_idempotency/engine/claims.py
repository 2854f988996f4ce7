"""Claim operations: ask the store, decide, and take over if the owner is gone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, TypeVar
from uuid import uuid4

from django_idempotency import signals
from django_idempotency.engine import leases
from django_idempotency.engine.admission import asks_admission, refused_for
from django_idempotency.engine.background import background
from django_idempotency.engine.decisions import (
    ASK_AGAIN,
    LEASE_LAPSED,
    decide,
    has_expired,
    lapsed_just_now,
)
from django_idempotency.engine.digests import as_recorded
from django_idempotency.reporting.events import send
from django_idempotency.stores import PostgreSQLStore, store_for, stores_of
from django_idempotency.stores.base import Owned, Seen, Store, Unlocked
from django_idempotency.stores.codec import lack_of_encryption
from django_idempotency.values.exceptions import (
    ClaimInsideTransaction,
    DigestCollision,
    NotAdmitted,
    ReplayForbidden,
    StoreConflict,
    StoreRefused,
    StoreUnavailable,
)
from django_idempotency.values.outcomes import (
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
    StoredResponse,
)
from django_idempotency.values.policy import REQUIRE, Lease, Policy
from django_idempotency.values.registry import Registry

T = TypeVar("T")
Known = TypeVar("Known", bound=Outcome)

GRACE_PAUSE = 0.01
# the owner of a transaction while its claim is announced, before its run has begun
ATTENDED = SimpleNamespace(running=True)
# The outcome if the key has an owner whose claim is a lock, by whether that owner runs
# the same request.
LOCKED_OUTCOMES: Mapping[bool | None, InFlight | Mismatch | Available] = {
    True: ASK_AGAIN,
    False: Mismatch(running=True),
    None: Available(after=GRACE_PAUSE),
}
# functions of wings, which return what is replayed in the place of a decoded response
amendments: Registry[Callable[[StoredResponse, Snapshot, Store], StoredResponse]] = (
    Registry()
)


def claim_many(operations: Sequence[Operation], policy: Policy) -> list[Outcome | None]:
    """Claim different operations of one policy, whose store has batches, in one
    statement, by record.

    The outcome is ``None`` if an operation takes more than that statement, such as a
    takeover. Claim it by itself, right before it is run. Raises what ``claim`` raises;
    operations claimed by then are left to a takeover.
    """
    claimants = [Claimant(operation, policy.by_record) for operation in operations]
    first = claimants[0]
    store = first.store
    assert isinstance(store, PostgreSQLStore)
    first.refuse_inside_transaction()
    wanted = [(claimant.operation, claimant.token) for claimant in claimants]
    try:
        found = first.reconnecting(partial(store.claim_many, wanted))
    except StoreConflict:
        return [None] * len(claimants)
    outcomes: list[Outcome | None] = []
    for claimant, seen in zip(claimants, found, strict=True):
        outcome = claimant.interpret_in_batch(seen)
        outcomes.append(
            outcome and announce(outcome, claimant.operation, claimant.bound_store)
        )
    return outcomes


class Claimant:
    """One caller's attempt at one operation. It asks until there is an outcome, always
    with the same token.
    """

    def __init__(self, operation: Operation, policy: Policy) -> None:
        # as E003 says; servers run no checks
        if policy.body.encrypt == REQUIRE and (why := lack_of_encryption()):
            error = StoreUnavailable(
                f'encrypt is "require", but {why}: nothing is run or stored.'
            )
            error.fails_open = False
            raise error
        self.policy = policy
        self.store = store_for(policy, operation)
        self.operation = operation
        # the choice holds for the whole run
        if callable(policy.using) and self.store.transactional:
            self.operation = replace(operation, database=self.store.name)
        self.token = uuid4()
        self.receipt: Any = None
        self.may_claim = policy.admit is None or not asks_admission(operation, policy)

    def refuse_inside_transaction(self) -> None:
        """Raise ``ClaimInsideTransaction`` if others would not see the claim."""
        if self.store.in_foreign_transaction():
            raise ClaimInsideTransaction(self.store.name)

    @property
    def bound_store(self) -> Store:
        """The store, bound to where it found the record."""
        return self.store.at(self.receipt)

    def refuse_new(self) -> None:
        """Raise ``NotAdmitted`` for a new key that is not admitted. A known key is
        claimed without asking.

        A key that becomes known between the lookup and the claim counts as one more
        key.
        """
        if self._is_new():
            seconds = refused_for(self.operation, self.policy)
            # Another caller may have claimed it meanwhile, or hold a claim by lock.
            if (
                seconds is not None
                and self._is_new()
                and not self.store.has_owner(self.operation)
            ):
                _reject(self.operation, Rejection.NOT_ADMITTED, retry_after=seconds)
                raise NotAdmitted(seconds)
        self.may_claim = True

    def _is_new(self) -> bool:
        record = self.reconnecting(partial(self.store.lookup, self.operation))
        return record is None or has_expired(record)

    def ask(self) -> Outcome | Available | None:
        """Return an outcome, or when the record will be available, or ``None`` if it
        was just made or deleted.

        Raises ``NotAdmitted``.
        """
        if not self.may_claim:
            self.refuse_new()
        return self.interpret(self._claim())

    def interpret(
        self, seen: Claimed | Seen | Owned | None
    ) -> Outcome | Available | None:
        """Return what the store's result of a claim means, and take over if
        necessary.
        """
        if isinstance(seen, Owned):
            return LOCKED_OUTCOMES[seen.same]
        if not isinstance(seen, Seen):
            return seen
        self.receipt = seen.receipt
        # an earlier claim was made, but its response was lost
        if seen.record.token == self.token:
            operation = (
                as_recorded(self.operation, seen.record.fingerprint) or self.operation
            )
            return Claimed(
                operation, self.token, seen.record.attempts, receipt=self.receipt
            )
        decision = self._decide(seen.record)
        if isinstance(decision, Available) and seen.busy:
            return ASK_AGAIN
        if isinstance(decision, Available) or lapsed_just_now(seen.record, decision):
            return self._take_over()
        if isinstance(decision, InFlight) and seen.record.mode == Lease.word:
            leases.suspect(seen.record, self.bound_store)
        return decision

    def interpret_in_batch(self, seen: Claimed | Seen | Owned | None) -> Outcome | None:
        """Return what the store's result of a claim means; ``None`` for a record that
        has, or had, another owner.
        """
        if (
            isinstance(seen, Seen)
            and seen.record.response is None
            and seen.record.token != self.token
        ):
            return None
        outcome = self.interpret(seen)
        return None if isinstance(outcome, Available) else outcome

    def _claim(self) -> Claimed | Seen | Owned | None:
        try:
            return self.reconnecting(
                partial(self.store.claim, self.operation, self.token)
            )
        except StoreConflict:
            return None

    def reconnecting(
        self, ask: Callable[[], T], again: Callable[[], T] | None = None
    ) -> T:
        """Return what ``ask`` returns, or ``again`` on a new connection if the old one
        turns out to be broken.
        """
        try:
            return ask()
        except StoreRefused:
            raise
        except StoreUnavailable:
            # Only the first statement on a persistent connection finds out that the
            # server has closed it.
            if not self.store.reconnect():
                raise
            return (again or ask)()

    def _take_over(self) -> Outcome | Available | None:
        return self.reconnecting(
            self._try_to_take_over, again=self._find_out_whether_taken_over
        )

    def _find_out_whether_taken_over(self) -> Outcome | Available | None:
        """If the response to COMMIT was lost, the record is this attempt's, and nobody
        else runs it.
        """
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

    def _decide(self, record: Snapshot) -> Duplicate | Available:
        if (record.scope, record.key) != (self.operation.scope, self.operation.key):
            raise DigestCollision(f"The record {record.id} belongs to another key.")
        return _decide(record, self.operation, self.store)

    def _reassigned(self, record: Snapshot) -> Claimed | Mismatch:
        """Give the record to this attempt. It keeps its digest key, and so its child
        keys, unless it begins anew.

        A request that can't be compared is not run.
        """
        operation = (
            self.operation
            if has_expired(record)
            else as_recorded(self.operation, record.fingerprint)
        )
        if operation is None:
            return Mismatch()
        claimed = self.store.reassign(record, operation, self.token)
        return claimed if self.receipt is None else claimed.with_receipt(self.receipt)


def _decide(
    record: Snapshot, operation: Operation, store: Store
) -> Duplicate | Available:
    same, mode = as_recorded(operation, record.fingerprint), store.policy.mode
    fingerprint = None if same is None else same.fingerprint
    decision = decide(
        record, fingerprint, grace=mode.takeover_grace, lease=mode.seconds
    )
    return (
        replay_of(decision.response, record, operation, store)
        if isinstance(decision, Replay)
        else decision
    )


def replay_of(
    response: StoredResponse, record: Snapshot, operation: Operation, store: Store
) -> Replay:
    """Return the replay of the ``response`` that ``record`` stores."""
    response = store.decode(response, record, operation.view)
    for amended in amendments:
        response = amended(response, record, store)
    return Replay(response)


def replayed(
    response: StoredResponse, record: Snapshot, operation: Operation, store: Store
) -> Replay:
    """Return the replay of what ``record`` stores to the caller of ``operation``.

    Raises ``ReplayForbidden``.
    """
    replay = replay_of(response, record, operation, store)
    return announce(replay, operation, store)


def in_transaction(policy: Policy) -> bool:
    """Whether a transaction that would hide a claim from others is open in any database
    where one may be made.
    """
    return any(store.in_foreign_transaction() for store in stores_of(policy))


def duplicate(operation: Operation, policy: Policy) -> Duplicate:
    """Return the outcome for a claimant that lost its claim: the same as if it had come
    second.

    Raises ``StoreUnavailable`` or ``ReplayForbidden``.
    """
    store = store_for(policy, operation)
    record = store.read(operation.id)
    decision = _decide(record, operation, store) if record else ASK_AGAIN
    return announce(
        ASK_AGAIN if isinstance(decision, Available) else decision, operation, store
    )


def announce(
    outcome: Known, operation: Operation, store: Store, *, waited: bool = False
) -> Known:
    """Send the signals for ``outcome`` and return it. Raises ``ReplayForbidden``."""
    match outcome:
        case Claimed(attempt=attempt, taken_over=taken_over):
            signal = signals.key_taken_over if taken_over else signals.key_claimed
            if not outcome.by_lock:
                send(signal, operation, attempt=attempt)
                return outcome
            of_database: Any = store
            business = of_database.transaction(outcome)
            business.owner = ATTENDED  # a receiver may claim another key
            send(signal, operation, attempt=attempt)
            business.owner = None
        case Replay(response) if not operation.may_get(response):
            _reject(operation, Rejection.FORBIDDEN)
            raise ReplayForbidden
        case Replay(response):
            background.count_replay(operation.id, store)
            send(signals.response_replayed, operation, response=response)
        case InFlight(retry_after):
            _reject(
                operation,
                Rejection.WAIT_TIMEOUT if waited else Rejection.IN_FLIGHT,
                retry_after=retry_after,
            )
        case Mismatch():
            _reject(operation, Rejection.KEY_REUSED)
        case OnHold(reason):
            _reject(operation, Rejection.ON_HOLD, hold_reason=reason)
    return outcome


def _reject(operation: Operation, reason: Rejection, **details: Any) -> None:
    send(signals.request_rejected, operation, reason=reason, **details)
