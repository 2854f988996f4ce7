"""The pure parts: waves, and from where a lane is read."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as some

from django_idempotency.outbox.backlog import delay_after
from django_idempotency.outbox.conf import Options
from django_idempotency.outbox.cursor import OVERLAP, SWEEP_EVERY, Cursor
from django_idempotency.outbox.waves import waves
from tests.outbox.events import event


def at(position, lane=1):
    return replace(event("a"), position=position, lane=lane)


@given(some.lists(some.sampled_from(["", "a", "b", "c"])))
def test_waves_keep_each_keys_order_and_split_it(keys):
    events = [event("a", key=key) for key in keys]
    parts = waves(events)
    sent = [one for part in parts for one in part]
    assert sorted(one.position for one in sent) == [one.position for one in events]
    for key in "abc":
        assert [one for one in sent if one.key == key] == [one for one in events if one.key == key]
    for part in parts:
        keyed = [one.key for one in part if one.key]
        assert len(keyed) == len(set(keyed))


def test_reading_begins_where_it_had_come_to_some_time_ago():
    cursor = Cursor()
    assert cursor.after({1}, (), now=0) == {1: 0}
    cursor.has_swept(0, now=0)
    cursor.has_read([at(10)], now=0)
    assert cursor.after({1}, (), now=0.5) == {1: 0}
    cursor.has_read([at(20)], now=0.5)
    cursor.has_swept(0, now=100)
    assert cursor.after({1}, (), now=OVERLAP + 0.1) == {1: 10}
    assert cursor.after({1}, (), now=OVERLAP + 0.6) == {1: 20}


def test_a_sweep_starts_over_and_takes_a_share_of_the_time():
    cursor = Cursor()
    cursor.after({1}, (), now=0)
    cursor.has_swept(0.001, now=0)
    cursor.has_read([at(10)], now=0)
    assert cursor.after({1}, (), now=SWEEP_EVERY) == {1: 0}
    assert cursor.sweeps
    cursor.has_swept(2.0, now=50)
    cursor.after({1}, (), now=89)
    assert not cursor.sweeps
    cursor.after({1}, (), now=90)
    assert cursor.sweeps


def calm(cursor, now):
    """Nothing to sweep for long, and all that was read is old."""
    cursor.after({1}, (), now=now)
    cursor.has_read([at(100)], now=now)
    cursor.has_swept(1000, now=now)
    assert cursor.after({1}, (), now=now + OVERLAP) == {1: 100}
    return now + OVERLAP


def test_a_sweep_finds_what_is_below_all_that_was_read():
    cursor = Cursor()
    calm(cursor, 0)
    assert cursor.after({1}, (), now=20_000) == {1: 0}
    cursor.has_swept(0, now=20_000)
    assert cursor.after({1}, (), now=20_000) == {1: 100}


def test_a_lane_with_held_back_events_is_read_whole():
    cursor = Cursor()
    now = calm(cursor, 0)
    assert cursor.after({1}, {1}, now) == {1: 0}
    assert cursor.after({1}, (), now) == {1: 0}
    cursor.has_read([at(32)], now)
    assert cursor.after({1}, (), now + OVERLAP) == {1: 32}  # and what was cut off behind it is not passed over


def test_a_late_event_has_its_lane_read_anew():
    cursor = Cursor()
    now = calm(cursor, 0)
    cursor.has_read([at(5)], now)
    assert cursor.after({1}, (), now + OVERLAP) == {1: 5}


def test_what_was_left_behind_is_read_again():
    cursor = Cursor()
    now = calm(cursor, 0)
    cursor.leave_behind([at(100)])
    assert cursor.after({1}, (), now) == {1: 0}


def test_a_lane_that_comes_back_is_read_whole():
    cursor = Cursor()
    now = calm(cursor, 0)
    cursor.after(set(), (), now)
    assert cursor.after({1}, (), now) == {1: 0}


def test_delays_double_up_to_a_limit():
    options = Options(first_delay=2, longest_delay=100)
    assert [delay_after(attempts, options) for attempts in (1, 2, 3, 7, 10_000)] == [2, 4, 8, 100, 100]
