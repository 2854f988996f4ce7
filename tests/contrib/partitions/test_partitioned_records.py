"""Maintenance, statistics and interventions work on a partitioned table."""

from __future__ import annotations

import pytest

from django_idempotency import maintenance
from django_idempotency.contrib.partitions.layout import TABLE
from django_idempotency.maintenance.stats import stats
from django_idempotency.models import Status
from django_idempotency.stores import store_for
from django_idempotency.values.outcomes import Claimed, StoredResponse
from django_idempotency.values.policy import Policy
from tests.contrib.partitions.table import DAY, HOUR, YESTERDAY, live, old, rows
from tests.support.callers import claim, record, shift
from tests.support.sql import run_sql

pytestmark = [pytest.mark.postgresql, pytest.mark.plain_table]


def test_a_row_at_the_same_ctid_elsewhere_is_not_deleted(days):
    old("kept", age=2 * DAY, purge_at=HOUR)
    old("gone", age=DAY)
    assert run_sql(
        f"SELECT count(DISTINCT ctid), count(DISTINCT tableoid) FROM {TABLE}"
    ) == [(1, 2)]
    assert maintenance.cleanup().rows == 1
    assert record("kept") is not None


def test_maintenance_goes_through_all_partitions(days):
    old("a", age=2 * DAY)
    old("b")
    old("c", age=0)
    live(mode="lease")
    assert maintenance.cleanup(batch=2, pause=0).rows == 3
    assert maintenance.reap().done["failed"] == 1
    assert record().status == Status.FAILED
    assert rows(YESTERDAY) == 1


def test_the_size_is_the_sum_of_the_partitions(days):
    old()
    sizes = (
        "SELECT sum(pg_total_relation_size(inhrelid)) FROM pg_inherits WHERE inhparent"
        " = %s::regclass"
    )
    assert stats()["bytes"] == run_sql(sizes, [TABLE])[0][0]


def test_a_live_key_on_the_day_before_is_renewed_and_completed_there(days):
    policy = Policy(mode="lease")
    claimed = claim(policy=policy)
    shift(created_at=-2 * HOUR)
    claimed = Claimed(claimed.operation, claimed.token)  # as one that took over has it
    store = store_for(policy)
    assert store.renew([claimed]) == {claimed.token}
    assert store.complete(claimed, StoredResponse(201, (), b"done"))
    store.count_replays({claimed.id: 2})
    assert (rows(YESTERDAY), record().replays) == (1, 2)
