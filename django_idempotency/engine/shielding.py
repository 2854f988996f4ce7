"""Sync work of async callers that is completed even if they hang up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TypeVar

from asgiref.sync import sync_to_async

T = TypeVar("T")


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
