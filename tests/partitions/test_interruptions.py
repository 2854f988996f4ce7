"""Killed between any two steps, a command can be run again, and no key is lost."""

from __future__ import annotations

import pytest
from django.core.management import call_command

from django_idempotency.checks.databases import check_partitions
from django_idempotency.models import IdempotencyRecord
from django_idempotency.partitions import (
    disable,
    enable,
    ensure,
    status,
)
from django_idempotency.partitions.catalog import read_layout
from django_idempotency.partitions.layout import (
    TABLE,
    Bounds,
)
from django_idempotency.partitions.templates import name_of
from django_idempotency.policy import Policy
from tests.partitions.table import (
    ACTIVITY,
    DAYS,
    OLDEST,
    YESTERDAY,
    described,
    long_transaction,
    old,
    plain_table,
    postgresql,
    rows,
    run_sql,
)
from tests.support.callers import claim, effects, entry_point, is_replay, paying
from tests.support.owner_process import commanding
from tests.support.threads import wait_little_for_locks
from tests.support.waiting import eventually

COMMAND = "idempotency_partitions"


def make_keys():
    entry_point(paying)("done")
    claim("live", policy=Policy(mode="lease"))


def assert_keys_are_as_before(other_thread, paid=2):
    """At once: what waits for a lock that nobody gives back fails."""
    other_thread(wait_little_for_locks)
    assert is_replay(other_thread(entry_point(paying), "done"))
    assert other_thread(entry_point(paying, mode="lease"), "live").status_code == 409
    assert other_thread(entry_point(paying), "new").status_code == 201
    assert is_replay(other_thread(entry_point(paying), "new"))
    assert IdempotencyRecord.objects.filter(key__in=["done", "live", "new"]).count() == 3
    assert effects() == paid


def kill(*arguments, before):
    with commanding(COMMAND, *arguments, before=before) as process:
        process.kill()


def run_again(*arguments):
    """Once the server has noticed that the other one is dead."""
    at_work = (
        f"{ACTIVITY} AND pid IN (SELECT pid FROM pg_locks WHERE locktype = 'advisory') AND pid <> pg_backend_pid()"
    )
    eventually(lambda: not run_sql(at_work))
    call_command(COMMAND, *arguments, verbosity=0)


def warnings():
    return {message.id for message in check_partitions(None, ["default"])}


@postgresql
@plain_table
@pytest.mark.parametrize(
    ("step", "halfway", "partitioned"),
    [
        ("ALTER TABLE .* ADD CONSTRAINT", False, False),
        ("ALTER TABLE .* VALIDATE", True, False),
        ("LOCK TABLE .* IN ACCESS EXCLUSIVE", True, False),
        ("ALTER TABLE .* ATTACH PARTITION", True, False),
        ("LOCK TABLE ONLY", False, True),
    ],
)
@pytest.mark.server
def test_an_enable_that_is_killed_can_be_begun_again(table, other_thread, step, halfway, partitioned):
    plain = described()
    make_keys()
    kill("enable", "--yes", before=step)
    assert_keys_are_as_before(other_thread)
    assert (status().halfway, status().partitioned) == (halfway, partitioned)
    assert ("django_idempotency.W028" in warnings()) is halfway
    run_again("enable", "--yes")
    assert_keys_are_as_before(other_thread)
    assert (status().halfway, status().partitioned, warnings()) == (False, True, set())
    disable()
    assert described() == plain


@postgresql
@plain_table
@pytest.mark.parametrize("step", ["ALTER TABLE .* VALIDATE", "LOCK TABLE .* IN ACCESS EXCLUSIVE"])
@pytest.mark.server
def test_ensure_takes_back_what_an_enable_left_that_was_killed(table, step):
    plain = described()
    kill("enable", "--yes", before=step)
    run_again("ensure")
    assert (described(), warnings()) == (plain, set())


@postgresql
@plain_table
@pytest.mark.parametrize("step", ["INSERT", "DROP TABLE", "ALTER TABLE .* ADD CONSTRAINT"])
@pytest.mark.server
def test_a_disable_that_is_killed_leaves_the_table_partitioned(table, other_thread, step):
    plain = described()
    make_keys()
    enable()
    before = read_layout().partitions
    kill("disable", "--yes", before=step)
    assert_keys_are_as_before(other_thread)
    assert read_layout().partitions == before
    run_again("disable", "--yes")
    assert_keys_are_as_before(other_thread)
    assert described() == plain


