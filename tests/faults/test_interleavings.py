"""The laws under every order in which the statements of two or three actors can reach
PostgreSQL.

Any statement of one actor may come between any two of another. With ``kills``, an actor
dies before each of its statements in turn. The tests say how many states there are: far
fewer would mean that the scheduler no longer reaches all of them. The largest
explorations take minutes each, and run with ``ALL_STATES=1`` in the environment.
"""

from __future__ import annotations

import os
from itertools import count

import pytest

from django_idempotency import maintenance
from tests.faults.schedule import Explorer, Violation
from tests.faults.world import (
    MODES,
    hours_pass,
    in_all_modes,
    retention_ends,
    told,
)
from tests.support.sql import run_sql

pytestmark = [
    pytest.mark.postgresql,
    pytest.mark.usefixtures("transactional_db"),
    pytest.mark.exhaustive,
]


ALL = "ALL_STATES" in os.environ


OTHER_BODY = b'{"amount": 6}'


LARGEST = [True] if ALL else []
REAPERS = [
    dict.fromkeys(names, maintenance.reap)
    for names in ((), ("reaper",), ("reaper", "reaper2"))
]


@pytest.mark.parametrize(
    ("mode", "states"), [("atomic", 48), ("lease", 6), ("hold", 6)]
)
@pytest.mark.parametrize("lock", ["nowait", "skip_locked"], indirect=True)
def test_two_callers(world, mode, states, lock):
    w = world(mode)
    assert w.explore(dict.fromkeys("AB", w.caller())).states >= states


@pytest.mark.parametrize(
    ("mode", "schedules"), [("lease", 3), *(("atomic", 65) for _ in LARGEST)]
)
def test_a_schedule_that_is_cut_short_would_have_come_to_nothing_new(
    world, mode, schedules
):
    w = world(mode)
    works = dict.fromkeys("AB", w.caller())
    uncut = w.explore(works, prune=False)
    assert (uncut.cut, uncut.schedules >= schedules) == (0, True)
    assert w.explore(works).outcomes == uncut.outcomes


@pytest.mark.parametrize(
    ("mode", "states"),
    [("lease", 10), ("hold", 10), *(("atomic", 500) for _ in LARGEST)],
)
def test_three_callers(world, mode, states):
    w = world(mode)
    assert w.explore(dict.fromkeys("ABC", w.caller())).states >= states


@pytest.mark.parametrize("kills", [1, *(2 for _ in LARGEST)])
@pytest.mark.parametrize(
    ("mode", "wait", "states"),
    [
        ("atomic", None, 150),
        ("lease", None, 13),
        ("lease", 1000, 40),
        ("hold", 1000, 35),
        *(("atomic", 1000, 200) for _ in LARGEST),
    ],
)
def test_two_callers_that_die(world, mode, wait, states, kills):
    w = world(mode, wait=wait)
    w.runs_again = mode == "lease"
    found = w.explore(dict.fromkeys("AB", w.caller()), kills=kills)
    assert found.states >= states
    assert found.kills >= 8


def test_for_the_grace_nobody_alive_is_overtaken(world):
    w = world(takeover_grace=3600)
    found = w.explore(dict.fromkeys("AB", w.caller()), kills=1)
    lost = [
        told
        for told, last in found.outcomes
        if last[1][-1] != "1" and "Killed" not in str(told)
    ]
    assert not lost
    assert found.states >= 160


@pytest.mark.parametrize("outcome", [404, 500, ValueError()], ids=str)
@pytest.mark.parametrize("mode", ["atomic", "lease"])
def test_a_caller_whose_view_fails_or_refuses(world, mode, outcome):
    w = world(mode)
    w.runs_again = mode == "lease"
    w.may_answer = w.may_answer | {404, 500, "ValueError"}
    w.refused = ("A",) if outcome == 404 and mode == "atomic" else ()
    assert w.explore({"A": w.caller(outcome), "B": w.caller()}).states >= 13


@in_all_modes
def test_two_callers_with_different_requests(world, mode):
    w = world(mode)

    def finish(results):
        answers = sorted(told(result) for result in results.values())
        _effects, row = w.look()
        assert [status for status, _body in answers] in ([201, 422], [409, 422])
        return tuple(answers), row.status

    found = w.explore({"A": w.caller(), "B": w.caller(body=OTHER_BODY)}, finish=finish)
    assert {status for _answers, status in found.outcomes} == {"completed"}


