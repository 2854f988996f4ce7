"""How many callers of this process wait for each record, so that one key can't take up all of its threads."""

from __future__ import annotations

import os
import threading
from collections import Counter
from uuid import UUID


class Waiters:
    """Counts the callers that wait, by the id of their record."""

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._waiting: Counter[UUID] = Counter()

    def enter(self, id: UUID, most: float) -> bool:
        """Count one more caller. Return false, and don't count it, if ``most`` wait already."""
        with self._lock:
            if self._waiting[id] >= most:
                return False
            self._waiting[id] += 1
            return True

    def leave(self, id: UUID) -> None:
        """Count one caller less."""
        with self._lock:
            self._waiting[id] -= 1
            if not self._waiting[id]:
                del self._waiting[id]

    def __len__(self) -> int:
        return self._waiting.total()


waiters = Waiters()
os.register_at_fork(after_in_child=waiters._reset)
