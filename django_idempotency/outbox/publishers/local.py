"""A function in this process as the receiver: no broker stands between."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from django.utils.module_loading import import_string

from django_idempotency.consumers import Consumer, Context, Message, Reject, RetryLater
from django_idempotency.outbox.publishers.base import Confirmed, Event, NotSent, Outcome, Publisher, Refused


class LocalPublisher(Publisher):
    """Calls ``handler(event)`` for each event, which is confirmed when it returns.

    ``handler``: a callable or its dotted path. With ``consume`` inside it, inbox and outbox meet: whatever the handler
    writes happens once. Any exception is a refusal.
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
            self.handler(event)
        except Exception as error:  # the handler's own: one event's fault, not the relay's
            return Refused(event, f"{type(error).__name__}: {error}")
        return Confirmed(event)

    def close(self) -> None:
        pass


class InboxPublisher(LocalPublisher):
    """Hands each event to the inbox: the handler's effects happen once, however often the event is sent.

    ``handler(message, context)`` is a handler of the inbox, or its dotted path; ``consumer``: the inbox's name for it.
    The topic is the message's source, the event's id its id. What the handler rejects is given up; what it is to be
    asked again for is tried again. Further options are those of ``Consumer``.
    """

    def __init__(self, handler: Callable[[Message, Context], Any] | str, consumer: str = "default", **options: Any):
        made = import_string(handler) if isinstance(handler, str) else handler
        self.consumer = Consumer(consumer, made, **options)

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
