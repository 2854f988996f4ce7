"""Which partitions there should be, and which can go: pure."""

from __future__ import annotations

from itertools import pairwise

import pytest

from django_idempotency.contrib.partitions.layout import (
    TABLE,
    Contents,
    Partition,
    covered_until,
    is_short,
    missing,
    name_of,
    why_kept,
)
from tests.contrib.partitions.table import DAYS, HOURS, MIDNIGHT, NOON


def divided(*ends, **flags):
    """Partitions with these bounds, ``None`` for no end."""
    return [Partition(*bounds, number, f"p{number}", **flags) for number, bounds in enumerate(pairwise(ends))]


def test_new_partitions_follow_the_latest():
    found = divided(None, MIDNIGHT, MIDNIGHT + DAYS)
    assert missing(found, NOON, 2) == [*pairwise(MIDNIGHT + number * DAYS for number in (1, 2, 3))]
    assert missing(found, NOON, 0) == []


@pytest.mark.parametrize(
    ("later", "ahead", "made"),
    [
        ((), 1, [(MIDNIGHT, MIDNIGHT + DAYS), (MIDNIGHT + DAYS, MIDNIGHT + 2 * DAYS)]),
        ((MIDNIGHT + DAYS, None), 7, [(MIDNIGHT, MIDNIGHT + DAYS)]),
        ((NOON + HOURS, NOON + DAYS), 0, [(MIDNIGHT, NOON + HOURS)]),
        ((None, None), 7, []),  # the default partition
    ],
    ids=["nothing", "an endless one", "one that begins today", "a default partition"],
)
def test_a_gap_is_filled_from_today_on_up_to_what_is_there(later, ahead, made):
    found = [*divided(None, MIDNIGHT - 9 * DAYS), *divided(*later)]
    assert missing(found, NOON, ahead) == made


def test_an_interval_that_ends_now_is_over():
    found = divided(None, NOON - HOURS, NOON)
    assert missing(found, NOON, 0) == [(NOON, MIDNIGHT + DAYS)]
    assert covered_until(found, NOON) == NOON


def test_future_partitions_count_only_without_a_gap():
    found = divided(None, MIDNIGHT, MIDNIGHT + DAYS)
    later = divided(MIDNIGHT + 3 * DAYS, MIDNIGHT + 4 * DAYS)
    assert covered_until([*found, *later], NOON) == MIDNIGHT + DAYS
    assert covered_until([*found, *divided(MIDNIGHT + DAYS, None)], NOON) is None
    assert covered_until(divided(None, MIDNIGHT, MIDNIGHT + DAYS, detaching=True), NOON) == NOON


def test_two_whole_future_days_are_enough():
    assert not is_short(divided(None, MIDNIGHT + 3 * DAYS), NOON)
    assert is_short(divided(None, MIDNIGHT + 3 * DAYS - HOURS), NOON)


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
    assert why_kept(Partition(None, upper, 1, "p"), contents) == why


def test_a_partition_is_named_by_its_beginning():
    assert name_of("s", MIDNIGHT) == f"s.{TABLE}_p2026_03_01"
    assert name_of("s", NOON) == f"s.{TABLE}_p2026_03_01_1200"
