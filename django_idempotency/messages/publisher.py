"""The contract between the relay and a publisher."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from uuid import UUID


@dataclass(frozen=True, slots=True)
class Event:
    """An event as publishers see it. ``position`` is its place in the order of all
    events.
    """

    position: int
    id: UUID
    topic: str
    key: str
    payload: bytes
    content_type: str
    headers: Mapping[str, str]
    lane: int = 0
    attempts: int = 0


@dataclass(frozen=True, slots=True)
class Confirmed:
    """The receiver has taken charge of the event."""

    event: Event


@dataclass(frozen=True, slots=True)
class Refused:
    """The event was not taken, for a reason that lies with the event. ``permanent``: it
    never will be taken.
    """

    event: Event
    reason: str
    permanent: bool = False


@dataclass(frozen=True, slots=True)
class NotSent:
    """There was no time to send the event. This does not count as an attempt."""

    event: Event


@dataclass(frozen=True, slots=True)
class Postponed:
    """Others go first, because the receiver has its share: the event is tried again in
    ``delay`` seconds. This does not count as an attempt.
    """

    event: Event
    reason: str
    delay: float


Outcome = Confirmed | Refused | NotSent | Postponed


class PublisherUnavailable(Exception):
    """The broker can't be reached, or accepts no events at all. No single event is the
    cause.
    """


class ConnectionLost(Exception):
    """The connection broke while events were being sent, and one of them may be to
    blame.
    """


class Publisher(ABC):
    """Sends events. One object serves one relay, which calls it from one thread.

    To write your own, implement ``connect``, ``send`` and ``close``. The constructor
    gets the setting's ``OPTIONS`` as keyword arguments.
    """

    @abstractmethod
    def connect(self) -> None:
        """Open the connection if it isn't open. Raises ``PublisherUnavailable``."""

    @abstractmethod
    def send(self, events: Iterable[Event], timeout: float) -> Iterator[Outcome]:
        """Send ``events``, and yield an outcome for each as it becomes known.

        Iterating over ``events`` takes those that may be sent now, in any order. When
        ``Confirmed`` is yielded, the next event of that key may become one of them, so
        iterate again after each outcome, until there is nothing left to send or to wait
        for. What is not taken is sent later.

        Yield ``Confirmed`` only when the event is safe with the receiver. Return
        ``timeout`` seconds after the last event was taken at the latest, without an
        outcome for events of which nothing is known. They are sent again. If an event
        that was taken later is confirmed, this counts as an attempt.

        Raises ``ConnectionLost`` or ``PublisherUnavailable``. Outcomes that were
        yielded before remain valid. ``connect`` is called again before the next call.
        """

    @abstractmethod
    def close(self) -> None:
        """Close the connection. Raises nothing."""
