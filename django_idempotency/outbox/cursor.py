"""From where each lane is read, so that what was read is not read over again, and what commits late is not missed."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable

from django_idempotency.outbox.publishers.base import Event

OVERLAP = 2.0  # seconds; transactions that take no longer are never late
SWEEP_EVERY = 1.0
SWEEP_SHARE = 0.05  # of the time, at most

Mark = tuple[float, int]


class Cursor:
    """Where reading begins in each lane. Times are of a clock that never goes back.

    Ids are handed out before transactions commit, so an event may appear below one that was read already. Reading
    begins where it had come to some seconds ago; and every now and then a sweep begins at the beginning, for those
    whose transaction took longer still. The beginning is also where a lane is read that something was left behind in.
    """

    def __init__(self) -> None:
        self._marks: dict[int, deque[Mark]] = {}
        self._held_back: set[int] = set()
        self._next_sweep = 0.0
        self.sweeps = False

    def after(self, lanes: Collection[int], held_back: Collection[int], now: float) -> dict[int, int]:
        """The id after which to read each of ``lanes``.

        ``held_back``: the lanes in which a failed event holds back others. Once it is gone, by whatever
        means, the lane is read from its beginning once more, before a later event of the key could pass those.
        """
        for lane in self._marks.keys() - set(lanes):
            del self._marks[lane]
        self.sweeps = now >= self._next_sweep
        for lane in self._held_back.union(held_back):
            self._marks.pop(lane, None)
        self._held_back = set(held_back)
        return {lane: 0 if self.sweeps else self._floor(lane, now) for lane in lanes}

    def has_read(self, events: Iterable[Event], now: float) -> None:
        """Note how far each lane was read. Where an event was late, there may be more: its lane begins anew."""
        events = list(events)
        self.leave_behind(event for event in events if self._is_late(event))
        for event in events:
            marks = self._marks.setdefault(event.lane, deque())
            if not marks or event.position > marks[-1][1]:
                marks.append((now, event.position))

    def has_swept(self, took: float, now: float) -> None:
        """Plan the next sweep by the seconds that one took."""
        self._next_sweep = now + max(SWEEP_EVERY, took / SWEEP_SHARE)

    def leave_behind(self, events: Iterable[Event]) -> None:
        """Read the lanes of ``events`` from the beginning: these were read, and are not out."""
        for event in events:
            self._marks.pop(event.lane, None)

    def _is_late(self, event: Event) -> bool:
        marks = self._marks.get(event.lane)
        return marks is not None and event.position <= marks[0][1]

    def _floor(self, lane: int, now: float) -> int:
        marks = self._marks.get(lane)
        if not marks:
            return 0
        while len(marks) > 1 and marks[1][0] <= now - OVERLAP:
            marks.popleft()
        return marks[0][1] if marks[0][0] <= now - OVERLAP else 0
