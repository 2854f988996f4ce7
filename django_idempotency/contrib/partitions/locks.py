"""Locks while the table is changed: they are short, and are tried again."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from django.db import DatabaseError, connections, transaction

from django_idempotency.extending.stores import is_conflict

T = TypeVar("T")

# the longest that other sessions queue behind a lock that this one waits for
LOCK_TIMEOUT = "100ms"
# for a lock that is not to be had, and the seconds between two attempts
ATTEMPTS, PAUSE = 20, 0.25

# The role's own limits are lifted: reading the table once takes as long as it takes.
NO_TIMEOUTS = """
SELECT set_config(name, '0', true) FROM pg_settings WHERE name IN ('statement_timeout',
    'transaction_timeout')
"""
# PostgreSQL cancels an autovacuum for a session that has waited for it for the
# deadlock_timeout.
LONGER_THAN_DEADLOCK_TIMEOUT = """
SELECT set_config('lock_timeout', (setting::int + 1000)::text, true) FROM pg_settings
    WHERE name = 'deadlock_timeout'
"""


@contextmanager
def short_transaction(alias: str, *, lock_timeout: str) -> Iterator[Any]:
    """Yield a cursor in a transaction of its own, which gives up if it waits longer
    than ``lock_timeout`` for a lock.

    A statement that has its locks may take as long as it needs.
    """
    with (
        transaction.atomic(using=alias, durable=True),
        connections[alias].cursor() as cursor,
    ):
        cursor.execute("SET TRANSACTION ISOLATION LEVEL READ COMMITTED")
        cursor.execute(NO_TIMEOUTS)
        cursor.execute(f"SET LOCAL lock_timeout = '{lock_timeout}'")
        yield cursor


def keep_autovacuum_away(cursor: Any, table: str) -> None:
    """Make a running autovacuum of ``table`` yield, and let no other begin before the
    transaction ends.

    An autovacuum would never yield to a lock that is requested for ``LOCK_TIMEOUT``
    only. The lock that is waited for here conflicts with none of a claim's, so no claim
    queues behind it.
    """
    cursor.execute(LONGER_THAN_DEADLOCK_TIMEOUT)
    cursor.execute(f"LOCK TABLE {table} IN SHARE UPDATE EXCLUSIVE MODE")
    cursor.execute(f"SET LOCAL lock_timeout = '{LOCK_TIMEOUT}'")


def patiently(work: Callable[[], T], *, attempts: int = ATTEMPTS) -> T:
    """Run ``work``. If a lock is not to be had, run it again after a pause, up to
    ``attempts`` times in all.
    """
    for _attempt in range(attempts - 1):
        try:
            return work()
        except DatabaseError as error:
            if not is_conflict(error):
                raise
        time.sleep(PAUSE)
    return work()