@postgresql
@plain_table
@pytest.mark.server
def test_nobody_waits_for_the_copying_of_a_disable_that_was_killed(table, other_thread):
    """The server would go on with it, under its lock, and notice only at its end."""
    entry_point(paying)("done")
    enable()
    run_sql(f"ALTER TABLE {TABLE} ADD CONSTRAINT slow CHECK (pg_sleep(60)::text = '') NOT VALID")
    try:
        with commanding(COMMAND, "disable", "--yes", before="INSERT") as process:
            process.go_on()
            eventually(lambda: run_sql(f"{ACTIVITY} AND wait_event = 'PgSleep'"))
            process.kill()
        other_thread(wait_little_for_locks)
        assert is_replay(other_thread(entry_point(paying), "done"))
    finally:
        run_sql(f"ALTER TABLE {TABLE} DROP CONSTRAINT slow")


@postgresql
@plain_table
@pytest.mark.parametrize("step", ["ALTER TABLE .* ATTACH PARTITION", "CREATE TABLE {second}", "ALTER TABLE {second} "])
@pytest.mark.server
def test_an_ensure_that_is_killed_can_be_begun_again(table, other_thread, step):
    make_keys()
    enable()
    upper = read_layout().partitions[-1].bounds.upper
    second = name_of("public", Bounds(upper + DAYS, upper + 2 * DAYS))
    kill("ensure", before=step.format(second=second))
    assert_keys_are_as_before(other_thread)
    assert read_layout().partitions[-1].bounds.upper == upper + ("{" in step) * DAYS
    run_again("ensure")
    assert_keys_are_as_before(other_thread)
    assert (warnings(), ensure().created) == (set(), ())


@postgresql
@plain_table
@pytest.mark.parametrize(
    ("step", "retired", "left_behind"),
    [
        ("LOCK TABLE .*_p1", [False], ()),
        ("ALTER TABLE .*_p1 ADD CONSTRAINT", [False], ()),
        ("ALTER TABLE .* DETACH .*_p1", [True], ()),
        ("DROP TABLE .*_p1", [], (YESTERDAY,)),
    ],
)
@pytest.mark.server
def test_a_drop_that_is_killed_goes_on(days, other_thread, capsys, step, retired, left_behind):
    old("old")
    make_keys()
    kill("drop", before=step)
    if not any(retired) and not left_behind:
        assert rows(YESTERDAY) == 1
    found = status()
    assert [standing.retired for standing in found.partitions if standing.name == YESTERDAY] == retired
    assert found.left_behind == left_behind
    call_command(COMMAND, "status")
    assert capsys.readouterr().out.count("run drop") == len(left_behind) + sum(retired)
    assert_keys_are_as_before(other_thread, 3)
    run_again("drop")
    assert len(read_layout().partitions) == 2
    assert run_sql("SELECT 1 FROM pg_class WHERE relname = %s", [f"{TABLE}_p1"]) == []
    assert_keys_are_as_before(other_thread, 3)
    assert entry_point(paying)("old").status_code == 201


@postgresql
@plain_table
@pytest.mark.parametrize("then", [["drop"], ["disable", "--yes"]], ids=["drop", "disable"])
@pytest.mark.server
def test_a_drop_killed_while_it_waits_can_be_repeated(days, other_thread, observer, then):
    """Its wait would keep others from making partitions, and from converting the table."""
    old("old")
    make_keys()
    waits = f"{ACTIVITY} AND query LIKE '%DETACH%' AND wait_event = 'virtualxid'"
    with long_transaction(observer):
        with commanding(COMMAND, "drop", before="ALTER TABLE .* DETACH") as process:
            process.go_on()
            eventually(lambda: run_sql(waits))
            process.kill()
        assert_keys_are_as_before(other_thread, 3)
        eventually(lambda: not run_sql(waits))
        assert [standing.name for standing in status().partitions if standing.detaching] == [OLDEST]
        assert ensure().created == ()
    run_again(*then)
    assert len(read_layout().partitions) == (2 if then == ["drop"] else 0)
    assert run_sql("SELECT 1 FROM pg_class WHERE relname = %s", [f"{TABLE}_p0"]) == []
    assert_keys_are_as_before(other_thread, 3)
