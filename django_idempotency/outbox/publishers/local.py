"""A function in this process is the receiver, without a broker."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from django.utils.module_loading import import_string

from django_idempotency.consumers import Consumer, Context, Message, Reject, RetryLater
from django_idempotency.consumers.results import final
from django_idempotency.outbox.publishers.base import Confirmed, Event, NotSent, Outcome, Publisher, Refused
from django_idempotency.outcomes import Release


class LocalPublisher(Publisher):
    """Calls ``handler(event)`` for each event, and confirms the event when the call returns.

    ``handler``: a callable or its dotted path. If it calls ``consume``, inbox and outbox work together, and what the
    handler writes happens once. On any exception, the event is refused.
    """

    def __init__(self, handler: Callable[[Event], Any] | str) -> None:
        self.handler: Callable[[Event], Any] = import_string(handler) if isinstance(handler, str) else handler

    def connect(self) -> None:
        pass

    def send(self, events: Sequence[Event], timeout: float) -> Iterator[Outcome]:
        deadline = time.monotonic() + timeout
        for number, event in enumerate(events):
            if number and time.monotonic() > deadline:
                yield NotSent(event)
            else:
                yield self._handled(event)

    def _handled(self, event: Event) -> Outcome:
        try:
            final(self.handler(event))
        except Exception as error:  # the handler's own: one event's fault, not the relay's
            return Refused(event, f"{type(error).__name__}: {error}")
        return Confirmed(event)

    def close(self) -> None:
        pass


@dataclass(frozen=True, eq=False)
class _Inbox(Consumer):
    """Forgets a message whose attempts are used up. Its event comes again only if somebody requeues it."""

    def verdict_when_exhausted(self) -> Release:
        return Release(rollback=True)


class InboxPublisher(LocalPublisher):
    """Hands each event to the inbox: the handler's effects happen once, however often the event is sent.

    ``handler``: called with the message and its context, as a ``Consumer``'s is; or its dotted path.
    ``consumer``: the consumer's name. Further options are those of ``Consumer``.

    The message's source is the topic, and its id is the event's id. An event that the handler rejects is given up, as
    is one whose attempts are used up, which are counted anew if it is requeued. If the outcome is ``RetryLater``, the
    event is tried again.
    """

    def __init__(self, handler: Callable[[Message, Context], Any] | str, consumer: str = "default", **options: Any):
        made = import_string(handler) if isinstance(handler, str) else handler
        self.consumer = _Inbox(consumer, made, **options)

    def _handled(self, event: Event) -> Outcome:
        try:
            delivery = self.consumer.consume(Message(event.topic, str(event.id), event.payload, event.headers))
        except Exception as error:  # the handler's own: one event's fault, not the relay's
            return Refused(event, f"{type(error).__name__}: {error}")
        match delivery:
            case RetryLater(reason=reason):
                return Refused(event, reason)
            case Reject(reason=reason):
                return Refused(event, reason, permanent=True)
        return Confirmed(event)
