"""One thread per process that keeps what a process owes its records: leases, late completions, replay counts."""

from __future__ import annotations

import logging
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
from django_idempotency.outcomes import Claimed
from django_idempotency.policy import Policy
from django_idempotency.stores import store_for

logger = logging.getLogger("django_idempotency")

BEATS_PER_LEASE = 3
COUNT_EVERY = 1.0


@dataclass(slots=True)
class Lease:
    claim: Claimed
    policy: Policy
    finish: Callable[[], None] | None = None


class Heartbeat:
    """Renews all leases of this process, one statement for each policy, three times per lease.

    The thread starts with the first lease or replay and ends, connections closed, when nothing is left to do.
    """

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._last_beat = 0.0
        self._leases: dict[UUID, Lease] = {}
        self._replays: dict[Policy, Counter[UUID]] = defaultdict(Counter)

    @contextmanager
    def keeping(self, claim: Claimed, policy: Policy) -> Iterator[None]:
        """Keep the claim's lease for as long as the block runs."""
        with self._changed:
            self._leases[claim.token] = Lease(claim, policy)
            self._wake()
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
        """Count one replay; written within a second or so."""
        with self._changed:
            self._replays[policy][id] += 1
            if not in_test_run():  # databases come and go there, and a thread would hold on to them
                self._wake()

    def beat(self) -> None:
        """Do now what is due: finish, renew, count."""
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
            logger.warning("idempotency record %s was taken over before it could be completed", lease.claim.id)
        except Exception as error:
            logger.warning("idempotency record %s still could not be written: %r", lease.claim.id, error)
            return
        with self._changed:
            self._leases.pop(lease.claim.token, None)

    @staticmethod
    def _attempt(write: Callable[[], object]) -> None:
        # All leases of the process hang on this thread: whatever goes wrong with one write, the others follow.
        try:
            write()
        except Exception as error:
            logger.warning("idempotency heartbeat: %r", error)

    def _wake(self) -> None:
        if self._thread is None:
            self._last_beat = time.monotonic()
            self._thread = threading.Thread(target=self._run, name="django-idempotency-heartbeat", daemon=True)
            self._thread.start()
        else:
            self._changed.notify()

    def _run(self) -> None:
        try:
            while self._pause():
                self.beat()
        finally:
            connections.close_all()

    def _pause(self) -> bool:
        """Wait until the next beat is due; false, and no thread any more, once there is nothing left to do."""
        with self._changed:
            while self._leases or self._replays:
                left = self._last_beat + self._interval() - time.monotonic()
                if left <= 0:
                    self._last_beat = time.monotonic()
                    return True
                self._changed.wait(left)
            self._thread = None
            return False

    def _interval(self) -> float:
        intervals = [lease.policy.lease / BEATS_PER_LEASE for lease in self._leases.values()]
        return min(intervals + [COUNT_EVERY] * bool(self._replays))


heartbeat = Heartbeat()
os.register_at_fork(after_in_child=heartbeat._reset)
