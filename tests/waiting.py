"""Waiting for what another process or thread does, with a bound."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def eventually(probe: Callable[[], T], *, within: float = 10.0, every: float = 0.02) -> T:
    """The first true answer of ``probe``; ``TimeoutError`` when there is none within so many seconds."""
    deadline = time.monotonic() + within
    while not (answer := probe()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{probe!r} was still {answer!r} after {within} s")
        threading.Event().wait(every)
    return answer
