"""A figure says for how long new records have partitions."""

from __future__ import annotations

from django_idempotency.contrib.partitions.catalog import read_layout
from django_idempotency.contrib.partitions.layout import TABLE
from django_idempotency.contrib.partitions.report import FAMILY
from tests.contrib.partitions.table import DAYS, plain_table, postgresql, run_sql
from tests.support.partitioned import divide


def ahead():
    return [figures["ahead"] for figures in FAMILY.read("default").values()]


@postgresql
@plain_table
def test_a_missing_partition_shows_although_there_are_later_ones(table):
    assert ahead() == [], "the table is plain"
    today = read_layout().now.replace(hour=0, minute=0, second=0, microsecond=0)
    divide(*(today + number * DAYS for number in range(9)))
    assert ahead() == [], "the last one has no end"
    run_sql(f"ALTER TABLE {TABLE} DETACH PARTITION {TABLE}_p2")
    (short,) = ahead()
    assert 0 < short < 86400
