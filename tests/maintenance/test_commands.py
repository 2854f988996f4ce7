"""The commands: what they report, in words and as JSON, how they exit, and that SIGTERM
ends them between batches.
"""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
from django.core.management import CommandError, call_command

from django_idempotency.models import IdempotencyRecord
from tests.support.callers import record, shift
from tests.support.commands import told
from tests.support.databases import environment
from tests.support.happening import happen
from tests.support.maintained import HOLD, HOUR, dead, done, fill
from tests.support.sql import run_sql
from tests.support.threads import OtherThread

pytestmark = pytest.mark.usefixtures("payer")

ROOT = Path(__file__).parents[2]


def facts_of(*arguments):
    (facts,) = told(*arguments)
    assert facts.pop("database") == "default"
    return facts


def count():
    return IdempotencyRecord.objects.count()


def test_reap_frees_and_holds_and_says_how_many():
    dead("retry")
    dead("hold", **HOLD)
    facts = facts_of("idempotency_reap")
    assert (facts["done"], facts["bad"], facts["finished"]) == (
        {"failed": 1, "on_hold": 1},
        {},
        True,
    )


def test_reap_takes_its_options():
    for number in range(3):
        dead(f"k{number}")
    assert facts_of("idempotency_reap", "--older-than=7200")["done"]["failed"] == 0
    assert (
        facts_of("idempotency_reap", "--batch=1", "--max-seconds=0")["done"]["failed"]
        == 1
    )


@pytest.mark.postgresql
def test_reap_exits_with_1_and_names_what_could_not_be_written(capsys):
    dead()
    times = (
        "locked_at = '1000-01-01', expires_at = '294276-01-01', purge_at ="
        " '294276-01-01'"
    )
    # to keep it for as long again is beyond the end of PostgreSQL's calendar
    run_sql(f"UPDATE django_idempotency_record SET {times}")
    with pytest.raises(SystemExit) as ended:
        call_command("idempotency_reap")
    assert ended.value.code == 1
    printed = capsys.readouterr()
    assert "could not be written: 1" in printed.out
    assert (
        str(IdempotencyRecord.objects.values_list("pk", flat=True).get()) in printed.err
    )


def test_cleanup_deletes_and_says_how_far_behind_it_is():
    for key in "abc":
        done(key)
    ended = facts_of("idempotency_cleanup", "--batch=2", "--max-seconds=0")
    assert (ended["done"], ended["finished"]) == ({"deleted": 2}, False)
    assert HOUR <= ended["lag"] <= HOUR + 60
    assert facts_of("idempotency_cleanup", "--pause=0")["lag"] == 0
    assert count() == 0


def test_cleanup_of_bodies_leaves_the_record():
    done(purge_at=HOUR)
    assert facts_of("idempotency_cleanup", "--bodies", "--dry-run")["done"] == {
        "dropped": 1
    }
    assert facts_of("idempotency_cleanup", "--bodies")["done"] == {"dropped": 1}
    assert record().response_body is None


def test_stats_as_json():
    dead("on_hold", **HOLD)
    call_command("idempotency_reap", verbosity=0)
    dead()
    done("a")
    happen("shop.views.pay", claimed=3, replayed=1)
    happen("shop.views.pay", hours=5, in_flight=4)
    facts = facts_of("idempotency_stats")
    assert (facts["pending"], facts["stuck"], facts["on_hold"], facts["due"]) == (
        1,
        1,
        1,
        1,
    )
    assert (facts["last_hour"]["requests"], facts["last_hour"]["deduplicated"]) == (
        4,
        0.25,
    )
    assert (facts["last_day"]["requests"], facts["last_day"]["conflicts"]) == (8, 4)
    assert facts["views"] == {"shop.views.pay": facts["last_day"]}


def test_stats_in_words(capsys):
    dead()
    happen("shop.views.pay", claimed=3, replayed=1, in_flight=1)
    call_command("idempotency_stats")
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    for line in (
        "pending 1",
        "lease ran out 1 !",
        "deduplicated 20.00 % 20.00 %",
        "MOST REPLAYS, LAST DAY",
        "at shop.views.pay 1 of 5",
        "MOST CONFLICTS, LAST DAY",
    ):
        assert line.split() in lines