@pytest.mark.parametrize(
    ("mode", "states"),
    [("lease", 50), ("hold", 38), *(("atomic", 240) for _ in LARGEST)],
)
def test_callers_whose_leases_run_out(world, mode, states):
    w = world(mode)
    w.runs_again = mode == "lease"
    assert (
        w.explore({**dict.fromkeys("AB", w.caller()), "time": hours_pass}).states
        >= states
    )


@pytest.mark.parametrize("callers", ["A", *("AB" for _ in LARGEST)])
def test_the_heartbeat_beside_owners_and_zombies(world, callers):
    w = world("lease")
    w.runs_again = True
    works = dict.fromkeys(callers, w.caller())
    assert w.explore({**works, "time": hours_pass, "beat": w.beat}).states >= 52


@pytest.mark.parametrize(
    ("mode", "callers", "reapers"),
    [
        ("atomic", "A", 1),
        *(
            (mode, *who)
            for mode in MODES
            for who in (("A", 2), ("AB", 1))
            for _ in LARGEST
        ),
    ],
)
def test_reapers_beside_live_and_dead_owners(world, mode, callers, reapers):
    w = world(mode)
    w.runs_again = mode == "lease"
    works = dict.fromkeys(callers, w.caller())
    assert w.explore({**works, "time": hours_pass, **REAPERS[reapers]}).states >= 100


@pytest.mark.parametrize(
    ("mode", "callers", "reapers"),
    [
        *((mode, "AB", 0) for mode in MODES),
        *(("lease", "A", 1), ("lease", "", 2)),
        *(
            (mode, *who)
            for mode in MODES
            for who in (("A", 2), ("AB", 1))
            for _ in LARGEST
        ),
    ],
)
def test_a_dead_owner_is_found_by(world, mode, callers, reapers):
    w = world(mode)
    w.runs_again = mode == "lease"
    works = dict.fromkeys(callers, w.caller())
    assert w.explore({**works, **REAPERS[reapers]}, given=w.dead_holder).states >= 10


@pytest.mark.parametrize(
    ("mode", "others", "states"),
    [
        ("hold", {}, 100),
        *(("lease", {}, 230) for _ in LARGEST),
        *(
            (mode, {"time": hours_pass}, 490)
            for mode in ("lease", "hold")
            for _ in LARGEST
        ),
    ],
)
def test_a_lease_that_ran_out_is_renewed_or_reaped_or_taken_over(
    world, mode, others, states
):
    w = world(mode)
    w.runs_again = mode == "lease"
    works = {"A": w.caller(), "beat": w.beat, "reaper": maintenance.reap, **others}
    assert w.explore(works, given=w.stopped_holder).states >= states


@pytest.mark.parametrize(
    ("mode", "callers", "others", "states"),
    [
        ("atomic", "AB", {}, 140),
        ("atomic", "A", {"cleanup": maintenance.cleanup}, 75),
        ("hold", "A", {"cleanup": maintenance.cleanup}, 60),
        ("lease", "A", {"cleanup": maintenance.cleanup}, 60),
        *(
            (mode, "AB", {"cleanup": maintenance.cleanup}, 330)
            for mode in MODES
            for _ in LARGEST
        ),
    ],
)
def test_the_retention_ends_beside(world, mode, callers, others, states):
    w = world(mode)
    works = dict.fromkeys(callers, w.caller())
    assert (
        w.explore(
            {**works, **others, "expiry": retention_ends}, given=w.earlier_life
        ).states
        >= states
    )


def explored(shorter, judge=lambda play: None):
    """Two actors with two statements each; in the plays whose numbers are given, one of
    them has none.
    """
    plays = count(1)
    current = [0]

    def prepare():
        current[0] = next(plays)

    def two():
        run_sql("SELECT 1")
        run_sql("SELECT 2")

    def two_or_none():
        if current[0] not in shorter:
            two()

    def finish(answers):
        judge(current[0])
        return len(answers)

    works = {"A": two, "B": two_or_none}
    return Explorer(
        works, prepare=prepare, look=lambda: None, finish=finish, prune=False
    ).explore()


def test_a_schedule_that_diverged_is_played_again():
    usual, disturbed = explored(()), explored(range(2, 200, 2))
    assert (usual.diverged, usual.missed, usual.schedules) == (0, 0, 6)
    assert (disturbed.diverged > 0, disturbed.missed) == (True, 0)


def test_a_schedule_that_always_diverges_is_counted():
    found = explored(range(3, 1000))
    assert found.missed
    assert f"{found.missed} missed" in str(found)


def test_a_law_that_is_broken_in_a_schedule_that_diverged_is_broken():
    def judge(play):
        assert play != 2, "L1"

    with pytest.raises(Violation, match="L1"):
        explored({2}, judge)
