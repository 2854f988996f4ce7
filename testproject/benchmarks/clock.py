"""A clock that can be set: a function that shadows PostgreSQL's own in all that this package sends."""

from __future__ import annotations

from typing import Any

CLOCK = """
CREATE SCHEMA IF NOT EXISTS simulated;
CREATE OR REPLACE FUNCTION simulated.statement_timestamp() RETURNS timestamptz STABLE LANGUAGE sql AS $$
    SELECT pg_catalog.statement_timestamp() + pg_catalog.current_setting('simulated.ahead')::interval
$$
"""


def install(cursor: Any) -> None:
    """Have the session use this clock until ``remove()``; ``put()`` sets it."""
    cursor.execute(CLOCK)
    put(cursor, minutes=0)
    cursor.execute("SET search_path = simulated, pg_catalog, public")


def put(cursor: Any, *, minutes: int) -> None:
    """Set the clock this many minutes ahead or, if negative, back."""
    cursor.execute("SELECT set_config('simulated.ahead', %s, false)", [f"{minutes} minutes"])


def remove(cursor: Any) -> None:
    cursor.execute("RESET search_path")
