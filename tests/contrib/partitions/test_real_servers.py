"""``enable`` beside autovacuum and logical replication, which take a server of our own."""

from __future__ import annotations

import psycopg
import pytest
from django.db import connections

from django_idempotency.contrib.partitions.catalog import read_layout
from django_idempotency.contrib.partitions.conversion import disable, enable
from django_idempotency.contrib.partitions.layout import TABLE
from django_idempotency.contrib.partitions.provisioning import ensure
from django_idempotency.exceptions import NotConvertible
from tests.faults.cluster import room, running_cluster
from tests.support.aliases import alias_of_cluster
from tests.support.waiting import eventually

pytestmark = [pytest.mark.postgresql, pytest.mark.plain_table, pytest.mark.server]
PRIVATE = "private"


@pytest.fixture(scope="module")
def server():
    parameters = {"wal_level": "logical", "autovacuum_naptime": "1s", "deadlock_timeout": "200ms", "fsync": "off"}
    with room() as directory, running_cluster(directory, **parameters) as cluster:
        yield cluster


@pytest.fixture
def private(transactional_db, server):
    """The alias of a database of that server, with a record table that is plain before each test."""
    with alias_of_cluster(PRIVATE, server):
        yield PRIVATE
        sql(f"TRUNCATE {TABLE}")
        disable(using=PRIVATE)


def sql(statement):
    with connections[PRIVATE].cursor() as cursor:
        cursor.execute(statement)
        return cursor.fetchall() if cursor.description else None


def make_records(count, scope="s"):
    columns = (
        "id, scope, key, method, path, fingerprint, mode, created_at, status, updated_at, expires_at, purge_at,"
        " response_status, response_headers"
    )
    sql(f"""
        INSERT INTO {TABLE} ({columns})
        SELECT gen_random_uuid(), '{scope}', number, '', '', '', 'atomic', now(), 'completed', now(), now(), now(), 200,
            '[]'
        FROM generate_series(1, {count}) AS number
    """)


RUNNING = f"SELECT pid FROM pg_stat_activity WHERE query LIKE 'autovacuum: VACUUM%{TABLE}%'"


@pytest.fixture
def slow_autovacuum(private):
    """An autovacuum of the table that would take minutes."""
    slow = {"autovacuum_vacuum_cost_delay": "100", "autovacuum_vacuum_cost_limit": "1"}
    soon = {"autovacuum_vacuum_threshold": "1", "autovacuum_vacuum_scale_factor": "0"}
    settings = slow | soon
    make_records(50_000)
    sql(f"ALTER TABLE {TABLE} SET ({', '.join(f'{name} = {value}' for name, value in settings.items())})")
    sql(f"DELETE FROM {TABLE} WHERE key::int % 2 = 0")
    ((pid,),) = eventually(lambda: sql(RUNNING))
    yield pid
    sql(f"ALTER TABLE {TABLE} RESET ({', '.join(settings)})")


def test_enable_has_an_autovacuum_yield(private, slow_autovacuum):
    assert enable(using=private).changed
    assert (slow_autovacuum,) not in sql(RUNNING)


@pytest.fixture
def subscriber(private, server):
    """Another database, with a plain table of the same name that follows a publication of all tables."""
    server.execute("CREATE DATABASE subscriber")
    ours, theirs = server.url(), server.url("subscriber")
    definition = sql(
        f"SELECT string_agg(attname || ' ' || format_type(atttypid, atttypmod), ', ' ORDER BY attnum) "
        f"FROM pg_attribute WHERE attrelid = '{TABLE}'::regclass AND attnum > 0"
    )[0][0]
    sql("CREATE PUBLICATION mirrored FOR ALL TABLES")
    sql("SELECT pg_create_logical_replication_slot('mirror', 'pgoutput')")
    with psycopg.connect(theirs, autocommit=True) as connection:
        connection.execute(f"CREATE TABLE {TABLE} ({definition}, PRIMARY KEY (id))")
        for table in ("django_migrations", "django_idempotency_counter", "django_idempotency_observation"):
            connection.execute(f"CREATE TABLE {table} ()")
        connection.execute(
            f"CREATE SUBSCRIPTION mirror CONNECTION '{ours}' PUBLICATION mirrored"
            " WITH (create_slot = false, slot_name = 'mirror', copy_data = false)"
        )
        yield lambda: list(connection.execute(f"SELECT scope FROM {TABLE} ORDER BY 1"))
        connection.execute("ALTER SUBSCRIPTION mirror DISABLE")
    sql("DROP PUBLICATION mirrored")


VIA_ROOT = "ALTER PUBLICATION mirrored SET (publish_via_partition_root)"


def test_a_subscriber_follows_through_enable(private, subscriber):
    make_records(1, "before")
    eventually(lambda: subscriber() == [("before",)])
    with pytest.raises(NotConvertible, match=r"the publication mirrored, .*: ALTER PUBLICATION mirrored SET"):
        enable(using=private)
    assert not read_layout(using=private).partitioned
    sql(VIA_ROOT)
    enable(using=private)
    ensure(using=private)
    make_records(1, "after")
    eventually(lambda: subscriber() == [("after",), ("before",)])
    sql(f"UPDATE {TABLE} SET scope = 'changed' WHERE scope IN ('after', 'before')")
    eventually(lambda: subscriber() == [("changed",), ("changed",)])
    sql(f"DELETE FROM {TABLE} WHERE id = (SELECT min(id::text)::uuid FROM {TABLE})")
    eventually(lambda: subscriber() == [("changed",)])
    sql(f"TRUNCATE {TABLE}_p0")  # as drop does
    make_records(1, "later")
    eventually(lambda: ("later",) in subscriber())
    assert ("changed",) in subscriber()
    with pytest.raises(NotConvertible, match="the publication mirrored, whose subscribers would be sent every record"):
        disable(using=private)


TABLESPACES = f"""
SELECT DISTINCT spcname FROM pg_class LEFT JOIN pg_tablespace ON pg_tablespace.oid = reltablespace
WHERE relkind = 'r' AND starts_with(relname, '{TABLE}')
"""


@pytest.fixture
def tablespace(private):
    sql("SET allow_in_place_tablespaces = on")
    sql("CREATE TABLESPACE elsewhere LOCATION ''")
    sql(f"ALTER TABLE {TABLE} SET TABLESPACE elsewhere")
    yield "elsewhere"
    sql(f"TRUNCATE {TABLE}")
    disable(using=PRIVATE)
    sql(f"ALTER TABLE {TABLE} SET TABLESPACE pg_default")
    sql("DROP TABLESPACE elsewhere")


def test_conversions_keep_the_tablespace(private, tablespace):
    enable(using=private)
    ensure(using=private)
    assert sql(TABLESPACES) == [(tablespace,)]
    disable(using=private)
    assert sql(TABLESPACES) == [(tablespace,)]
