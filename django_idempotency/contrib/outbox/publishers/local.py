"""A function in this process is the receiver, without a broker."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from django.utils.module_loading import import_string

from django_idempotency.extending.brokers import (
    Confirmed,
    Event,
    Outcome,
    Publisher,
    PublisherUnavailable,
    Refused,
    final,
)
from django_idempotency.messages import Reject, RetryLater


class LocalPublisher(Publisher):
    """Calls ``handler(event)`` for one event after the other, and confirms the event
    when the call returns.

    ``handler``: a callable or its dotted path. On an exception, the event is refused;
    ``PublisherUnavailable`` means that no event is at fault. If the handler returns
    what ``consume()`` returned, inbox and outbox work together: what it writes happens
    once, after a ``RetryLater`` the event is tried again, and after a ``Reject`` it is
    given up.
    """

    def __init__(self, handler: Callable[[Event], Any] | str) -> None:
        self.handler: Callable[[Event], Any] = (
            import_string(handler) if isinstance(handler, str) else handler
        )

    def connect(self) -> None:
        """Open nothing: the handler does."""

    def send(self, events: Iterable[Event], timeout: float) -> Iterator[Outcome]:
        deadline = time.monotonic() + timeout
        for event in events:
            yield self._outcome(event)
            if time.monotonic() > deadline:
                return

    def _outcome(self, event: Event) -> Outcome:
        try:
            result = final(self.handler(event))
        except PublisherUnavailable:
            raise
        except Exception as error:  # the project's own
            return Refused(event, f"{type(error).__name__}: {error}")
        match result:
            case RetryLater(reason=reason):
                return Refused(event, reason)
            case Reject(reason=reason):
                return Refused(event, reason, permanent=True)
        return Confirmed(event)

    def close(self) -> None:
        """Close nothing."""
