"""Many rows of the outbox, and what it costs to read them."""

from __future__ import annotations

from django.db import connection

from django_idempotency.contrib.outbox.models import OutboxEvent
from tests.support.statements import buffers, explaining

WAITING = f"""
INSERT INTO {OutboxEvent._meta.db_table} (event_id, publisher, lane, topic, key, payload, content_type, headers, status,
    attempts, error, created_at, available_at)
SELECT gen_random_uuid(), 'default', i %% 64, 'bad', 'bad-' || i, '', 'text/plain', '{{}}', 'pending', %s, 'no',
    statement_timestamp(), statement_timestamp() + interval %s
FROM generate_series(1, %s) AS i
"""


def waiting(count, interval, attempts=3):
    """Pending events after so many failed attempts, the next one of which is after ``interval``."""
    with connection.cursor() as cursor:
        cursor.execute(WAITING, [attempts, interval, count])


def buffers_of(work):
    """How many buffers are read by what ``work`` selects from the table of events."""
    with explaining(OutboxEvent._meta.db_table, only=("SELECT", "WITH")) as plans:
        work()
    return sum(map(buffers, plans))
