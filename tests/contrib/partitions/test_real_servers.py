"""``enable`` beside autovacuum, which takes a server of our own."""

from __future__ import annotations

from functools import partial

import pytest

from django_idempotency.contrib.partitions.conversion import enable
from django_idempotency.contrib.partitions.layout import TABLE
from tests.faults.cluster import room, running_cluster
from tests.support.aliases import alias_of_cluster
from tests.support.sql import run_sql
from tests.support.waiting import eventually

pytestmark = [pytest.mark.postgresql, pytest.mark.plain_table, pytest.mark.server]
PRIVATE = "private"


@pytest.fixture
def server():
    parameters = {
        "autovacuum_naptime": "1s",
        "deadlock_timeout": "200ms",
        "fsync": "off",
    }
    with room() as directory, running_cluster(directory, **parameters) as cluster:
        yield cluster


@pytest.fixture
def private(transactional_db, server):
    """The alias of a database of that server."""
    with alias_of_cluster(PRIVATE, server):
        yield PRIVATE


sql = partial(run_sql, using=PRIVATE)


def make_records(count):
    columns = (
        "id, scope, key, method, path, fingerprint, mode, created_at, status,"
        " updated_at, expires_at, purge_at, response_status, response_headers"
    )
    sql(f"""
        INSERT INTO {TABLE} ({columns})
        SELECT gen_random_uuid(), 's', number, '', '', '', 'atomic', now(),
            'completed', now(), now(), now(), 200,
            '[]'
        FROM generate_series(1, {count}) AS number
    """)


RUNNING = (
    f"SELECT pid FROM pg_stat_activity WHERE query LIKE 'autovacuum: VACUUM%{TABLE}%'"
)


@pytest.fixture
def slow_autovacuum(private):
    """An autovacuum of the table that would take minutes."""
    slow = {"autovacuum_vacuum_cost_delay": "100", "autovacuum_vacuum_cost_limit": "1"}
    soon = {"autovacuum_vacuum_threshold": "1", "autovacuum_vacuum_scale_factor": "0"}
    settings = slow | soon
    make_records(50_000)
    sql(
        f"ALTER TABLE {TABLE} SET"
        f" ({', '.join(f'{name} = {value}' for name, value in settings.items())})"
    )
    sql(f"DELETE FROM {TABLE} WHERE key::int % 2 = 0")
    ((pid,),) = eventually(lambda: sql(RUNNING))
    return pid


def test_enable_has_an_autovacuum_yield(private, slow_autovacuum):
    assert enable(using=private)
    # it gives the lock back first, and ends a little later
    eventually(lambda: (slow_autovacuum,) not in sql(RUNNING))
