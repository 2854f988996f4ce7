"""A table that nobody else can read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from django.db import connection

from tests.support.threads import OtherThread

LOCKS = {
    "postgresql": ("BEGIN; LOCK TABLE {} IN ACCESS EXCLUSIVE MODE", "ROLLBACK"),
    "mysql": ("LOCK TABLES {} WRITE", "UNLOCK TABLES"),
}


@contextmanager
def locked(table: str) -> Iterator[None]:
    """Lock it from a thread with a connection of its own."""
    lock, unlock = LOCKS[connection.vendor]
    elsewhere = OtherThread()
    elsewhere(_run, lock.format(table))
    try:
        yield
    finally:
        elsewhere(_run, unlock)
        elsewhere.close()


def _run(statement: str) -> None:
    with connection.cursor() as cursor:
        cursor.execute(statement)
