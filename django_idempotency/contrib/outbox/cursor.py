"""Where to read each lane from, so that events are not read over again and none that
commits late is missed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping

from django_idempotency.extending.brokers import Event

OVERLAP = 2.0  # seconds; a transaction that takes no longer is never late
SWEEP_EVERY = 1.0
SWEEP_SHARE = 0.05  # of the time, at most


class Cursor:
    """Where reading begins in each lane. Times are from a clock that never goes back.

    Ids are handed out before transactions commit, so an event may appear below one that
    was read already. Reading therefore begins at the point that it had reached some
    seconds ago. From time to time, a sweep reads from the beginning, for events whose
    transaction took even longer. A lane in which an event was left behind is also read
    from the beginning.

    A sweep steps over all rows that were deleted and can't be vacuumed yet. It
    therefore takes only a share of the time.
    """

    def __init__(self) -> None:
        # by lane: when reading had reached which id
        self._marks: dict[int, deque[tuple[float, int]]] = {}
        self._held_back: dict[int, int] = {}
        self._sweeps = False
        self._next_sweep = 0.0

    def after(
        self, lanes: Collection[int], held_back: Mapping[int, int], now: float
    ) -> dict[int, int]:
        """Return the id after which to read each of ``lanes``.

        ``held_back``: by lane, the id of the first failed event that holds back others,
        which are all behind it. Once it is gone, by whatever means, the lane is read
        from its beginning, before a later event of the key could pass those held back.
        """
        for lane in self._marks.keys() - set(lanes):
            del self._marks[lane]
        for lane, first in self._held_back.items():
            if held_back.get(lane) != first:
                self._marks.pop(lane, None)
        self._held_back = dict(held_back)
        self._sweeps = now >= self._next_sweep
        return {
            lane: 0 if self._sweeps else self._beginning(lane, now) for lane in lanes
        }

    def has_read(self, events: Iterable[Event], took: float, now: float) -> None:
        """Note how far each lane was read, and that it took ``took`` seconds. After a
        late event, there may be more.
        """
        for event in events:
            marks = self._marks.setdefault(event.lane, deque())
            if marks and event.position <= marks[0][1]:  # it is late
                marks.clear()
            if not marks or event.position > marks[-1][1]:
                marks.append((now, event.position))
        if self._sweeps:
            self._next_sweep = now + max(SWEEP_EVERY, took / SWEEP_SHARE)
            self._sweeps = False

    def leave_behind(self, events: Iterable[Event]) -> None:
        """Read the lanes of ``events`` from the beginning: these events were read, but
        are not published.
        """
        for event in events:
            self._marks.pop(event.lane, None)

    def _beginning(self, lane: int, now: float) -> int:
        marks = self._marks.get(lane)
        if not marks or marks[0][0] > now - OVERLAP:
            return 0
        while len(marks) > 1 and marks[1][0] <= now - OVERLAP:
            marks.popleft()
        reached = marks[0][1]
        return min(reached, self._held_back.get(lane, reached + 1) - 1)
