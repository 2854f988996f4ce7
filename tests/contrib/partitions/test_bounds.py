"""Which partitions there should be, and which can go: pure."""

from __future__ import annotations

from datetime import UTC, datetime
from itertools import pairwise

import pytest

from django_idempotency.contrib.partitions.layout import (
    TABLE,
    Bounds,
    Contents,
    Partition,
    covered_until,
    is_short,
    missing,
    why_kept,
    why_last,
)
from django_idempotency.contrib.partitions.templates import name_of
from tests.contrib.partitions.table import DAYS, HOURS, MIDNIGHT, NOON


def divided(*ends, **flags):
    """Partitions with these bounds, ``None`` for no end."""
    bounds = [Bounds(lower, upper) for lower, upper in pairwise(ends)]
    return [Partition(each.lower, each.upper, number, f"p{number}", **flags) for number, each in enumerate(bounds)]


MONDAY = datetime(1970, 1, 1, tzinfo=UTC) + (NOON - datetime(1970, 1, 1, tzinfo=UTC)) // (7 * DAYS) * (7 * DAYS)


def test_new_partitions_follow_the_latest():
    found = divided(None, MIDNIGHT, MIDNIGHT + DAYS)
    assert missing(found, NOON, 2) == [
        Bounds(MIDNIGHT + DAYS, MIDNIGHT + 2 * DAYS),
        Bounds(MIDNIGHT + 2 * DAYS, MIDNIGHT + 3 * DAYS),
    ]
    assert missing(found, NOON, 0) == []
    hourly = divided(None, NOON, NOON + HOURS)
    assert [bounds.lower for bounds in missing(hourly, NOON, 3)] == [NOON + number * HOURS for number in (1, 2, 3)]


def test_a_gap_up_to_now_is_left_out():
    found = divided(None, MIDNIGHT - 9 * DAYS, MIDNIGHT - 8 * DAYS)
    assert missing(found, NOON, 1) == [Bounds(MIDNIGHT, MIDNIGHT + DAYS), Bounds(MIDNIGHT + DAYS, MIDNIGHT + 2 * DAYS)]


def test_a_gap_is_filled_from_now_on_in_step_with_the_latest():
    later = divided(MIDNIGHT + 2 * DAYS, MIDNIGHT + 3 * DAYS)
    assert [bounds.lower for bounds in missing([*divided(None, MIDNIGHT - 9 * DAYS), *later], NOON, 3)] == [
        *(MIDNIGHT, MIDNIGHT + DAYS, MIDNIGHT + 3 * DAYS)
    ]
    ragged = [*divided(None, NOON - HOURS), *divided(NOON + 2 * HOURS, NOON + 2 * HOURS + DAYS)]
    assert missing(ragged, NOON, 0) == [Bounds(NOON - HOURS, NOON + 2 * HOURS)]
    endless = [*divided(MIDNIGHT - DAYS, MIDNIGHT), *divided(MIDNIGHT + DAYS, None)]
    assert missing(endless, NOON, 7) == [Bounds(MIDNIGHT, MIDNIGHT + DAYS)]


def test_an_interval_that_the_default_partition_may_hold_is_left_to_it():
    found = [*divided(None, MIDNIGHT - DAYS, MIDNIGHT), *divided(None, None, default=True)]
    assert missing(found, NOON, 1) == [Bounds(MIDNIGHT + DAYS, MIDNIGHT + 2 * DAYS)]


def test_an_interval_that_ends_now_is_over():
    found = divided(None, NOON - HOURS, NOON)
    assert missing(found, NOON, 0) == [Bounds(NOON, NOON + HOURS)]
    assert covered_until(found, NOON) == NOON


@pytest.mark.parametrize(
    "found",
    [
        divided(None, NOON),  # no interval is known
        divided(None, NOON - 31 * DAYS, NOON),  # months are not all equally long
        divided(None, MIDNIGHT, MIDNIGHT + DAYS, None),  # nothing can follow
    ],
    ids=["unknown", "months", "endless"],
)
def test_nothing_is_added_where_bounds_are_unknown(found):
    assert missing(found, NOON, 7) == []


def test_future_partitions_count_only_without_a_gap():
    found = divided(None, MIDNIGHT, MIDNIGHT + DAYS)
    later = divided(MIDNIGHT + 3 * DAYS, MIDNIGHT + 4 * DAYS)
    assert covered_until([*found, *later], NOON) == MIDNIGHT + DAYS
    assert covered_until([*found, *divided(MIDNIGHT + DAYS, None)], NOON) is None
    assert covered_until([*found, *divided(None, None, default=True)], NOON) is None
    assert covered_until(divided(None, MIDNIGHT, MIDNIGHT + DAYS, detaching=True), NOON) == NOON


@pytest.mark.parametrize(("width", "enough"), [(DAYS, 3), (HOURS, 60), (7 * DAYS, 3)], ids=["day", "hour", "week"])
def test_two_days_are_enough_or_two_intervals_that_are_longer(width, enough):
    start = {DAYS: MIDNIGHT, HOURS: NOON}.get(width, MONDAY)
    now = start if width > DAYS else NOON
    assert not is_short(divided(None, start, *(start + number * width for number in range(1, enough + 1))), now)
    assert is_short(divided(None, start, *(start + number * width for number in range(1, enough))), now)


def test_the_last_that_tells_the_interval_stays():
    found = divided(None, NOON, NOON + HOURS)
    assert "run ensure" in why_last(found, "p1")
    assert why_last(found, "p0") == ""
    assert why_last(divided(None, NOON), "p0") == ""


@pytest.mark.parametrize(
    ("upper", "contents", "why"),
    [
        (NOON, Contents(0, 0, NOON - HOURS, NOON), ""),
        (NOON, Contents(0, 0, None, NOON), ""),
        (NOON + HOURS, Contents(0, 0, None, NOON), "not over yet"),
        (None, Contents(0, 0, None, NOON), "not over yet"),
        (NOON, Contents(1, 0, None, NOON), "1 live"),
        (NOON, Contents(0, 2, NOON - HOURS, NOON), "2 on hold"),
        (NOON, Contents(0, 0, NOON, NOON), "the last due at 2026-03-01 12:00:00+00:00"),
    ],
)
def test_when_a_partition_can_be_dropped(upper, contents, why):
    assert why_kept(Bounds(None, upper), contents) == why


def test_a_partition_is_named_by_its_beginning():
    assert name_of("s", Bounds(MIDNIGHT, MIDNIGHT + DAYS)) == f"s.{TABLE}_p2026_03_01"
    assert name_of("s", Bounds(NOON, NOON + HOURS)) == f"s.{TABLE}_p2026_03_01_1200"
