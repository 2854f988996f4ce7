"""One thread per process that keeps what a process owes: leases, late completions, replay counts, and what can wait."""

from __future__ import annotations

import atexit
import logging
import math
import os
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from uuid import UUID

from django.db import connections

from django_idempotency.conf import in_test_run
from django_idempotency.exceptions import ClaimLost
from django_idempotency.logs import cause, log
from django_idempotency.outcomes import Claimed
from django_idempotency.policy import Policy
from django_idempotency.stores import store_for

BEATS_PER_LEASE = 3
COUNT_EVERY = 1.0
PATIENCE_AT_EXIT = 2.0  # seconds that the end of a process may wait for what is still to be written


@dataclass(slots=True)
class Lease:
    claim: Claimed
    policy: Policy
    finish: Callable[[], None] | None = None


@dataclass(frozen=True, slots=True)
class Errand:
    due: float
    seconds: float


class Heartbeat:
    """Renews all leases of this process, one statement for each policy, three times per lease.

    The thread starts with the first thing to do and ends, connections closed, when nothing is left.
    """

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._last_beat = 0.0
        self._sleeps_until = -math.inf
        self._leases: dict[UUID, Lease] = {}
        self._replays: dict[Policy, Counter[UUID]] = defaultdict(Counter)
        self._errands: dict[Callable[[], object], Errand] = {}
        self._ending = False

    @contextmanager
    def keeping(self, claim: Claimed, policy: Policy) -> Iterator[None]:
        """Keep the claim's lease for as long as the block runs."""
        with self._changed:
            self._leases[claim.token] = Lease(claim, policy)
            self._wake(policy.lease / BEATS_PER_LEASE)
        try:
            yield
        finally:
            with self._changed:
                lease = self._leases.get(claim.token)
                if lease is not None and lease.finish is None:
                    del self._leases[claim.token]

    def finish_later(self, claim: Claimed, finish: Callable[[], None]) -> None:
        """Keep the lease and call ``finish`` at every beat until it succeeds."""
        with self._changed:
            self._leases[claim.token].finish = finish

    def count_replay(self, id: UUID, policy: Policy) -> None:
        """Count one replay; written within a second or so. In a test run none is: databases come and go there."""
        if in_test_run():
            return
        with self._changed:
            self._replays[policy][id] += 1
            self._wake(COUNT_EVERY)

    def later(self, work: Callable[[], object], seconds: float) -> None:
        """Call ``work`` in so many seconds, or when the process ends; after an error, again in as many.

        Asked for twice before it is done, it is done once. In a test run it is never done.
        """
        if in_test_run():
            return
        with self._changed:
            self._errands.setdefault(work, Errand(time.monotonic() + seconds, seconds))
            self._wake(seconds)

    def end(self) -> None:
        """Do now whatever is still to do, as far as it goes in a moment: the process ends."""
        with self._changed:
            self._ending = True
            self._changed.notify()
            thread = self._thread
        if thread is not None:
            thread.join(PATIENCE_AT_EXIT)

    def beat(self) -> None:
        """Do now what is due: finish, renew, count, run errands."""
        for connection in connections.all(initialized_only=True):
            self._attempt(connection.close_if_unusable_or_obsolete)
        with self._changed:
            leases = list(self._leases.values())
            replays, self._replays = self._replays, defaultdict(Counter)
        for lease in leases:
            if lease.finish is not None:
                self._finish(lease)
        by_policy: dict[Policy, list[Claimed]] = defaultdict(list)
        for lease in leases:
            by_policy[lease.policy].append(lease.claim)
        for policy, claims in by_policy.items():
            self._attempt(partial(self._renew, claims, policy))
        for policy, counts in replays.items():
            self._attempt(partial(self._count_replays, counts, policy))
        for work, errand in self._due_errands():
            if not self._attempt(work):
                with self._changed:
                    self._errands.setdefault(work, Errand(time.monotonic() + errand.seconds, errand.seconds))

    def _due_errands(self) -> list[tuple[Callable[[], object], Errand]]:
        now = math.inf if self._ending else time.monotonic()
        with self._changed:
            due = [(work, errand) for work, errand in self._errands.items() if errand.due <= now]
            for work, _errand in due:  # before it is done: what is asked for meanwhile is another errand
                del self._errands[work]
        return due

    @staticmethod
    def _renew(claims: list[Claimed], policy: Policy) -> None:
        store_for(policy).renew(claims, policy)

    @staticmethod
    def _count_replays(counts: dict[UUID, int], policy: Policy) -> None:
        store_for(policy).count_replays(counts, policy)

    def _finish(self, lease: Lease) -> None:
        assert lease.finish is not None
        try:
            lease.finish()
        except ClaimLost:
            pass  # whoever rejected the write has said so
        except Exception as error:
            log(
                logging.WARNING,
                "store_error",
                "idempotency record %s still could not be written: %s",
                lease.claim.id,
                cause(error),
                operation=lease.claim.operation,
                attempt=lease.claim.attempt,
            )
            return
        with self._changed:
            self._leases.pop(lease.claim.token, None)

    @staticmethod
    def _attempt(write: Callable[[], object]) -> bool:
        # All leases of the process hang on this thread: whatever goes wrong with one write, the others follow.
        try:
            write()
        except Exception as error:
            log(logging.WARNING, "heartbeat", "idempotency heartbeat: %s", cause(error))
            return False
        return True

    def _wake(self, seconds: float) -> None:
        """See to it that the thread is awake in ``seconds``. Not sooner: it would have the GIL of a request."""
        if self._thread is None:
            self._last_beat = time.monotonic()
            thread = threading.Thread(target=self._run, name="django-idempotency-heartbeat", daemon=True)
            thread.start()
            self._thread = thread
        elif time.monotonic() + seconds < self._sleeps_until:
            self._changed.notify()

    def _run(self) -> None:
        try:
            while self._pause():
                last = self._ending
                self.beat()
                if last:
                    return
        finally:
            connections.close_all()

    def _pause(self) -> bool:
        """Wait until the next beat is due; false, and no thread any more, once there is nothing left to do."""
        with self._changed:
            while self._leases or self._replays or self._errands:
                left = self._next_beat() - time.monotonic()
                if left <= 0 or self._ending:
                    self._last_beat = time.monotonic()
                    return True
                self._sleeps_until = time.monotonic() + left
                self._changed.wait(left)
                self._sleeps_until = -math.inf
            self._thread = None
            return False

    def _next_beat(self) -> float:
        intervals = [lease.policy.lease / BEATS_PER_LEASE for lease in self._leases.values()]
        intervals += [COUNT_EVERY] * bool(self._replays)
        return min([self._last_beat + min(intervals, default=math.inf), *(e.due for e in self._errands.values())])


heartbeat = Heartbeat()
atexit.register(heartbeat.end)
os.register_at_fork(after_in_child=heartbeat._reset)
