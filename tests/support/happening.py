"""Counters of events that did not happen: a past for the statistics and the dashboard
to show.
"""

from __future__ import annotations

from django.db import connection

from django_idempotency.contrib.dashboard.models import IdempotencyCounter
from django_idempotency.reporting.events import EVENTS
from django_idempotency.stores.database import ahead

COUNTED_AS = {
    event.reason or event.name.partition("_")[2]: event.counted_as for event in EVENTS
}


def happen(view: str, *, hours: float = 0, **events: int) -> None:
    """So many of each event at ``view``, so many hours ago: ``happen("shop.views.pay",
    claimed=2)``.
    """
    since = ahead(-3600 * hours)
    IdempotencyCounter.objects.bulk_create(  # at one time
        IdempotencyCounter(since=since, view=view, event=COUNTED_AS[name], count=count)
        for name, count in events.items()
    )


# Requests in five minutes, by day and by night, and what else comes of a thousand of
# them.
WEEK = """
INSERT INTO django_idempotency_counter (since, view, event, count)
SELECT now() - slot * interval '5 minutes', view, event,
    greatest(rare, requests * of_thousand * (CASE WHEN slot BETWEEN 40
        AND 51 THEN storm ELSE 1 END) / 1000)
FROM generate_series(0, 2015) AS slot
CROSS JOIN LATERAL (SELECT hashtext(slot::text) & 65535 AS chance) AS chances
CROSS JOIN (
    VALUES ('shop.api.ChargeViewSet', 900), ('shop.api.TransferViewSet', 400),
        ('shop.views.order', 150),
        ('shop.api.PayoutViewSet', 60)
) AS views (view, load)
CROSS JOIN LATERAL (
    SELECT (
        load * (1.2 + sin(slot / 288.0 * 2 * pi())) * (0.9 + chance % 7 / 30.0)
    )::int AS requests
) AS loads
CROSS JOIN LATERAL (
    VALUES ('key_claimed', 1000, 1, 0), ('key_completed', 987, 1, 0), ('key_released',
        13, 1, 0),
        ('response_replayed', 3 + chance % 3, 6, 0), ('request_rejected.in_flight',
            chance % 2, 14, 0),
        ('request_rejected.key_reused', 0, 1, CASE WHEN chance % 67 = load % 67 THEN 1
            ELSE 0 END),
        ('key_taken_over', 0, 1, CASE WHEN slot BETWEEN 42 AND 44 THEN 2
            WHEN chance % 131 = load % 131 THEN 1 ELSE 0
            END)
) AS events (event, of_thousand, storm, rare)
"""


def a_week() -> None:
    """A week with its days and nights, and a storm of retries in its last hours; on
    PostgreSQL.
    """
    with connection.cursor() as cursor:
        cursor.execute(WEEK)
