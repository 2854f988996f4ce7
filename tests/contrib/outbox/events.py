"""Events as publishers get them, and how to send them to one."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from io import StringIO
from typing import Any
from uuid import UUID

from django.core.management import call_command
from django.db import transaction

from django_idempotency.contrib.outbox.models import OutboxEvent
from django_idempotency.contrib.outbox.publishing import new_event_id, publish
from django_idempotency.messages.publisher import Event, Outcome, Publisher

_positions = itertools.count(1)
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def event(topic: str, payload: bytes = b'{"amount": 1}', key: str = "", **changed: Any) -> Event:
    given = {"content_type": "application/json", "headers": {"traceparent": TRACE}} | changed
    return Event(next(_positions), new_event_id(), topic, key, payload, **given)


def sent(publisher: Publisher, *events: Event, timeout: float = 10) -> Sequence[Outcome]:
    """What comes of ``events``, in their order; what nothing is known of is left out."""
    publisher.connect()
    try:
        outcomes = list(publisher.send(events, timeout))
    finally:
        publisher.close()
    return sorted(outcomes, key=lambda outcome: outcome.event.position)


def publish_all(*events: str) -> list[UUID]:
    """Publish events in one transaction, each by its topic, with its key behind a slash. Return their ids."""
    with transaction.atomic():
        return [publish(topic, {}, key=key) for topic, _, key in (event.partition("/") for event in events)]


def none_left() -> bool:
    return not OutboxEvent.objects.exists()


def told(*arguments: str) -> str:
    """What a command says."""
    out = StringIO()
    call_command(*arguments, stdout=out)
    return out.getvalue().strip()
