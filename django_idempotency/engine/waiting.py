"""Claim, and wait for the owner of a key, holding no lock, no transaction and no connection."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from itertools import chain
from uuid import UUID

from asgiref.sync import sync_to_async
from django.db import Error

from django_idempotency.conf import conf
from django_idempotency.engine.claims import GRACE_PAUSE, Claimant
from django_idempotency.engine.shielding import has_thread_of_its_own, lookout
from django_idempotency.exceptions import StoreUnavailable
from django_idempotency.policy import Policy
from django_idempotency.values.outcomes import Available, InFlight, Operation, Outcome

FIRST_PAUSE = 0.02
LONGEST_PAUSE = 0.25
PATIENCE = 5.0


def claim(operation: Operation, policy: Policy) -> Outcome:
    """Claim ``operation``, or return what became of it. With ``wait``, wait first.

    Raises ``NotAdmitted``, ``ReplayForbidden``, ``StoreUnavailable``, ``ClaimInsideTransaction`` or
    ``DigestCollision``. Nothing was run in these cases.
    """
    pending = begin_claim(operation, policy)
    if not isinstance(pending, Pending):
        return pending
    with closing(pending):
        outcome: Outcome | Pending = pending
        while isinstance(outcome, Pending):  # no lock and no transaction is held in between
            outcome.wait()
            outcome = outcome.ask()
        return outcome


def begin_claim(operation: Operation, policy: Policy, *, blocks: bool = True) -> Outcome | Pending:
    """Do as much of ``claim`` as is possible without waiting. ``blocks``: waiting would block a thread."""
    claimant = Claimant(operation, policy)
    claimant.refuse_inside_transaction()
    return Pending(claimant, blocks=blocks).ask()


class Pending:
    """A claim that is not decided yet. Call ``ask()`` again in ``pause`` seconds. It holds no lock and no transaction.

    ``in_flight``: another owner is running the operation. Call ``close()`` however the wait ends, because the claim
    counts as a waiter.
    """

    def __init__(self, claimant: Claimant, *, blocks: bool) -> None:
        self.claimant = claimant
        self.waits_for = None if blocks else claimant.operation.id
        self.operation = claimant.operation
        self.policy = policy = claimant.policy
        begun = time.monotonic()
        self.waits_until = begun + (policy.wait or 0)
        self.gives_up = self.waits_until + policy.mode.takeover_grace + PATIENCE
        self.asked = 0
        self.pause = 0.0
        self.in_flight = False
        self.counted = False
        self._pauses = self.pauses()

    def ask(self) -> Outcome | Pending:
        """Return an outcome, or this object if there is none yet. Raises what ``claim`` raises."""
        try:
            return self._ask()
        except BaseException:
            self.claimant.store.recover()  # a claim by lock has opened a transaction
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
        raise StoreUnavailable(f"The record {self.operation.id} changed again and again while it was being claimed.")

    def _may_wait(self) -> bool:
        self.counted = self.counted or waiters.enter(self.waits_for, conf().max_waiters)
        return self.counted

    def close(self) -> None:
        """Let another caller wait."""
        if self.counted:
            self.counted = False
            waiters.leave(self.waits_for)

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
            with self.claimant.bound_store.own_connection(seconds=PATIENCE):
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


# --- How many may wait ------------------------------------------------------------------------------------------------


class Waiters:
    """Counts the callers that block a thread as they wait, under ``None``, and the others by the id of their record."""

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._waiting: Counter[UUID | None] = Counter()

    def enter(self, id: UUID | None, most: float) -> bool:
        """Count one more caller. Return false, and don't count it, if ``most`` wait already."""
        with self._lock:
            if self._waiting[id] >= most:
                return False
            self._waiting[id] += 1
            return True

    def leave(self, id: UUID | None) -> None:
        with self._lock:
            self._waiting[id] -= 1
            if not self._waiting[id]:
                del self._waiting[id]

    def __len__(self) -> int:
        return self._waiting.total()


waiters = Waiters()
os.register_at_fork(after_in_child=waiters._reset)
