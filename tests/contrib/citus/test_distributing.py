"""What ``idempotency_distribute --plan`` prints. Here PostgreSQL plays a coordinator: its catalogs are ours."""

from __future__ import annotations

import json

import pytest
from django.core.management import CommandError, call_command
from django.db import connection

from django_idempotency.contrib.citus import distribution
from django_idempotency.models import IdempotencyRecord
from django_idempotency.stores.claim_function import FUNCTION

pytestmark = pytest.mark.usefixtures("transactional_db")
RECORDS, COUNTERS, EVENTS = (
    "django_idempotency_record",
    "django_idempotency_counter",
    "django_idempotency_outbox_event",
)
CATALOGS = """
CREATE SCHEMA coordinator;
CREATE TABLE coordinator.pg_dist_node (groupid integer);
CREATE TABLE coordinator.pg_dist_partition (logicalrelid regclass);
CREATE TABLE coordinator.pg_dist_object (classid oid, objid oid, distribution_argument_index integer)
"""


@pytest.fixture
def coordinator(monkeypatch):
    monkeypatch.setattr(distribution, "EXTENSION", "SELECT 1")
    with connection.cursor() as cursor:
        cursor.execute(CATALOGS)
        cursor.execute("SET search_path = public, coordinator")
    yield
    with connection.cursor() as cursor:
        cursor.execute("DROP SCHEMA coordinator CASCADE")
        cursor.execute("RESET search_path")


def plan(capsys):
    call_command("idempotency_distribute", "--plan", "--json")
    return json.loads(capsys.readouterr().out)


def has_run(statement):
    with connection.cursor() as cursor:
        cursor.execute(statement)


def test_without_citus_it_says_what_is_missing():
    with pytest.raises(CommandError, match="Citus is not installed in this database"):
        call_command("idempotency_distribute", "--plan")


def test_idempotency_distribute_requires_plan():
    with pytest.raises(CommandError, match="--plan"):
        call_command("idempotency_distribute")


@pytest.mark.postgresql
@pytest.mark.plain_table
@pytest.mark.usefixtures("coordinator")
def test_the_plan_prints_every_statement_left_in_order(capsys):
    statements = plan(capsys)["statements"]
    assert statements[:2] == [
        "SELECT citus_set_coordinator_host('coordinator.example.com', 5432)",
        f"SELECT create_distributed_table('{RECORDS}', 'id', colocate_with := 'none')",
    ]
    assert statements[2].startswith("SELECT create_distributed_function('django_idempotency_claim(uuid,text,")
    assert statements[2].endswith(f"', 'new_id', colocate_with := '{RECORDS}')")
    assert FUNCTION.lstrip().partition("(")[2].split()[0] == "new_id"
    assert f"SELECT create_reference_table('{COUNTERS}')" in statements
    assert f"SELECT citus_add_local_table_to_metadata('{EVENTS}')" in statements


@pytest.mark.postgresql
@pytest.mark.plain_table
@pytest.mark.usefixtures("coordinator")
def test_the_plan_leaves_out_statements_that_were_run(capsys):
    has_run("INSERT INTO pg_dist_node VALUES (0), (1)")
    has_run("INSERT INTO pg_dist_partition SELECT oid FROM pg_class WHERE relname LIKE 'django_idempotency%'")
    has_run(
        "INSERT INTO pg_dist_object SELECT 'pg_proc'::regclass, oid, 0 FROM pg_proc"
        " WHERE proname = 'django_idempotency_claim'"
    )
    left = plan(capsys)
    assert left["statements"] == []
    assert len(left["cautions"]) == 1


@pytest.mark.postgresql
@pytest.mark.plain_table
@pytest.mark.usefixtures("coordinator")
def test_the_plan_warns_of_tables_that_are_not_committed_in_one_step(capsys):
    no_workers, meanwhile, others = plan(capsys)["cautions"]
    assert "citus_add_node" in no_workers
    assert "restart every process of the application afterwards" in meanwhile
    assert "testproject_ledgerentry" in others
    assert RECORDS not in others


@pytest.mark.postgresql
@pytest.mark.plain_table
@pytest.mark.usefixtures("coordinator")
def test_the_text_can_be_given_to_psql(capsys):
    call_command("idempotency_distribute", "--plan")
    lines = capsys.readouterr().out.splitlines()
    assert all(line.startswith("-- ") or line.endswith(";") for line in lines)
    assert not IdempotencyRecord.objects.exists()


@pytest.mark.postgresql
@pytest.mark.usefixtures("coordinator")
def test_a_partitioned_table_is_refused(monkeypatch):
    monkeypatch.setattr(distribution, "is_partitioned", lambda _connection: True)
    with pytest.raises(CommandError, match="The table is partitioned"):
        call_command("idempotency_distribute", "--plan")
