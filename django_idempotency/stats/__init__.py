"""Figures about the records: their current state and size."""

from __future__ import annotations

from django_idempotency.stats.queries import Stats, Totals, stats, totals

__all__ = ["Stats", "Totals", "stats", "totals"]
