"""Tallies of what did not happen: a past for the statistics and the dashboard to show."""

from __future__ import annotations

from django_idempotency.models import IdempotencyTally
from django_idempotency.stores.database import ahead


def happen(view: str, *, hours: float = 0, **events: int) -> None:
    """So many of each event at ``view``, so many hours ago: ``happen("shop.views.pay", claimed=2)``."""
    for event, count in events.items():
        IdempotencyTally.objects.create(since=ahead(-3600 * hours), view=view, event=event, count=count)