def checked(capsys, *arguments):
    """The exit code of a check, and what it printed."""
    try:
        call_command("idempotency_stats", "--check", *arguments)
    except SystemExit as ended:
        code = ended.code
    else:
        code = 0
    return code, capsys.readouterr().out


def test_a_check_says_that_nothing_lasts_too_long(capsys):
    assert checked(capsys) == (
        0,
        "OK: stuck for 0 s, on hold for 0 s, behind for 0 s.\n",
    )


def held_since(lasts):
    dead(**HOLD)
    call_command("idempotency_reap", verbosity=0)
    shift(updated_at=-lasts)


@pytest.mark.parametrize(
    ("make", "lasts", "limit", "name"),
    [
        (
            lambda lasts: (dead(), shift(locked_until=-lasts)),
            15 * 60,
            "--stuck-for",
            "stuck",
        ),
        (held_since, HOUR, "--on-hold-for", "on_hold"),
        (
            lambda lasts: done(purge_at=-lasts, expires_at=-lasts),
            HOUR,
            "--behind-for",
            "behind",
        ),
    ],
    ids=["stuck", "on_hold", "behind"],
)
def test_a_check_exits_with_2_beyond_its_limits(capsys, make, lasts, limit, name):
    make(lasts + 60)
    code, printed = checked(capsys, "--json")
    assert (code, json.loads(printed)["exceeded"]) == (2, [name])
    code, printed = checked(capsys)
    assert (code, printed.partition(":")[0]) == (2, "CRITICAL")
    assert checked(capsys, f"{limit}={lasts + 600}")[0] == 0
    code, printed = checked(capsys, f"{limit}=30")
    assert (code, "(over 30 s)" in printed) == (2, True)


@pytest.mark.parametrize(
    "arguments",
    [
        ["idempotency_reap", "--batch=0"],
        ["idempotency_reap", "--older-than=-1"],
        ["idempotency_cleanup", "--batch=x"],
        ["idempotency_cleanup", "--pause=nan"],
        ["idempotency_stats", "--database=nowhere"],
        ["idempotency_keys", "allow-retry"],
        ["idempotency_stats", "--stuck-for=1week"],
    ],
)
def test_an_invalid_option_of_a_command_is_an_error(arguments):
    with pytest.raises(CommandError):
        call_command(*arguments)


@pytest.mark.parametrize("name", ["idempotency_reap", "idempotency_cleanup"])
def test_verbosity_0_prints_nothing(capsys, name):
    call_command(name, verbosity=0)
    assert capsys.readouterr() == ("", "")


def test_a_command_runs_in_a_thread(capsys):
    """Where signals can't be handled."""
    thread = OtherThread()
    thread(call_command, "idempotency_reap", "--json")
    thread.close()
    assert json.loads(capsys.readouterr().out)["finished"]


@contextmanager
def running(*arguments, **options):
    """A command in a process of its own."""
    with subprocess.Popen(
        [sys.executable, "-W", "error", "-m", "testproject", *arguments],
        cwd=ROOT,
        env=environment() | {"DEBUG": "1"},
        stdout=subprocess.PIPE,
        **options,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


MANY = 90  # half a minute's work


@pytest.mark.server
@pytest.mark.parametrize(
    "number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"]
)
def test_a_signal_ends_a_cleanup_after_its_batch_with_a_report(number):
    fill(MANY, purge_at=-HOUR)
    ours, theirs = pty.openpty()
    with running(
        "idempotency_cleanup", "--batch=1", "--pause=0.3", "--json", stderr=theirs
    ) as process:
        os.close(theirs)
        progress = ""
        while "Deleted: 2" not in progress:
            progress += os.read(ours, 1000).decode()
        process.send_signal(number)
        facts = json.loads(process.stdout.read())
        assert process.wait() == 0
    os.close(ours)
    assert not facts["finished"]
    assert 0 < facts["done"]["deleted"] < MANY
    assert count() == MANY - facts["done"]["deleted"]
