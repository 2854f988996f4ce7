"""Counters are written by the thread that keeps leases, and cost no lease."""

from __future__ import annotations

import pytest

from django_idempotency.contrib.dashboard.models import IdempotencyCounter
from django_idempotency.policy import Lease
from tests.laws.test_leases_are_kept import LEASE, locked, outside_a_test_run, renewed
from tests.support.callers import Gate

__all__ = ["outside_a_test_run"]

pytestmark = pytest.mark.usefixtures("payer")


@pytest.mark.postgresql
@pytest.mark.usefixtures("outside_a_test_run")
def test_a_locked_table_of_counters_costs_no_lease(monkeypatch):
    monkeypatch.setattr("django_idempotency.contrib.dashboard.counters.FLUSH_EVERY", 0.1)
    with (
        locked(f"LOCK TABLE {IdempotencyCounter._meta.db_table} IN ACCESS EXCLUSIVE MODE"),
        Gate().running(mode=Lease(seconds=LEASE)),
    ):
        renewed()
        renewed()
