"""Maintenance and statistics go by the indexes, however large the table is, and may
take longer than requests.
"""

from __future__ import annotations

import pytest
from django.core.management import call_command
from django.db import connection

from django_idempotency.maintenance import cleanup, drop_bodies, reap
from django_idempotency.maintenance.stats import delays, size, stats
from django_idempotency.models import IdempotencyRecord
from django_idempotency.values.policy import Policy
from tests.support.callers import claim, entry_point, paying, shift
from tests.support.maintained import (
    DAY,
    HOUR,
    TABLE,
    dead,
    fill,
    one_batch,
    postgresql,
    vacuum,
)
from tests.support.sql import run_sql
from tests.support.statements import buffers, explaining, nodes
from tests.support.threads import just_before

pytestmark = pytest.mark.usefixtures("payer")


def test_stats_tell_what_is_pending_stuck_and_due():
    for number in range(10):
        claim(f"live{number}", policy=Policy(mode="lease"))
        shift(f"live{number}", locked_at=-number)
    dead("stuck", since=HOUR)
    # a record may wait for its partition
    allowed = sum(delay("default") for delay in delays)
    fill(3, purge_at=-allowed - DAY - 500)
    found = stats()
    assert (found["pending"], found["stuck"], found["due"]) == (11, 1, 3)
    assert 4 <= found["pending_p50"] <= found["pending_p95"] <= found["pending_p99"]
    assert HOUR <= found["pending_p99"] <= HOUR + 120
    assert DAY + 500 <= found["lag"] <= DAY + 620


@pytest.mark.not_on_citus
@postgresql
def test_stats_know_the_size_of_the_table():
    fill(200, purge_at=HOUR)
    run_sql(f"ANALYZE {TABLE}")
    found = size()
    assert found["rows"] == stats()["rows"] == 200
    assert 8192 < found["bytes"] == found["table_bytes"] + found["index_bytes"]


LIVE, DUE, STUCK = 10_000, 10_000, 100
FILL = f"""
INSERT INTO {TABLE} (
    id, scope, key, method, path, fingerprint, mode, created_at, status, token,
        locked_at, locked_until, updated_at,
    expires_at, purge_at, response_status, response_headers, response_body
)
SELECT gen_random_uuid(), 's', i, 'POST', '/', ''::bytea, 'lease', now(), 'processing',
    gen_random_uuid(), now(),
    now() + CASE WHEN i <= {STUCK} THEN interval '-1 hour' ELSE interval '1 hour' END,
        now(), now() + interval '1 day',
    now() + interval '1 day', NULL, NULL::jsonb, NULL::bytea
FROM generate_series(1, {LIVE}) AS i
UNION ALL
SELECT gen_random_uuid(), 's', i, 'POST', '/', ''::bytea, 'lease', now(), 'completed',
    NULL, NULL, NULL, now(),
    now() + make_interval(secs => i - {DUE}),
        now() + make_interval(secs => i - {DUE} + (i % 2)), 200, '[]',
    'body'
FROM (SELECT i FROM generate_series(1, 2 * {DUE}) AS i ORDER BY random())
    AS shuffled (i)
"""


@pytest.fixture
def large_table(payer):
    vacuum()
    run_sql(FILL)
    run_sql(f"ANALYZE {TABLE}")


CHANGES = ("WITH", "UPDATE", "DELETE")  # wings read the table when they prune theirs


def plans(work, only=("",)):
    """The plan of each statement on the table that ``work`` sends, of those that begin
    with one of ``only``.
    """
    with explaining(TABLE, only=only) as found:
        work()
    return found


def indexes(plan):
    """Those by which the table is read, or how else it is."""
    scans = [node for node in nodes(plan) if "Scan" in node["Node Type"]]
    return {node.get("Index Name", node["Node Type"]) for node in scans} - {
        "Bitmap Heap Scan",
        "CTE Scan",
    }


