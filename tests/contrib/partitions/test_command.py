"""The command, the tasks, and databases that have no partitions."""

from __future__ import annotations

import json

import pytest
from django.core.management import CommandError, call_command

from django_idempotency.contrib.partitions.catalog import read_layout
from django_idempotency.contrib.partitions.conversion import disable, enable, enable_plan
from django_idempotency.contrib.partitions.dropping import drop
from django_idempotency.contrib.partitions.layout import TABLE
from django_idempotency.contrib.partitions.provisioning import ensure
from django_idempotency.contrib.partitions.report import status
from django_idempotency.exceptions import PartitionsUnsupported
from tests.contrib.partitions.table import HOURS, OLDEST, YESTERDAY, old, plain_table, postgresql, rows, run_sql
from tests.support.aliases import role
from tests.support.callers import record
from tests.support.checks import PARTITIONS, found
from tests.support.partitioned import divide
from tests.support.threads import just_before


@pytest.fixture
def told(capsys):
    """Run the command; what it printed, read as JSON."""

    def run(*arguments):
        call_command("idempotency_partitions", *arguments, "--json")
        return json.loads(capsys.readouterr().out)

    return run


@postgresql
@plain_table
def test_the_command_changes_nothing_without_yes(table, told, capsys):
    assert not told("status")["partitioned"]
    planned = told("enable", "--plan")["statements"]
    assert planned == enable_plan().statements
    call_command("idempotency_partitions", "enable")
    printed = capsys.readouterr()
    assert "CREATE TABLE" in printed.out
    assert "--yes" in printed.err
    assert not read_layout().partitioned
    assert told("enable", "--yes")["changed"]
    told("disable")
    assert read_layout().partitioned
    assert told("disable", "--yes") == {"database": "default", "partitioned": False, "changed": True}


@postgresql
@plain_table
def test_the_command_keeps_partitions(table, told, capsys):
    assert told("ensure")["partitioned"] is told("drop")["partitioned"] is False
    call_command("idempotency_partitions", "enable", "--yes")
    capsys.readouterr()
    assert told("ensure", "--plan")["statements"] == []
    planned = told("ensure", "--ahead=12", "--plan")["statements"]
    made = told("ensure", "--ahead=12")["created"]
    assert made
    assert sum("ATTACH" in statement for statement in planned) == len(made)
    call_command("idempotency_partitions", "status")
    assert f"public.{TABLE}_p0: … – " in capsys.readouterr().out


@postgresql
@plain_table
def test_drop_prints_its_plan_and_does_it(days, told, capsys):
    old()
    planned = told("drop", "--plan")["statements"]
    assert [statement for statement in planned if statement.startswith("DROP")] == [
        f"DROP TABLE {OLDEST}",
        f"DROP TABLE {YESTERDAY}",
    ]
    assert record()
    call_command("idempotency_partitions", "drop")
    assert capsys.readouterr().out == "2 partitions dropped.\n"


@postgresql
@plain_table
def test_status_needs_no_rights_on_the_partitions(days, told):
    """A role that may read the table may see how it is divided."""
    old()
    with role(f"SELECT ON {TABLE}") as name:
        run_sql(f"SET ROLE {name}")
        assert [part["kept"] for part in told("status")["partitions"]] == ["", "", "not over yet", "not over yet"]


@postgresql
@plain_table
@pytest.mark.parametrize(
    ("work", "step"),
    [
        (enable, "ALTER TABLE .* VALIDATE"),
        (ensure, "CREATE TABLE"),
        (status, r"SELECT \(SELECT count"),
        (drop, r"SELECT \(SELECT count"),
        (drop, "ALTER TABLE .* DETACH"),
        (disable, "INSERT"),
    ],
    ids=["enable", "ensure", "status", "drop", "detach", "disable"],
)
def test_a_statement_may_take_longer_than_the_role_lets_it(table, work, step):
    """``statement_timeout`` is for requests; a large table is not read in a second."""
    if work is drop:
        now = read_layout().now
        divide(now - HOURS, now + HOURS)
    elif work is not enable:
        enable()
    run_sql("SET statement_timeout = '300ms'")
    try:
        with just_before(step, lambda: run_sql("SELECT pg_sleep(0.4)")):
            done = work()
        assert done.dropped if work is drop else done.partitioned is (work is not disable)
        assert run_sql("SHOW statement_timeout") == [("300ms",)]
    finally:
        run_sql("RESET statement_timeout")


def test_plan_and_yes_exclude_each_other(payer):
    with pytest.raises(CommandError, match="not both"):
        call_command("idempotency_partitions", "enable", "--plan", "--yes")


@pytest.mark.other_databases
def test_partitions_on_another_database_are_an_error_that_says_so(payer):
    for work in (read_layout, status, ensure, drop, enable, disable):
        with pytest.raises(PartitionsUnsupported, match="PostgreSQL"):
            work()
    with pytest.raises(CommandError, match="PostgreSQL"):
        call_command("idempotency_partitions", "status")
    assert found(label=PARTITIONS) == []


@postgresql
@plain_table
def test_beside_a_default_partition_everything_stays_as_it_is(table):
    now = read_layout().now
    divide(now - HOURS)
    run_sql(f"DROP TABLE {YESTERDAY}")
    run_sql(f"CREATE TABLE {TABLE}_p9 PARTITION OF {TABLE} (PRIMARY KEY (id)) DEFAULT")
    old()
    assert "default partition" in drop().kept[OLDEST]
    assert (rows(OLDEST), status().covered_until) == (1, None)


@postgresql
@plain_table
@pytest.mark.celery
def test_the_tasks_do_nothing_on_a_plain_table(table):
    from django_idempotency.contrib.partitions.tasks import BEAT_SCHEDULE as PARTITIONS_BEAT_SCHEDULE
    from testproject.celery import app

    app.loader.import_default_modules()
    by_name = {entry["task"]: app.tasks[entry["task"]] for entry in PARTITIONS_BEAT_SCHEDULE.values()}
    for entry in PARTITIONS_BEAT_SCHEDULE.values():
        assert entry["options"]["expires"] + entry["options"]["time_limit"] <= entry["schedule"]
    for task in by_name.values():
        assert not json.loads(json.dumps(task()))["partitioned"]
    enable()
    assert json.loads(json.dumps(by_name["django_idempotency.ensure_partitions"]()))["created"]
    assert json.loads(json.dumps(by_name["django_idempotency.drop_partitions"]()))["dropped"] == []
