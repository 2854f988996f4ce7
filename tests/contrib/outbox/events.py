"""Events as publishers get them, how to send them to one, and many of them in the
table.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import closing
from io import StringIO
from typing import Any
from uuid import UUID

from django.core.management import call_command
from django.db import transaction

from django_idempotency.contrib.outbox.chains import Chains
from django_idempotency.contrib.outbox.models import OutboxEvent
from django_idempotency.contrib.outbox.publishing import new_event_id, publish
from django_idempotency.messages.publisher import (
    Confirmed,
    Event,
    Outcome,
    Publisher,
    PublisherUnavailable,
)
from tests.support.sql import run_sql
from tests.support.statements import buffers, explaining
from tests.support.waiting import eventually

_positions = itertools.count(1)
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def event(
    topic: str, payload: bytes = b'{"amount": 1}', key: str = "", **changed: Any
) -> Event:
    given = {
        "content_type": "application/json",
        "headers": {"traceparent": TRACE},
    } | changed
    return Event(next(_positions), new_event_id(), topic, key, payload, **given)


def sent(
    publisher: Publisher, *events: Event, timeout: float = 60
) -> Sequence[Outcome]:
    """What comes of ``events`` in one call, in their order; what nothing is known of
    is left out.
    """
    return sorted(
        outcomes_of(publisher, *events, timeout=timeout),
        key=lambda outcome: outcome.event.position,
    )


def outcomes_of(
    publisher: Publisher, *events: Event, timeout: float = 60
) -> Iterator[Outcome]:
    """What comes of ``events`` in one call, as it becomes known."""
    chains = Chains(events, (), lambda: True)
    eventually(lambda: _is_connected(publisher))
    try:
        with closing(publisher.send(chains, timeout)) as outcomes:
            for outcome in outcomes:
                if isinstance(outcome, Confirmed):
                    chains.confirm(outcome.event)
                yield outcome
    finally:
        publisher.close()


def _is_connected(publisher: Publisher) -> bool:
    """Not yet if the broker of a busy machine took longer than the publisher waits."""
    try:
        publisher.connect()
    except PublisherUnavailable:
        return False
    return True


def publish_all(*events: str) -> list[UUID]:
    """Publish events in one transaction, each by its topic, with its key behind a
    slash. Return their ids.
    """
    with transaction.atomic():
        return [
            publish(topic, {}, key=key)
            for topic, _, key in (event.partition("/") for event in events)
        ]


def none_left() -> bool:
    return not OutboxEvent.objects.exists()


def told(*arguments: str) -> str:
    """What a command says."""
    out = StringIO()
    call_command(*arguments, stdout=out)
    return out.getvalue().strip()


WAITING = f"""
INSERT INTO {OutboxEvent._meta.db_table} (event_id, publisher, lane, topic, key,
    payload, content_type, headers, status,
    attempts, error, created_at, available_at)
SELECT gen_random_uuid(), 'default', i %% 64, 'bad', 'bad-' || i, '', 'text/plain',
    '{{}}', 'pending', %s, 'no',
    statement_timestamp(), statement_timestamp() + interval %s
FROM generate_series(1, %s) AS i
"""


def waiting(count, interval, attempts=3):
    """Pending events after so many failed attempts, the next one of which is after
    ``interval``.
    """
    run_sql(WAITING, [attempts, interval, count])


def buffers_of(work):
    """How many buffers are read by what ``work`` selects from the table of events, at
    the least: a session that has just heard of an ANALYZE reads the catalogue, too.
    """
    counts = []
    for _time in range(3):
        with explaining(OutboxEvent._meta.db_table, only=("SELECT", "WITH")) as plans:
            work()
        counts.append(sum(map(buffers, plans)))
    return min(counts)
