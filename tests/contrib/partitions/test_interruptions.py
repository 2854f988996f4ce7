"""Killed between any two steps, a command can be run again, and no key is lost."""

from __future__ import annotations

import pytest
from django.core.management import call_command

from django_idempotency.contrib.partitions.catalog import read_layout
from django_idempotency.contrib.partitions.conversion import enable
from django_idempotency.contrib.partitions.layout import TABLE
from django_idempotency.contrib.partitions.upkeep import ensure, status
from django_idempotency.models import IdempotencyRecord
from django_idempotency.values.policy import Lease, Policy
from tests.contrib.partitions.table import ACTIVITY, YESTERDAY, old, rows
from tests.support.callers import claim, effects, entry_point, is_replay, paying
from tests.support.checks import PARTITIONS, found
from tests.support.owner_process import commanding
from tests.support.sql import run_sql
from tests.support.threads import wait_little_for_locks
from tests.support.waiting import eventually

pytestmark = [pytest.mark.postgresql, pytest.mark.plain_table, pytest.mark.server]

COMMAND = "idempotency_partitions"


def make_keys():
    entry_point(paying)("done")
    claim("live", policy=Policy(mode=Lease(seconds=3600)))


def assert_keys_are_as_before(other_thread, paid=2):
    """At once: what waits for a lock that nobody gives back fails."""
    other_thread(wait_little_for_locks)
    assert is_replay(other_thread(entry_point(paying), "done"))
    assert other_thread(entry_point(paying, mode="lease"), "live").status_code == 409
    assert other_thread(entry_point(paying), "new").status_code == 201
    assert is_replay(other_thread(entry_point(paying), "new"))
    assert (
        IdempotencyRecord.objects.filter(key__in=["done", "live", "new"]).count() == 3
    )
    assert effects() == paid


def kill(*arguments, before):
    with commanding(COMMAND, *arguments, before=before) as process:
        process.kill()


def run_again(*arguments):
    """Once the server has noticed that the other one is dead."""
    at_work = (
        f"{ACTIVITY} AND pid IN (SELECT pid FROM pg_locks WHERE locktype = 'advisory')"
        " AND pid <> pg_backend_pid()"
    )
    eventually(lambda: not run_sql(at_work))
    call_command(COMMAND, *arguments, verbosity=0)


def warnings():
    return {message.id for message in found(label=PARTITIONS)}


@pytest.mark.parametrize(
    ("step", "halfway", "partitioned"),
    [
        ("ALTER TABLE .* VALIDATE", True, False),
        ("ALTER TABLE .* ATTACH PARTITION", True, False),
        ("LOCK TABLE ONLY", False, True),
    ],
)
def test_an_enable_that_is_killed_can_be_begun_again(
    table, other_thread, step, halfway, partitioned
):
    make_keys()
    kill("enable", "--yes", before=step)
    assert_keys_are_as_before(other_thread)
    assert (read_layout().halfway, read_layout().partitioned) == (halfway, partitioned)
    assert ("django_idempotency_partitions.W002" in warnings()) is halfway
    run_again("enable", "--yes")
    assert_keys_are_as_before(other_thread)
    assert (read_layout().halfway, read_layout().partitioned, warnings()) == (
        False,
        True,
        set(),
    )


def test_an_ensure_that_is_killed_can_be_begun_again(table, other_thread):
    make_keys()
    enable()
    before = read_layout().partitions
    kill("ensure", before="ALTER TABLE .* ATTACH PARTITION")
    assert_keys_are_as_before(other_thread)
    assert read_layout().partitions == before
    run_again("ensure")
    assert_keys_are_as_before(other_thread)
    assert (warnings(), ensure().created) == (set(), ())


@pytest.mark.parametrize(
    ("step", "retired", "left_behind"),
    [
        ("ALTER TABLE .*_p1 ADD CONSTRAINT", [False], ()),
        ("ALTER TABLE .* DETACH .*_p1", [True], ()),
        ("DROP TABLE .*_p1", [], (YESTERDAY,)),
    ],
)
def test_a_drop_that_is_killed_goes_on(
    days, other_thread, capsys, step, retired, left_behind
):
    old("old")
    make_keys()
    kill("drop", before=step)
    if not any(retired) and not left_behind:
        assert rows(YESTERDAY) == 1
    found = status()
    assert [
        standing.retired for standing in found.partitions if standing.name == YESTERDAY
    ] == retired
    assert found.left_behind == left_behind
    call_command(COMMAND, "status")
    assert capsys.readouterr().out.count("run drop") == len(left_behind) + sum(retired)
    assert_keys_are_as_before(other_thread, 3)
    run_again("drop")
    assert len(read_layout().partitions) == 2
    assert run_sql("SELECT 1 FROM pg_class WHERE relname = %s", [f"{TABLE}_p1"]) == []
    assert_keys_are_as_before(other_thread, 3)
    assert entry_point(paying)("old").status_code == 201
