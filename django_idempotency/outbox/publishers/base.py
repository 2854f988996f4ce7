"""The contract between the relay and a publisher."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID


@dataclass(frozen=True, slots=True)
class Event:
    """An event as publishers see it. ``position`` is its place in the order of all events."""

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
    """The event was not taken, for a reason that lies with it. ``permanent``: it never will be."""

    event: Event
    reason: str
    permanent: bool = False


@dataclass(frozen=True, slots=True)
class NotSent:
    """There was no time for the event; this does not count as an attempt."""

    event: Event


Outcome = Confirmed | Refused | NotSent


class PublisherUnavailable(Exception):
    """The broker can't be reached, or accepts no event at all. No single event is the cause."""


class ConnectionLost(Exception):
    """The connection broke while events were being sent, and one of them may be to blame for it."""


class Publisher(ABC):
    """Sends events. One object serves one relay, which calls it from one thread.

    To write one, implement ``connect``, ``send`` and ``close``; the constructor gets the ``OPTIONS`` of the setting.
    """

    @abstractmethod
    def connect(self) -> None:
        """Open the connection if it isn't open. Raises ``PublisherUnavailable``."""

    @abstractmethod
    def send(self, events: Sequence[Event], timeout: float) -> Iterator[Outcome]:
        """Send ``events``, of which no two have the same key, and yield an outcome for each as it becomes known.

        Yield ``Confirmed`` only when the event is safe with the receiver. Return after ``timeout`` seconds at the
        latest, without an outcome for the events that nothing is known of: they are sent again, and where others were
        confirmed, that counts as an attempt.

        Raises ``ConnectionLost``, or ``PublisherUnavailable``; what was yielded before stands. It is connected again
        before the next call.
        """

    @abstractmethod
    def close(self) -> None:
        """Close the connection. Raises nothing."""


def task_arguments(event: Event) -> tuple[list[Any], dict[str, Any]]:
    """Return a task's arguments by position and by name: the payload is a list of them, or an object.

    Raises ``ValueError`` if it is neither.
    """
    payload = json.loads(event.payload)
    if isinstance(payload, list):
        return payload, {}
    if isinstance(payload, dict):
        return [], payload
    raise ValueError(f"A task's arguments are a list or an object, and not {payload!r:.100}.")
