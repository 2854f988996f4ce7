"""Sync work of async callers that is completed even if they hang up, and waiting without a connection."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, TypeVar

from asgiref.sync import SyncToAsync, sync_to_async
from django.db import connections

T = TypeVar("T")

PATIENCE = 5.0


async def shielded(work: Callable[[], T], *, undo: Callable[[T], object] | None = None) -> T:
    """Await ``work`` in its thread to the end, even if the caller is cancelled meanwhile.

    In that case, raise ``CancelledError`` afterwards. Before that, call ``undo`` with the result, which no caller is
    left to take.
    """
    task = asyncio.ensure_future(sync_to_async(work)())
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            cancelled = error
        except Exception:  # the task's own: it is done now, and its result is examined below
            pass
    if cancelled is None:
        return task.result()
    failed = task.cancelled() or task.exception() is not None
    if undo is not None and not failed:
        with suppress(asyncio.CancelledError):
            await shielded(partial(undo, task.result()))
    raise cancelled


def has_thread_of_its_own() -> bool:
    """Whether the sync work of this request has a thread and a connection to itself, as under Django's ASGI handler."""
    return SyncToAsync.thread_sensitive_context.get(None) is not None


class Lookout:
    """One thread, with one connection, for all callers of this process that wait for another owner."""

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._waiting = 0
        self._thread: ThreadPoolExecutor | None = None

    @contextmanager
    def open(self) -> Iterator[Executor]:
        with self._lock:
            self._waiting += 1
            thread = self._thread = self._thread or ThreadPoolExecutor(1, "django-idempotency-waiting")
        try:
            yield thread
        finally:
            with self._lock:
                self._waiting -= 1
                if not self._waiting:
                    self._thread = None
                    thread.submit(connections.close_all)
                    thread.shutdown(wait=False)

    async def watch(self, probe: Callable[[], Any], pauses: Iterator[float]) -> None:
        """Return as soon as ``probe`` returns false, or after the last of ``pauses``, the seconds between two looks."""
        with self.open() as thread:
            for pause in pauses:
                await asyncio.sleep(pause)
                if not await asyncio.get_running_loop().run_in_executor(thread, probe):
                    return

    def wait(self, probe: Callable[[], Any], pauses: Iterator[float]) -> None:
        """``watch`` for sync callers. A look that takes more than ``PATIENCE`` seconds ends it, too."""
        with self.open() as thread:
            for pause in pauses:
                time.sleep(pause)
                try:
                    if not thread.submit(probe).result(PATIENCE):
                        return
                except TimeoutError:
                    return


lookout = Lookout()
os.register_at_fork(after_in_child=lookout._reset)
