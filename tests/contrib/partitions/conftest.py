"""Fixtures of a partitioned record table."""

from __future__ import annotations

import pytest

from django_idempotency.contrib.partitions import conversion, locks
from django_idempotency.contrib.partitions.catalog import read_layout
from django_idempotency.contrib.partitions.layout import TABLE, detachment
from django_idempotency.models import IdempotencyRecord
from tests.contrib.partitions.table import DAYS, HOURS
from tests.support.partitioned import divide, make_plain
from tests.support.sql import run_sql
from tests.support.threads import OtherThread


@pytest.fixture
def table(payer, short_watch):
    """The record table, plain before the test and after it."""
    yield
    IdempotencyRecord.objects.all().delete()
    for partition in read_layout().partitions:
        if partition.detaching:
            run_sql(detachment(partition.name, begun=True))
    make_plain()
    for (name,) in run_sql(
        "SELECT relname FROM pg_class WHERE relname LIKE %s AND relkind = 'r'",
        [f"{TABLE}\\_p%"],
    ):
        run_sql(f"DROP TABLE {name}")


@pytest.fixture
def days(table):
    """Partitions of yesterday and before, of the last hour and now, and of tomorrow and
    later.
    """
    now = read_layout().now
    divide(now - DAYS, now - HOURS, now + DAYS)


@pytest.fixture
def observer():
    """One more thread, with a connection of its own."""
    thread = OtherThread()
    yield thread
    thread.close()


@pytest.fixture
def impatient(monkeypatch):
    """Where locks are not to be had, it is given up soon."""
    monkeypatch.setattr(locks, "PAUSE", 0.01)
    monkeypatch.setattr(conversion, "ATTEMPTS", 3)