@postgresql
@pytest.mark.plain_table  # it names the indexes; test_partitions has the like
@pytest.mark.usefixtures("large_table")
def test_the_reaper_reads_by_the_partial_index_alone():
    *watch, look, write = plans(lambda: one_batch(reap, batch=STUCK))
    assert all(indexes(plan) == {"idempotency_record_reap"} for plan in watch)
    assert indexes(look) == {"idempotency_record_reap"}
    assert indexes(write) == {f"{TABLE}_pkey"}
    assert look["Actual Rows"] == STUCK
    assert buffers(look) < 10 * STUCK
    assert buffers(look) + buffers(write) < 30 * STUCK


@postgresql
@pytest.mark.plain_table
@pytest.mark.usefixtures("large_table")
@pytest.mark.parametrize(
    ("work", "index", "most"),
    [
        (cleanup, "idempotency_record_purge", 6),
        (drop_bodies, "idempotency_record_bodies", 20),
    ],
)
def test_a_sweep_is_one_statement_by_the_partial_index(work, index, most):
    found = []
    for number in range(3):
        (sweep,) = plans(lambda: one_batch(work, batch=100), only=CHANGES)
        assert indexes(sweep) == {index, "Tid Scan"}
        locked = [node for node in nodes(sweep) if node["Node Type"] == "LockRows"]
        assert [node["Actual Rows"] for node in locked] == [100]
        # each one also reads what those before it have left in the index
        found.append(buffers(sweep) - 100 * number)
    # a session that has just heard of an ANALYZE reads the catalogue, too
    assert min(found) < most * 100


@pytest.mark.not_on_citus
@postgresql
@pytest.mark.usefixtures("large_table")
def test_a_later_batch_skips_what_was_deleted(other_thread):
    """While somebody's old snapshot keeps the dead rows, each batch would walk all of
    those before it.
    """
    other_thread(take_a_snapshot)
    first, *_others, last = plans(
        lambda: cleanup(batch=1000, pause=0, go_on=lambda swept: swept.rows < 8000),
        only=CHANGES,
    )
    assert buffers(last) < 1.5 * buffers(first)


def take_a_snapshot():
    """And keep it for as long as this thread's connection is open."""
    connection.set_autocommit(False)
    run_sql("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
    assert IdempotencyRecord.objects.exists()


@postgresql
def test_the_index_of_bodies_is_empty_without_an_audit_tier():
    fill(50, purge_at=HOUR)
    IdempotencyRecord.objects.update(response_body=b"body")
    vacuum()
    rows = "SELECT reltuples FROM pg_class WHERE relname = 'idempotency_record_bodies'"
    assert run_sql(rows) == [(0,)]


@pytest.fixture
def hurried(payer):
    """One key that is due, and a session whose statements have a limit."""
    assert entry_point(paying)("k").status_code == 201
    shift("k", expires_at=-HOUR, purge_at=-HOUR)
    run_sql("SET statement_timeout = '5min'")
    yield
    run_sql("RESET statement_timeout")


@pytest.mark.not_on_citus
@postgresql
@pytest.mark.parametrize(
    ("command", "step"),
    [
        (("idempotency_cleanup",), r"\s*WITH picked"),
        (("idempotency_cleanup", "--dry-run"), r"SELECT COUNT"),
        (("idempotency_privacy", "erase", "--scope=custom:public"), ".* LIMIT"),
        (
            ("idempotency_privacy", "erase", "--scope=custom:public", "--dry-run"),
            '.*"on_hold" FROM',
        ),
        (("idempotency_privacy", "export", "--scope=custom:public"), ".*has_body"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_a_slow_statement_of_maintenance_is_not_cancelled(
    hurried, capsys, command, step
):
    limits = []
    with just_before(step, lambda: limits.extend(run_sql("SHOW statement_timeout"))):
        call_command(*command)
    assert set(limits) == {("10min",)}, "its own limit"
    assert run_sql("SHOW statement_timeout") == [("5min",)]
