"""Claim an operation, and wait for the owner of its key if the policy says so."""

from __future__ import annotations

import os
import threading
import time
from contextlib import closing

from django_idempotency.conf import conf
from django_idempotency.engine.claims import GRACE_PAUSE, Claimant, announce
from django_idempotency.values.exceptions import StoreUnavailable
from django_idempotency.values.outcomes import (
    Available,
    Claimed,
    InFlight,
    Operation,
    Outcome,
    Replay,
)
from django_idempotency.values.policy import Policy

FIRST_PAUSE = 0.02
LONGEST_PAUSE = 0.25
PATIENCE = 5.0


def claim(operation: Operation, policy: Policy) -> Outcome:
    """Claim ``operation``, or return what became of it. With ``wait``, wait first.

    Raises ``NotAdmitted``, ``ReplayForbidden``, ``StoreUnavailable``,
    ``ClaimInsideTransaction`` or ``DigestCollision``. Nothing was run in these cases.
    """
    pending = begin_claim(operation, policy)
    if not isinstance(pending, Pending):
        return pending
    with closing(pending):
        outcome: Outcome | Pending = pending
        # no lock and no transaction is held in between
        while isinstance(outcome, Pending):
            time.sleep(outcome.pause)
            outcome = outcome.ask()
        return outcome


def begin_claim(operation: Operation, policy: Policy) -> Outcome | Pending:
    """Do as much of ``claim`` as is possible without waiting."""
    claimant = Claimant(operation, policy)
    claimant.refuse_inside_transaction()
    try:
        outcome = claimant.ask()
        # most callers wait for nothing
        if isinstance(outcome, Claimed | Replay):
            is_new = isinstance(outcome, Claimed)
            store = claimant.store if is_new else claimant.bound_store
            return announce(outcome, claimant.operation, store)
    except BaseException:
        claimant.store.recover()  # a claim by lock has opened a transaction
        raise
    return Pending(claimant, outcome).ask()


class Pending:
    """A claim that its ``first`` attempt has not decided. Call ``ask()`` again in
    ``pause`` seconds. It holds no lock and no transaction.

    Call ``close()`` however the wait ends, because the claim counts as a waiter.
    """

    def __init__(self, claimant: Claimant, first: Outcome | Available | None) -> None:
        self.claimant = claimant
        self.first = first
        self.operation = claimant.operation
        self.policy = policy = claimant.policy
        begun = time.monotonic()
        self.waits_until = begun + (policy.wait or 0)
        self.gives_up = self.waits_until + policy.mode.takeover_grace + PATIENCE
        self.asked = 0
        self.pause = 0.0
        self.next_pause = FIRST_PAUSE
        self.counted = False

    def ask(self) -> Outcome | Pending:
        """Return an outcome, or this object if there is none yet. Raises what ``claim``
        raises.
        """
        try:
            return self._ask()
        except BaseException:
            self.claimant.store.recover()  # a claim by lock has opened a transaction
            raise

    def _ask(self) -> Outcome | Pending:
        # At least twice: the first attempt may have waited longer for the table, only
        # to find another one in its place.
        while (now := time.monotonic()) < self.gives_up or self.asked < 2:
            self.asked += 1
            outcome = self.first if self.asked == 1 else self.claimant.ask()
            if outcome is None:
                continue
            if isinstance(outcome, Available):
                self.pause = min(outcome.after, GRACE_PAUSE)
            elif (
                isinstance(outcome, InFlight)
                and now < self.waits_until
                and self._may_wait()
            ):
                self.pause, self.next_pause = (
                    self.next_pause,
                    min(self.next_pause * 2, LONGEST_PAUSE),
                )
            else:
                return announce(
                    outcome,
                    self.operation,
                    self.claimant.bound_store,
                    waited=self.counted,
                )
            return self
        raise StoreUnavailable(
            f"The record {self.operation.id} changed again and again while it was being"
            " claimed."
        )

    def _may_wait(self) -> bool:
        self.counted = self.counted or waiters.enter(conf().max_waiters)
        return self.counted

    def close(self) -> None:
        """Let another caller wait."""
        if self.counted:
            self.counted = False
            waiters.leave()


class Waiters:
    """Counts the callers of this process that wait: each has a connection, and a sync
    one blocks a thread.
    """

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self.waiting = 0

    def enter(self, most: int) -> bool:
        """Count one more caller. Return false, and don't count it, if ``most`` wait
        already.
        """
        with self._lock:
            if self.waiting >= most:
                return False
            self.waiting += 1
            return True

    def leave(self) -> None:
        with self._lock:
            self.waiting -= 1


waiters = Waiters()
os.register_at_fork(after_in_child=waiters._reset)
