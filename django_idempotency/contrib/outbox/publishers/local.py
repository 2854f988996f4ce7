"""A function in this process is the receiver, without a broker."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.utils.module_loading import import_string

from django_idempotency.contrib.outbox.publishers import OneByOne
from django_idempotency.messages import Consumer, Context, Message, Reject, RetryLater
from django_idempotency.messages.publisher import Event, Refused
from django_idempotency.messages.results import final
from django_idempotency.values.outcomes import Release


class LocalPublisher(OneByOne):
    """Calls ``handler(event)`` for each event, and confirms the event when the call returns.

    ``handler``: a callable or its dotted path. If it calls ``consume``, inbox and outbox work together, and what the
    handler writes happens once. On any exception, the event is refused.
    """

    def __init__(self, handler: Callable[[Event], Any] | str) -> None:
        self.handler: Callable[[Event], Any] = import_string(handler) if isinstance(handler, str) else handler

    def hand_over(self, event: Event) -> None:
        final(self.handler(event))


class _Inbox(Consumer):
    """Releases a message whose attempts are used up. Its event is redelivered only if an operator requeues it."""

    def verdict_when_exhausted(self) -> Release:
        return Release(rollback=True)


class InboxPublisher(OneByOne):
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

    def hand_over(self, event: Event) -> Refused | None:
        match self.consumer.consume(Message(event.topic, str(event.id), event.payload, event.headers)):
            case RetryLater(reason=reason):
                return Refused(event, reason)
            case Reject(reason=reason):
                return Refused(event, reason, permanent=True)
        return None
