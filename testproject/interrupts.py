"""Stopping on a signal, and cleaning up first what was started."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

STOPS = (signal.SIGINT, signal.SIGTERM)


def end_on_signals() -> None:
    """Have SIGTERM end this process as Ctrl-C does. The cleanup that follows is not
    interrupted a second time.
    """
    for number in STOPS:
        signal.signal(number, _end)


def _end(_number: int, _frame: FrameType | None) -> None:
    for number in STOPS:
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


@contextmanager
def undisturbed() -> Iterator[None]:
    """Delay requests to stop this process, or one that it starts in the block, until
    the end of the block.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
