"""Publishers, one module for each kind of receiver. A receiver's client is imported only if its module is used."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Iterator, Sequence

from django_idempotency.messages.publisher import Confirmed, ConnectionLost, Event, NotSent, Outcome, Publisher, Refused


class OneByOne(Publisher):
    """Hands over one event after the other. An error is the fault of its event, unless the connection was lost."""

    def connect(self) -> None:
        """Open nothing: only some receivers need a connection."""

    def send(self, events: Sequence[Event], timeout: float) -> Iterator[Outcome]:
        deadline = time.monotonic() + timeout
        for number, event in enumerate(events):
            yield NotSent(event) if number and time.monotonic() > deadline else self._outcome(event)

    def _outcome(self, event: Event) -> Outcome:
        try:
            return self.hand_over(event) or Confirmed(event)
        except ConnectionLost:
            raise
        except Exception as error:  # from the project's handler, routes or backend
            return Refused(event, f"{type(error).__name__}: {error}")

    @abstractmethod
    def hand_over(self, event: Event) -> Refused | None:
        """Return once the receiver has taken charge of ``event``, or why it has not."""

    def close(self) -> None:
        """Close nothing."""
