"""The command, the tasks, and databases that have no partitions."""

from __future__ import annotations

import json

import pytest
from django.core.management import CommandError, call_command

from django_idempotency.contrib.partitions.catalog import read_layout
from django_idempotency.contrib.partitions.conversion import enable, enable_plan
from django_idempotency.contrib.partitions.layout import TABLE, NotConvertible
from django_idempotency.contrib.partitions.upkeep import drop, ensure, status
from tests.contrib.partitions.table import HOURS, old, plain_table, postgresql
from tests.support.aliases import role
from tests.support.checks import PARTITIONS, found
from tests.support.partitioned import divide
from tests.support.sql import run_sql
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
    assert told("enable")["statements"] == enable_plan()
    capsys.readouterr()
    call_command("idempotency_partitions", "enable")
    printed = capsys.readouterr()
    assert "CREATE TABLE" in printed.out
    assert "--yes" in printed.err
    assert not read_layout().partitioned
    assert told("enable", "--yes")["changed"]
    assert told("enable")["statements"] == []
    assert not told("enable", "--yes")["changed"]


@postgresql
@plain_table
def test_the_command_keeps_partitions(table, told, capsys):
    assert told("ensure")["partitioned"] is told("drop")["partitioned"] is False
    call_command("idempotency_partitions", "enable", "--yes")
    capsys.readouterr()
    assert told("ensure")["created"] == []
    assert len(told("ensure", "--ahead=12")["created"]) == 5
    call_command("idempotency_partitions", "status")
    assert f"public.{TABLE}_p0: … – " in capsys.readouterr().out
    call_command("idempotency_partitions", "drop")
    assert capsys.readouterr().out == "0 partitions dropped.\n"


@postgresql
@plain_table
def test_status_works_without_rights_on_the_partitions(days, told):
    """A role that may read the table may see how it is divided."""
    old()
    with role(f"SELECT ON {TABLE}") as name:
        run_sql(f"SET ROLE {name}")
        assert [part["kept"] for part in told("status")["partitions"]] == [
            "",
            "",
            "not over yet",
            "not over yet",
        ]


@postgresql
@plain_table
@pytest.mark.parametrize(
    ("work", "step"),
    [
        (enable, "ALTER TABLE .* VALIDATE"),
        (status, r"SELECT \(SELECT count"),
        (drop, r"SELECT \(SELECT count"),
        (drop, "ALTER TABLE .* DETACH"),
    ],
    ids=["enable", "status", "drop", "detach"],
)
def test_a_statement_may_take_longer_than_the_role_lets_it(table, work, step):
    """``statement_timeout`` is for requests; a large table is not read in a second."""
    if work is drop:
        now = read_layout().now
        divide(now - HOURS, now + HOURS)
    elif work is not enable:
        enable()
    limits = []
    run_sql("SET statement_timeout = '5min'")
    try:
        with just_before(
            step, lambda: limits.extend(run_sql("SHOW statement_timeout"))
        ):
            done = work()
        assert done if work is enable else done.partitioned
        assert limits == [("0",)]
        assert run_sql("SHOW statement_timeout") == [("5min",)]
    finally:
        run_sql("RESET statement_timeout")


@pytest.mark.other_databases
def test_partitions_on_another_database_are_an_error_that_says_so(payer):
    for work in (read_layout, status, ensure, drop, enable):
        with pytest.raises(NotConvertible, match="PostgreSQL"):
            work()
    with pytest.raises(CommandError, match="PostgreSQL"):
        call_command("idempotency_partitions", "status")
    assert found(label=PARTITIONS) == []


@postgresql
@plain_table
@pytest.mark.celery
def test_the_tasks_do_nothing_on_a_plain_table(table):
    from django_idempotency.contrib.partitions.tasks import (
        BEAT_SCHEDULE as PARTITIONS_BEAT_SCHEDULE,
    )
    from testproject.celery import app

    app.loader.import_default_modules()
    by_name = {
        entry["task"]: app.tasks[entry["task"]]
        for entry in PARTITIONS_BEAT_SCHEDULE.values()
    }
    for entry in PARTITIONS_BEAT_SCHEDULE.values():
        assert (
            entry["options"]["expires"] + entry["options"]["time_limit"]
            <= entry["schedule"]
        )
    for task in by_name.values():
        assert not json.loads(json.dumps(task()))["partitioned"]
    enable()
    assert json.loads(json.dumps(by_name["django_idempotency.ensure_partitions"]()))[
        "created"
    ]
    assert (
        json.loads(json.dumps(by_name["django_idempotency.drop_partitions"]()))[
            "dropped"
        ]
        == []
    )
