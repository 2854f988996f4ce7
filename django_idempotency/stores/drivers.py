"""How PostgreSQL is given the statements of every request, by whichever driver there is."""

from __future__ import annotations

try:
    from django_idempotency.stores.prepared import execute, learn
except ImportError:  # psycopg 3, which Django prefers to psycopg2, is not installed
    from django_idempotency.stores.cursors import execute, learn

__all__ = ["execute", "learn"]
