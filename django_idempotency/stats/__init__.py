"""Figures about the records: their current state, recent activity and a projection."""

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
