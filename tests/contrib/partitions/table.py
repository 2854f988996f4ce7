"""The record table in partitions: what the tests of a partitioned table share."""

from __future__ import annotations

import re
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta

import pytest
from django.db import transaction

from django_idempotency.contrib.partitions.layout import TABLE
from django_idempotency.values.policy import Policy
from tests.support.callers import claim, entry_point, paying, shift
from tests.support.sql import run_sql

HOUR, DAY = 3600, 24 * 3600
NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)
MIDNIGHT = NOON.replace(hour=0)
DAYS, HOURS = timedelta(days=1), timedelta(hours=1)
ACTIVITY = "SELECT 1 FROM pg_stat_activity WHERE datname = current_database()"
postgresql = pytest.mark.postgresql
plain_table = pytest.mark.plain_table
OLDEST, YESTERDAY, TODAY = (f"public.{TABLE}_p{number}" for number in range(3))


def rows(partition):
    return run_sql(f"SELECT count(*) FROM {partition}")[0][0]


def old(key="k", *, age=2 * HOUR, purge_at=-HOUR, **policy):
    """A key with an answer, that was claimed so many seconds ago, and whose time is up
    by default.
    """
    assert entry_point(paying, **policy)(key).status_code == 201
    shift(key, created_at=-age, expires_at=purge_at, purge_at=purge_at)


def described():
    """All that makes the table what it is: columns, constraints, indexes, owner, grants
    and comment.
    """
    of_table = f"'{TABLE}'::regclass"
    return {
        "columns": run_sql(f"""
            SELECT attname, format_type(atttypid, atttypmod), attnotnull,
                pg_get_expr(adbin, adrelid), attstorage
            FROM pg_attribute LEFT JOIN pg_attrdef ON adrelid = attrelid
                AND adnum = attnum
            WHERE attrelid = {of_table} AND attnum > 0 ORDER BY attnum
        """),
        "constraints": run_sql(f"""
            SELECT conname, contype, convalidated FROM pg_constraint
                WHERE conrelid = {of_table} ORDER BY conname
        """),
        "indexes": [
            # the casts are written in several ways
            (name, re.sub(r"::[a-z ]+(\[\])?|[()]", "", predicate or ""))
            for name, predicate in run_sql(f"""
                SELECT relname, pg_get_expr(indpred, indrelid) FROM pg_index
                    JOIN pg_class ON oid = indexrelid
                WHERE indrelid = {of_table} ORDER BY relname
            """)
        ],
        "rest": run_sql(f"""
            SELECT relowner::regrole::text, coalesce(relacl, acldefault('r',
                relowner))::text, obj_description(oid),
                   relreplident
            FROM pg_class WHERE oid = {of_table}
        """),
        "options": run_sql(f"SELECT reloptions FROM pg_class WHERE oid = {of_table}"),
    }


def live(**policy):
    claim(policy=Policy(**policy))
    shift(
        created_at=-2 * HOUR,
        locked_at=-2 * HOUR,
        locked_until=-HOUR,
        expires_at=-HOUR,
        purge_at=-HOUR,
    )


@contextmanager
def long_transaction(other_thread):
    """Somebody uses the table."""
    block = other_thread(transaction.atomic)
    other_thread(block.__enter__)
    other_thread(run_sql, f"LOCK TABLE ONLY {TABLE} IN ACCESS SHARE MODE")
    try:
        yield
    finally:
        other_thread(block.__exit__, None, None, None)


def pay():
    entry_point(paying)("new")
