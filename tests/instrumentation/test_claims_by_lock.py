"""Runs in progress whose claims are locks are counted, and sessions that wait for
locks.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from django.db import connections, transaction
from django.http import HttpResponse

from django_idempotency.maintenance.stats import by_lock, lock_waits
from django_idempotency.stores.postgresql import OWNER_LOCK
from django_idempotency.values.keys import record_id
from django_idempotency.values.policy import Atomic, Policy
from tests.support.callers import SCOPE, Gate, claim, entry_point, paying, record
from tests.support.sql import run_sql
from tests.support.threads import OtherThread
from tests.support.waiting import eventually, someone_waits_for_a_lock

pytestmark = [pytest.mark.postgresql, pytest.mark.usefixtures("payer")]

TABLE = "django_idempotency_record"
COUNTED = f"SELECT count(*) FROM {TABLE}"
NONE = {"pending_by_lock": 0, "pending_by_lock_oldest": 0}


@contextmanager
def beside(*statements):
    """Another session in a transaction in which it has run ``statements``."""
    other = OtherThread()
    for statement in ("BEGIN", *statements):
        other(run_sql, *([statement] if isinstance(statement, str) else statement))
    try:
        yield
    finally:
        other(run_sql, "ROLLBACK")
        other.close()


def lock_of(key):
    id = record_id(SCOPE, key)
    return f"SELECT pg_advisory_xact_lock({OWNER_LOCK.format(id='%s')})", [id, id]


def test_a_run_is_counted_from_its_claim_to_its_end():
    assert by_lock() == NONE
    with (
        Gate().running_with("k", mode=Atomic(claim="lock")) as answer,
        Gate().running_with("other", mode=Atomic(claim="lock")),
    ):
        found = by_lock()
        assert (
            found["pending_by_lock"],
            0 <= found["pending_by_lock_oldest"] < 60,
        ) == (2, True)
        assert record() is None
    assert answer.result(60).status_code == 201
    assert by_lock() == NONE


def test_a_claim_that_is_a_record_is_counted_among_the_records_alone():
    claim(policy=Policy(scope=SCOPE))
    with Gate().running_with("running"):
        assert by_lock() == NONE


def test_a_replay_by_lock_leaves_nothing_to_count():
    for _twice in range(2):
        assert entry_point(paying, mode=Atomic(claim="lock"))().status_code == 201
    assert by_lock() == NONE


@pytest.mark.parametrize(
    "taken",
    [
        # looks like one of ours
        ["SELECT pg_advisory_xact_lock(x'4944000000000001'::bigint)"],
        [
            COUNTED,
            "SELECT pg_advisory_xact_lock(1), pg_advisory_xact_lock(x'4944'::int, 1)",
        ],
        [COUNTED, "SELECT pg_advisory_xact_lock_shared(x'4944000000000001'::bigint)"],
    ],
    ids=["without the table", "other locks", "shared"],
)
def test_advisory_locks_of_the_application_are_not_counted(taken):
    with beside(*taken):
        assert by_lock() == NONE


def test_runs_of_another_tenant_are_not_counted(other_thread):
    """Its locks are numbered by its own table, which is what its transaction reads."""
    other_thread(
        run_sql,
        f"CREATE SCHEMA tenant; CREATE TABLE tenant.{TABLE} (LIKE public.{TABLE})",
    )
    try:
        with beside("SET LOCAL search_path = tenant", COUNTED, lock_of("k")):
            assert by_lock() == NONE
        with beside(COUNTED, lock_of("k")):
            assert by_lock()["pending_by_lock"] == 1
    finally:
        run_sql("DROP SCHEMA tenant CASCADE")


@contextmanager
def as_clerk(*rights):
    """A role that may do no more than ``rights``."""
    with transaction.atomic():
        run_sql("CREATE ROLE idempotency_clerk")
        for right in (
            "GRANT USAGE ON SCHEMA public TO idempotency_clerk",
            *rights,
            "SET LOCAL ROLE idempotency_clerk",
        ):
            run_sql(right)
        yield
        run_sql("RESET ROLE")
        transaction.set_rollback(True)


def test_a_role_without_rights_sees_that_a_key_is_in_flight():
    with Gate().running(mode=Atomic(claim="lock")):
        with as_clerk():
            assert by_lock() == {"pending_by_lock": 1, "pending_by_lock_oldest": None}
        with as_clerk("GRANT pg_read_all_stats TO idempotency_clerk"):
            assert by_lock()["pending_by_lock_oldest"] >= 0


def test_a_role_that_may_not_read_the_locks_counts_nothing():
    with (
        Gate().running(mode=Atomic(claim="lock")),
        as_clerk("REVOKE SELECT ON pg_locks FROM PUBLIC"),
    ):
        assert by_lock() == {}


def test_a_run_that_waits_for_a_lock_is_counted():
    """Of whatever table; a session that does not use ours is not."""
    migrations = "django_migrations"
    none = {"lock_waits": 0, "lock_waits_oldest": 0}
    read = f"SELECT count(*) FROM {migrations}"

    def view(request):
        run_sql(read)
        return HttpResponse(status=201)

    def close(work):
        try:
            return work()
        finally:
            connections.close_all()

    with ThreadPoolExecutor(2) as pool:
        with beside(f"LOCK TABLE {migrations} IN ACCESS EXCLUSIVE MODE"):
            other = pool.submit(close, lambda: run_sql(read))
            assert eventually(someone_waits_for_a_lock)
            assert lock_waits() == none
            run = pool.submit(close, entry_point(view))
            assert eventually(lambda: lock_waits()["lock_waits_oldest"] > 0)
            assert lock_waits()["lock_waits"] == 1
        assert run.result(60).status_code == 201
        other.result(60)
    assert lock_waits() == none
