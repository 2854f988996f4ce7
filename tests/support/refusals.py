"""A PostgreSQL whose records can be read, but not updated."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from django.db import connection

REFUSE = """
CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN RAISE read_only_sql_transaction USING MESSAGE = 'no updates here'; END $$;
CREATE TRIGGER refuse BEFORE UPDATE ON django_idempotency_record EXECUTE FUNCTION refuse()
"""


@contextmanager
def updates_refused() -> Iterator[None]:
    with connection.cursor() as cursor:
        cursor.execute(REFUSE)
        try:
            yield
        finally:
            cursor.execute("DROP FUNCTION IF EXISTS refuse CASCADE")
