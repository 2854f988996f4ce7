"""How the records stand, what happened to them of late, and where that leads."""

from __future__ import annotations

from django_idempotency.stats.queries import (
    Activity,
    Projection,
    Stats,
    Totals,
    activity,
    history,
    projection,
    stats,
    totals,
    views,
)

__all__ = ["Activity", "Projection", "Stats", "Totals", "activity", "history", "projection", "stats", "totals", "views"]
