"""The pure parts: order by key, and from where a lane is read."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import strategies as some

from django_idempotency.contrib.outbox.backlog import delay_after
from django_idempotency.contrib.outbox.chains import Chains
from django_idempotency.contrib.outbox.conf import OutboxOptions
from django_idempotency.contrib.outbox.cursor import (
    OVERLAP,
    SWEEP_EVERY,
    SWEEP_SHARE,
    Cursor,
)
from tests.contrib.outbox.events import event
from tests.support.properties import given


def at(position, lane=1):
    return replace(event("a"), position=position, lane=lane)


@given(some.lists(some.sampled_from(["", "a", "b", "c"])), some.randoms(), examples=100)
def test_an_event_is_taken_after_the_previous_of_its_key_is_confirmed(keys, random):
    events = [event("a", key=key) for key in keys]
    chains, confirmed, waiting = Chains(events, (), lambda: True), [], []
    while new := [*chains, *waiting]:
        keyed = [one.key for one in new if one.key]
        assert len(keyed) == len(set(keyed))
        waiting = random.sample(new, random.randrange(len(new)))
        for one in new:
            if one not in waiting:
                chains.confirm(one)
                confirmed.append(one)
    assert sorted(one.position for one in confirmed) == [one.position for one in events]
    for key in "abc":
        assert [one for one in confirmed if one.key == key] == [
            one for one in events if one.key == key
        ]


def test_reading_begins_where_it_had_come_to_some_time_ago():
    cursor = without_sweeps()
    assert cursor.after({1}, {}, now=0) == {1: 0}
    cursor.has_read([at(10)], 0, now=0)
    assert cursor.after({1}, {}, now=0.5) == {1: 0}
    cursor.has_read([at(20)], 0, now=0.5)
    assert cursor.after({1}, {}, now=OVERLAP + 0.1) == {1: 10}
    assert cursor.after({1}, {}, now=OVERLAP + 0.6) == {1: 20}


def without_sweeps():
    """A cursor whose last sweep took so long that there won't be one for long."""
    cursor = Cursor()
    cursor.after({1}, {}, now=0)
    cursor.has_read([], 10_000, now=0)
    return cursor


def calm():
    """All that was read is old."""
    cursor = without_sweeps()
    cursor.has_read([at(100)], 0, now=0)
    assert cursor.after({1}, {}, now=OVERLAP) == {1: 100}
    return cursor, OVERLAP


def test_a_sweep_finds_what_is_below_all_that_was_read():
    cursor, _now = calm()
    assert cursor.after({1}, {}, now=1_000_000) == {1: 0}
    cursor.has_read([], 0, now=1_000_000)
    assert cursor.after({1}, {}, now=1_000_000) == {1: 100}


def test_a_sweep_takes_a_share_of_the_time():
    cursor = Cursor()
    cursor.has_read([at(100)], 0, now=0)
    for now, took in ((OVERLAP, 0.001), (OVERLAP + SWEEP_EVERY, 0.4)):
        assert cursor.after({1}, {}, now) == {1: 0}
        cursor.has_read([], took, now)
        soonest = now + max(SWEEP_EVERY, took / SWEEP_SHARE)
        assert cursor.after({1}, {}, soonest - 0.1) == {1: 100}
    assert cursor.after({1}, {}, soonest) == {1: 0}


def test_a_lane_with_held_back_events_is_read_from_the_first():
    cursor, now = calm()
    assert cursor.after({1}, {1: 40}, now) == {1: 39}
    assert cursor.after({1}, {1: 40}, now) == {1: 39}


def test_a_lane_that_was_held_back_is_read_from_the_beginning():
    """Also if another one holds back others by then, and if it is more than a read
    brings.
    """
    cursor, now = calm()
    cursor.after({1}, {1: 40}, now)
    for _ in range(2):
        assert cursor.after({1}, {1: 60}, now) == {1: 0}
    cursor.has_read([at(45)], 0, now)
    assert cursor.after({1}, {1: 60}, now + OVERLAP) == {1: 45}


def test_a_late_event_has_its_lane_read_anew():
    cursor, now = calm()
    cursor.has_read([at(5)], 0, now)
    assert cursor.after({1}, {}, now + OVERLAP) == {1: 5}


@pytest.mark.parametrize(
    "happens",
    [
        lambda cursor: cursor.leave_behind([at(100)]),
        lambda cursor: cursor.after(set(), {}, OVERLAP),
        lambda cursor: cursor.after({1}, {1: 40}, OVERLAP),
    ],
    ids=[
        "an event was left behind",
        "the lane was another relay's",
        "an event was held back",
    ],
)
def test_a_lane_is_read_from_its_beginning_after(happens):
    cursor, now = calm()
    happens(cursor)
    assert cursor.after({1}, {}, now) == {1: 0}


def test_delays_double_up_to_a_limit():
    options = OutboxOptions(first_delay=2, longest_delay=100)
    assert [delay_after(attempts, options) for attempts in (1, 2, 3, 7, 10_000)] == [
        2,
        4,
        8,
        100,
        100,
    ]
