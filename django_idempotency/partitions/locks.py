"""Locks while the table is changed: short, begun again, and noticed when their process dies."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from django.db import DatabaseError, connections, transaction

from django_idempotency.partitions.layout import TABLE
from django_idempotency.stores.claim_function import TABLE_LOCKS
from django_idempotency.stores.errors import UNTIL, is_conflict

T = TypeVar("T")

LOCK_TIMEOUT = "100ms"  # the longest that other sessions queue behind a lock that this one waits for
ATTEMPTS, PAUSE = 20, 0.25  # for a lock that is not to be had, with so many seconds between

# Whatever the role's own limits are: reading the table once takes as long as it takes.
NO_TIMEOUTS = """
SELECT set_config(name, '0', true) FROM pg_settings WHERE name IN ('statement_timeout', 'transaction_timeout')
"""
# An autovacuum is cancelled for a session that has waited for it for the deadlock_timeout.
LONGER_THAN_DEADLOCK_TIMEOUT = """
SELECT set_config('lock_timeout', (setting::int + 1000)::text, true) FROM pg_settings WHERE name = 'deadlock_timeout'
"""


@contextmanager
def short_transaction(alias: str, *, lock_timeout: str) -> Iterator[Any]:
    """A cursor in a transaction of its own that gives up where it would have to wait for a lock for longer.

    A statement that has its locks may take as long as it needs.
    """
    with transaction.atomic(using=alias, durable=True), connections[alias].cursor() as cursor:
        cursor.execute("SET TRANSACTION ISOLATION LEVEL READ COMMITTED")
        cursor.execute(NO_TIMEOUTS)
        cursor.execute(f"SET LOCAL lock_timeout = '{lock_timeout}'")
        yield cursor


def keep_autovacuum_away(cursor: Any, table: str) -> None:
    """Have a running autovacuum of ``table`` yield, and no other begin before the transaction ends.

    It would never yield to a lock that is requested for ``LOCK_TIMEOUT`` only. The lock that is waited for here
    conflicts with none of a claim's, so no claim queues behind it.
    """
    cursor.execute(LONGER_THAN_DEADLOCK_TIMEOUT)
    cursor.execute(f"LOCK TABLE {table} IN SHARE UPDATE EXCLUSIVE MODE")
    cursor.execute(f"SET LOCAL lock_timeout = '{LOCK_TIMEOUT}'")


# What a session holds while it converts the table; shared, while it drops partitions.
AT_WORK = f"{TABLE_LOCKS}, hashtext('{TABLE} is being converted')"
# Where the platform has it: the server ends a statement soon after the process that sent it is gone.
NOTICE_DEATH = """
DO $$ BEGIN
    PERFORM set_config('client_connection_check_interval', '100ms', false);
EXCEPTION WHEN invalid_parameter_value THEN NULL;
END $$
"""


@contextmanager
def at_work(alias: str, *, alone: bool) -> Iterator[bool]:
    """True if this is the only conversion, or, not ``alone``, if there is none: no name comes to mean another table.

    Meanwhile the session has no ``statement_timeout``.
    """
    shared = "" if alone else "_shared"
    with connections[alias].cursor() as cursor:
        cursor.execute(f"SELECT pg_try_advisory_lock{shared}({AT_WORK}), current_setting('statement_timeout')")
        had, timeout = cursor.fetchone()
        try:
            cursor.execute(NOTICE_DEATH)
            cursor.execute("SET statement_timeout = 0")
            yield had
        finally:
            cursor.execute("RESET client_connection_check_interval")
            cursor.execute(f"SET statement_timeout = '{timeout}'")
            if had:
                cursor.execute(f"SELECT pg_advisory_unlock{shared}({AT_WORK})")


def patiently(work: Callable[[], T], *, attempts: int = ATTEMPTS) -> T:
    """``work``, begun again and again with pauses where a lock is not to be had."""
    for _attempt in range(attempts - 1):
        try:
            return work()
        except DatabaseError as error:
            if not is_conflict(error):
                raise
        time.sleep(PAUSE)
    return work()


def take_back_check(alias: str) -> None:
    """Take back the CHECK of an ``enable`` that is not at work any more: it refuses every record of a day to come."""

    def forget() -> None:
        with short_transaction(alias, lock_timeout=LOCK_TIMEOUT) as cursor:
            cursor.execute(f"SELECT pg_try_advisory_xact_lock({AT_WORK})")
            if cursor.fetchone() == (True,):
                keep_autovacuum_away(cursor, TABLE)
                cursor.execute(f"ALTER TABLE {TABLE} DROP CONSTRAINT IF EXISTS {UNTIL}")

    patiently(forget)
