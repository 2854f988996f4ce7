"""Order by key: an event is sent once the previous one of its key is confirmed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from django_idempotency.extending.brokers import Event


class Chains:
    """The events of a batch that may be sent now. Iterating takes them.

    ``confirm`` frees the next event of a key, for the iteration that is under way or
    for a later one. ``suspects``: positions of events that are sent alone.
    ``may_go_on`` is called before an event is taken; once it is false, none is.
    """

    def __init__(
        self,
        events: Sequence[Event],
        suspects: Collection[int],
        may_go_on: Callable[[], bool],
    ) -> None:
        self.taken: list[Event] = []  # in the present pass
        self._suspects = suspects
        self._may_go_on = may_go_on
        self._free, self._suspected = deque[Event](), deque[Event]()
        self._behind: dict[str, deque[Event]] = {}
        for event in events:
            if event.key in self._behind:
                self._behind[event.key].append(event)
            else:
                self._set_free(event)
                if event.key:
                    self._behind[event.key] = deque()

    def passes(self) -> Iterator[Iterable[Event]]:
        """Yield what to send together, or one suspect, until there is nothing left, or
        nothing was taken.
        """
        while (self._free or self._suspected) and self._may_go_on():
            self.taken = []
            yield self if self._free else self._take(self._suspected)
            if not self.taken:
                return

    def __iter__(self) -> Iterator[Event]:
        while self._free and self._may_go_on():
            yield from self._take(self._free)

    def _take(self, events: deque[Event]) -> Iterator[Event]:
        event = events.popleft()
        self.taken.append(event)
        return iter([event])

    def confirm(self, event: Event) -> None:
        """Free the next event of the key."""
        if behind := self._behind.get(event.key):
            self._set_free(behind.popleft())

    def suspect(self, event: Event) -> None:
        """Have ``event``, which was taken, sent once more, alone."""
        self._suspected.append(event)

    def _set_free(self, event: Event) -> None:
        is_suspect = event.position in self._suspects
        (self._suspected if is_suspect else self._free).append(event)
