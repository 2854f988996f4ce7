"""Threads of this process, and what they write in the background, because no request
waits for it.

Late completions, replay counts and other work that can wait never delay the renewal of
leases, which has threads of its own (``engine.leases``).
"""

from __future__ import annotations

import atexit
import logging
import math
import os
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from uuid import UUID

from django.db import connections

from django_idempotency.conf import in_test_run
from django_idempotency.reporting.logs import cause, log
from django_idempotency.stores.base import Store
from django_idempotency.values.exceptions import ClaimLost

Work = Callable[[], object]
COUNT_EVERY = 1.0
COMPLETE_EVERY = 1.0
PATIENCE = 5.0  # seconds that one write may take
PATIENCE_AT_EXIT = 2.0  # seconds that an exiting process may wait for pending writes


def threads_run() -> bool:
    """Whether this process lets threads run. Older versions of uWSGI do so only with
    ``--enable-threads``.

    Without it, threads can be started, but don't run between requests.
    https://uwsgi-docs.readthedocs.io/en/latest/ThingsToKnow.html
    """
    return bool(getattr(sys.modules.get("uwsgi"), "has_threads", True))


def _name(work: Any) -> str:
    while isinstance(work, partial):
        work = work.func
    return str(getattr(work, "__qualname__", type(work).__qualname__))


class Worker(ABC):
    """One thread that does what is due. It ends when there is nothing left to do, and
    is replaced if it ended too soon.

    A subclass keeps its pending work under the lock ``changed``. No error of that work,
    or of logging, ends the thread. The child of a fork begins with no work and no
    thread, even if the fork ran none of Python's hooks, as with uWSGI.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.reset()
        os.register_at_fork(after_in_child=self.reset)

    def reset(self) -> None:
        self.changed = threading.Condition()
        self.stopping = False
        self._process = os.getpid()
        self._thread: threading.Thread | None = None
        self._leaving: threading.Thread | None = None
        self._sleeps_until = -math.inf

    @abstractmethod
    def due(self) -> float | None:
        """Return when to work next, by the monotonic clock; ``None`` if there is
        nothing to do. The lock is held.
        """

    @abstractmethod
    def work(self) -> None:
        """Do what is due."""

    def reset_after_fork(self) -> None:
        """Begin anew in the child of a fork. Call this before taking the lock."""
        if self._process != os.getpid():
            self.reset()

    def wake(self) -> None:
        """Make sure that there is a thread and that it wakes when something is due.
        Call this under the lock.

        It does not wake sooner, because it would take the GIL from a request. Raises
        ``RuntimeError`` if no thread can be started.
        """
        if self._thread is None or not self._thread.is_alive():
            thread = threading.Thread(
                target=self._run, name=f"django-idempotency-{self.name}", daemon=True
            )
            thread.start()
            self._thread = thread
        elif (due := self.due()) is not None and due < self._sleeps_until:
            self.changed.notify_all()

    def attempt(self, work: Work, store: Store, seconds: float) -> bool:
        """Do ``work`` on a connection of this thread's own to ``store``, and return
        whether it succeeded.

        No statement takes longer than ``seconds``. An error is logged, so that other
        work can follow.
        """
        try:
            with store.own_connection(seconds=seconds):
                work()
        except Exception as error:  # the thread has other work, which must go on
            with suppress(Exception):
                log(
                    logging.WARNING,
                    "background",
                    "idempotency: %s: %s: %s",
                    self.name,
                    _name(work),
                    cause(error),
                )
            return False
        return True

    def join(self, seconds: float) -> None:
        """Wait until the thread has ended and closed its connections, but no longer
        than ``seconds``.
        """
        deadline = time.monotonic() + seconds
        for thread in (self._thread, self._leaving):
            if thread is not None:
                thread.join(max(0.0, deadline - time.monotonic()))

    def _run(self) -> None:
        try:
            while self._sleep():
                last = self.stopping
                with suppress(Exception):
                    self.work()
                if last:
                    return
        finally:
            with suppress(Exception):
                connections.close_all()
            self._leave_to_a_successor()

    def _leave_to_a_successor(self) -> None:
        """Start another thread if this one was ended from outside and something is left
        to do.
        """
        with self.changed, suppress(RuntimeError):
            if (
                self._thread is threading.current_thread()
                and not self.stopping
                and self.due() is not None
            ):
                self._thread = None
                self.wake()

    def _sleep(self) -> bool:
        """Wait until something is due. Return false, and count as ended, once there is
        nothing left to do.
        """
        with self.changed:
            while (due := self.due()) is not None:
                left = due - time.monotonic()
                if left <= 0 or self.stopping:
                    return True
                self._sleeps_until = due
                self.changed.wait(left)
                self._sleeps_until = -math.inf
            self._thread, self._leaving = None, self._thread
            return False


@dataclass(frozen=True, slots=True)
class ScheduledWork:
    """Work in a store. It is due at ``due``, by the monotonic clock, and after an error
    again in ``seconds``.
    """

    work: Work
    store: Store
    due: float
    seconds: float


class Background(Worker):
    """The pending writes of a process. The thread starts with the first of them and
    ends when all are done.
    """

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
        self.reset_after_fork()
        with self.changed:
            if not self._replays:
                self._counted = time.monotonic()
            self._replays[store][id] += 1
            try:  # noqa: SIM105 (suppress() would cost each replay three calls)
                self.wake()
            except RuntimeError:  # no thread can be started; the next call tries again
                pass

    def later(self, work: Work, seconds: float, store: Store) -> None:
        """Call ``work`` in ``seconds``, or earlier if the process ends. After an error,
        call it again in ``seconds``.

        Work that is requested twice before it is done is done once. In a test run it is
        never done.
        """
        if not in_test_run():
            self._add(work, seconds, store)

    def _add(self, work: Work, seconds: float, store: Store) -> None:
        self.reset_after_fork()
        with self.changed:
            self._work.setdefault(
                work, ScheduledWork(work, store, time.monotonic() + seconds, seconds)
            )
            try:  # noqa: SIM105 (suppress() would cost each replay three calls)
                self.wake()
            except RuntimeError:  # no thread can be started; the next call tries again
                pass

    def stop(self) -> None:
        """Do the pending work now, because the process ends. Wait for it
        ``PATIENCE_AT_EXIT`` seconds at most.
        """
        self.reset_after_fork()
        with self.changed:
            self.stopping = True
            self.changed.notify_all()
        self.join(PATIENCE_AT_EXIT)

    def due(self) -> float | None:
        times = [scheduled.due for scheduled in self._work.values()]
        if self._replays:
            times.append(self._counted + COUNT_EVERY)
        return min(times, default=None)

    def work(self) -> None:
        for scheduled in self._take_due():
            if not self.attempt(scheduled.work, scheduled.store, PATIENCE):
                with self.changed:
                    again = replace(scheduled, due=time.monotonic() + scheduled.seconds)
                    self._work.setdefault(scheduled.work, again)
        with self.changed:
            self._counted = time.monotonic()
            replays, self._replays = self._replays, defaultdict(Counter)
        for store, counts in replays.items():
            self.attempt(partial(store.count_replays, counts), store, PATIENCE)

    def _take_due(self) -> list[ScheduledWork]:
        now = math.inf if self.stopping else time.monotonic()
        with self.changed:
            due = [
                scheduled for scheduled in self._work.values() if scheduled.due <= now
            ]
            # before it is done: the same work requested meanwhile is done again
            for scheduled in due:
                del self._work[scheduled.work]
        return due


background = Background("background")
atexit.register(background.stop)
