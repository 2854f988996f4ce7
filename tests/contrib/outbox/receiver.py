"""Receivers in place of a broker: one in this process that is told what to refuse, one
that writes to a file.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from django_idempotency.messages.publisher import (
    Confirmed,
    ConnectionLost,
    Event,
    Outcome,
    Publisher,
    PublisherUnavailable,
    Refused,
)
from tests.support.waiting import eventually


class Receiver(Publisher):
    """Keeps what it confirmed. ``refuses``, ``silent`` and ``deadly`` say of an event
    what comes of it instead.
    """

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.calls: list[list[Event]] = []
        self.is_up = True
        self.refuses: Callable[[Event], str | None] = lambda event: None
        self.silent: Callable[[Event], bool] = lambda event: False
        self.deadly: Callable[[Event], bool] = lambda event: False
        self.during: Callable[[Event], None] = lambda event: None
        self.permanent = False

    @property
    def topics(self) -> list[str]:
        return [event.topic for event in self.events]

    def connect(self) -> None:
        if not self.is_up:
            raise PublisherUnavailable("it is down")

    def send(self, events: Iterable[Event], timeout: float) -> Iterator[Outcome]:
        call: list[Event] = []
        self.calls.append(call)
        while free := list(events):
            call += free
            if any(map(self.deadly, free)):
                raise ConnectionLost("it hung up")
            for event in free:
                yield from self._receive(event)

    def _receive(self, event: Event) -> Iterator[Outcome]:
        self.during(event)
        if reason := self.refuses(event):
            yield Refused(event, reason, self.permanent)
        elif not self.silent(event):
            self.events.append(event)
            yield Confirmed(event)

    def close(self) -> None:
        pass


class FileReceiver(Publisher):
    """Appends a line for each event to a file that processes share; ``gate``: waits
    while that file is there.
    """

    def __init__(self, path: str, gate: str = "", gate_after: int = 0) -> None:
        self.path = path
        self.gate = Path(gate) if gate else None
        self.gate_after = gate_after
        self.sent = 0

    def connect(self) -> None:
        pass

    def send(self, events: Iterable[Event], timeout: float) -> Iterator[Outcome]:
        for event in events:
            self._wait()
            with suppress(FileExistsError):
                line = f"{os.getpid()} {event.key} {event.topic} {event.id}\n".encode()
                with Path(self.path).open("ab", buffering=0) as file:
                    file.write(line)
            self.sent += 1
            yield Confirmed(event)

    def _wait(self) -> None:
        if (gate := self.gate) and self.sent >= self.gate_after:
            eventually(lambda: not gate.exists(), within=300, every=0.01)

    def close(self) -> None:
        pass
