"""A record table of millions of rows on a server of our own, and the passing of its days."""

from __future__ import annotations

from typing import Any

import psycopg

from testproject.benchmarks import growth
from testproject.benchmarks.growth import TABLE

STUCK = 5000
SCOPES = 100
SCOPE = "auth.user:1000"  # of one row in a hundred
# What a record has whose owner died.
OF_STUCK = {
    "status": "'processing'",
    "token": "gen_random_uuid()",
    "locked_at": "now() - interval '1 hour'",
    "locked_until": "now() - interval '30 minutes'",
    "created_at": "now() - interval '1 hour'",
    "response_status": "NULL",
    "response_headers": "NULL",
    "response_body": "NULL",
}
# One day, three days ago; each row was kept for a day, so all of them are due.
LONG_AGO = "date_trunc('day', now()) - interval '3 days' + i %% 86400 * interval '1 second'"
OF_ENDED = {
    "scope": f"'auth.user:' || 1000 + i %% {SCOPES}",
    "created_at": LONG_AGO,
    "updated_at": LONG_AGO,
    "expires_at": f"{LONG_AGO} + interval '1 day'",
    "purge_at": f"{LONG_AGO} + interval '1 day'",
}


def fill(connection: psycopg.Connection[Any], rows: int) -> None:
    """Copies of the one record that is there, each under a key of its own; and some of it before it had ended."""
    (of_one,) = connection.execute(f"SELECT id FROM {TABLE}").fetchone() or (None,)
    with connection.cursor() as cursor, growth.refilling(cursor):
        for times, different in ((STUCK, OF_STUCK), (rows, OF_ENDED)):
            growth.copy(cursor, of_one, times, key="gen_random_uuid()::text", **different)


def let_two_days_pass(connection: psycopg.Connection[Any]) -> None:
    """What was partitioned just now is what it would be in two days: the past is over, and today has its partition."""
    today = "date_trunc('day', now())"
    with connection.transaction():
        connection.execute("SET LOCAL TimeZone = 'UTC'")
        (begins, ends) = connection.execute(
            f"SELECT {today}, substring(pg_get_expr(relpartbound, oid) from 'TO \\(''(.*)''\\)')"
            f" FROM pg_class WHERE oid = '{TABLE}_p0'::regclass"
        ).fetchone() or ("", "")
        for statement in (
            f"ALTER TABLE {TABLE} DETACH PARTITION {TABLE}_p0",
            f"CREATE TABLE {TABLE}_today (LIKE {TABLE}_p0 INCLUDING ALL)",
            f"WITH moved AS (DELETE FROM {TABLE}_p0 WHERE created_at >= {today} RETURNING *)"
            f" INSERT INTO {TABLE}_today SELECT * FROM moved",
            f"ALTER TABLE {TABLE} ATTACH PARTITION {TABLE}_p0 FOR VALUES FROM (MINVALUE) TO ('{begins}')",
            f"ALTER TABLE {TABLE} ATTACH PARTITION {TABLE}_today FOR VALUES FROM ('{begins}') TO ('{ends}')",
        ):
            connection.execute(statement)
