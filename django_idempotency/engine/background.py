"""Write in the background what no request waits for: late completions, replay counts, and other work that can wait.

This never delays the renewal of leases, which has threads of its own (``engine.leases``).
"""

from __future__ import annotations

import atexit
import math
import time
from collections import Counter, defaultdict
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from uuid import UUID

from django_idempotency.conf import in_test_run
from django_idempotency.engine.workers import Work, Worker
from django_idempotency.exceptions import ClaimLost
from django_idempotency.stores.base import Store

COUNT_EVERY = 1.0
COMPLETE_EVERY = 1.0
PATIENCE = 5.0  # seconds that one write may take
PATIENCE_AT_EXIT = 2.0  # seconds that an exiting process may wait for pending writes


@dataclass(frozen=True, slots=True)
class ScheduledWork:
    """Work in a store. It is due at ``due``, by the monotonic clock, and after an error again in ``seconds``."""

    work: Work
    store: Store
    due: float
    seconds: float

    def run(self) -> None:
        with self.store.own_connection(seconds=PATIENCE):
            self.work()

    def again(self) -> ScheduledWork:
        return replace(self, due=time.monotonic() + self.seconds)


class Background(Worker):
    """The pending writes of a process. The thread starts with the first of them and ends when all are done."""

    def reset(self) -> None:
        super().reset()
        self._replays: dict[Store, Counter[UUID]] = defaultdict(Counter)
        self._work: dict[Work, ScheduledWork] = {}
        self._counted = time.monotonic()

    def complete(self, write: Work, store: Store) -> None:
        """Call ``write`` every second until it succeeds, or raises ``ClaimLost``."""

        def completing() -> None:
            with suppress(ClaimLost):  # the rejection has been logged already
                write()

        self._add(completing, COMPLETE_EVERY, store)

    def count_replay(self, id: UUID, store: Store) -> None:
        """Count one replay, which is written within a second or so.

        A test run counts none, because its databases come and go.
        """
        if in_test_run():
            return
        self.leave_the_parents_process()
        with self.changed:
            if not self._replays:
                self._counted = time.monotonic()
            self._replays[store][id] += 1
            with suppress(RuntimeError):  # no thread can be started now; the next call tries again
                self.wake()

    def later(self, work: Work, seconds: float, store: Store) -> None:
        """Call ``work`` in ``seconds``, or earlier if the process ends. After an error, call it again in ``seconds``.

        Work that is requested twice before it is done is done once. In a test run it is never done.
        """
        if not in_test_run():
            self._add(work, seconds, store)

    def _add(self, work: Work, seconds: float, store: Store) -> None:
        self.leave_the_parents_process()
        with self.changed:
            self._work.setdefault(work, ScheduledWork(work, store, time.monotonic() + seconds, seconds))
            with suppress(RuntimeError):  # no thread can be started now; the next call tries again
                self.wake()

    def end(self) -> None:
        """Do the pending work now, because the process ends. Wait for it ``PATIENCE_AT_EXIT`` seconds at most."""
        self.leave_the_parents_process()
        with self.changed:
            self.ending = True
            self.changed.notify_all()
        self.join(PATIENCE_AT_EXIT)

    def due(self) -> float | None:
        times = [scheduled.due for scheduled in self._work.values()]
        if self._replays:
            times.append(self._counted + COUNT_EVERY)
        return min(times, default=None)

    def work(self) -> None:
        for scheduled in self._take_due():
            if not self.attempt(scheduled.run, scheduled.work):
                with self.changed:
                    self._work.setdefault(scheduled.work, scheduled.again())
        with self.changed:
            self._counted = time.monotonic()
            replays, self._replays = self._replays, defaultdict(Counter)
        for store, counts in replays.items():
            self.attempt(partial(_count_replays, store, counts))

    def _take_due(self) -> list[ScheduledWork]:
        now = math.inf if self.ending else time.monotonic()
        with self.changed:
            due = [scheduled for scheduled in self._work.values() if scheduled.due <= now]
            for scheduled in due:  # before it is done: the same work requested meanwhile is done again
                del self._work[scheduled.work]
        return due

    def forget(self) -> None:
        with self.changed:
            self._replays.clear()
            self._work.clear()
            self.changed.notify_all()


def _count_replays(store: Store, counts: Counter[UUID]) -> None:
    with store.own_connection(seconds=PATIENCE):
        store.count_replays(counts)


background = Background("background")
atexit.register(background.end)
