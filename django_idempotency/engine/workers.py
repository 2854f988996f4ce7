"""Threads of this process: each runs while there is something to do, and is restarted if it ended too soon."""

from __future__ import annotations

import logging
import math
import os
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from django.db import connections

from django_idempotency.reporting.logs import cause, log

Work = Callable[[], object]


def threads_run() -> bool:
    """Whether this process lets threads run. Older versions of uWSGI do so only with ``--enable-threads``.

    Without it, threads can be started, but don't run between requests. https://uwsgi-docs.readthedocs.io/en/latest/ThingsToKnow.html
    """
    return bool(getattr(sys.modules.get("uwsgi"), "has_threads", True))


def _name(work: Any) -> str:
    while isinstance(work, partial):
        work = work.func
    return str(getattr(work, "__qualname__", type(work).__qualname__))


class Worker(ABC):
    """One thread that does what is due.

    A subclass keeps its pending work under the lock ``changed``. No error of that work, or of logging, ends the thread.
    The child of a fork begins with no work and no thread, even if the fork ran none of Python's hooks, as with uWSGI.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.reset()
        os.register_at_fork(after_in_child=self.reset)

    def reset(self) -> None:
        self.changed = threading.Condition()
        self.ending = False
        self._process = os.getpid()
        self._thread: threading.Thread | None = None
        self._leaving: threading.Thread | None = None
        self._sleeps_until = -math.inf

    @abstractmethod
    def due(self) -> float | None:
        """Return when to work next, by the monotonic clock; ``None`` if there is nothing to do. The lock is held."""

    @abstractmethod
    def work(self) -> None:
        """Do what is due."""

    def leave_the_parents_process(self) -> None:
        """Begin anew in the child of a fork. Call this before taking the lock."""
        if self._process != os.getpid():
            self.reset()

    def wake(self) -> None:
        """Make sure that there is a thread and that it wakes when something is due. Call this under the lock.

        It does not wake sooner, because it would take the GIL from a request. Raises ``RuntimeError`` if no thread can
        be started.
        """
        if self._thread is None or not self._thread.is_alive():
            thread = threading.Thread(target=self._run, name=f"django-idempotency-{self.name}", daemon=True)
            thread.start()
            self._thread = thread
        elif (due := self.due()) is not None and due < self._sleeps_until:
            self.changed.notify_all()

    def attempt(self, work: Work, of: object = None) -> bool:
        """Do ``work`` and return whether it succeeded. An error is logged, so that other work can follow.

        ``of``: what the log names; ``work`` by default.
        """
        try:
            work()
        except Exception as error:  # the thread has other work, which must go on
            with suppress(Exception):
                log(
                    logging.WARNING, "background", "idempotency: %s: %s: %s", self.name, _name(of or work), cause(error)
                )
            return False
        return True

    def join(self, seconds: float) -> None:
        """Wait until the thread has ended and closed its connections, but no longer than ``seconds``."""
        deadline = time.monotonic() + seconds
        for thread in (self._thread, self._leaving):
            if thread is not None:
                thread.join(max(0.0, deadline - time.monotonic()))

    def _run(self) -> None:
        try:
            while self._sleep():
                last = self.ending
                with suppress(Exception):
                    self.work()
                if last:
                    return
        finally:
            with suppress(Exception):
                connections.close_all()
            self._leave_to_a_successor()

    def _leave_to_a_successor(self) -> None:
        """Start another thread if this one was ended from outside and something is left to do."""
        with self.changed, suppress(RuntimeError):
            if self._thread is threading.current_thread() and not self.ending and self.due() is not None:
                self._thread = None
                self.wake()

    def _sleep(self) -> bool:
        """Wait until something is due. Return false, and count as ended, once there is nothing left to do."""
        with self.changed:
            while (due := self.due()) is not None:
                left = due - time.monotonic()
                if left <= 0 or self.ending:
                    return True
                self._sleeps_until = due
                self.changed.wait(left)
                self._sleeps_until = -math.inf
            self._thread, self._leaving = None, self._thread
            return False
