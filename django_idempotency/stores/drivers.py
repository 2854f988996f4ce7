"""Send the statements of every request to PostgreSQL, by whichever driver is installed."""

from __future__ import annotations

try:
    from django_idempotency.stores.pipeline import execute, learn, together
except ImportError:  # psycopg 3, which Django prefers to psycopg2, is not installed
    from django_idempotency.stores.cursors import execute, learn, together

__all__ = ["execute", "learn", "together"]
