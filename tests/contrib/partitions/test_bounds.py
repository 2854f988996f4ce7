"""Which partitions there should be, and which can go: pure."""

from __future__ import annotations

from itertools import pairwise

import pytest

from django_idempotency.contrib.partitions.layout import (
    TABLE,
    Layout,
    Partition,
    name_of,
    why_kept,
)
from tests.contrib.partitions.table import DAYS, HOURS, MIDNIGHT, NOON


def divided(*ends, **flags):
    """Partitions with these bounds, ``None`` for no end."""
    return [
        Partition(*bounds, number, f"p{number}", **flags)
        for number, bounds in enumerate(pairwise(ends))
    ]


def laid_out(*partitions):
    return Layout(schema="public", now=NOON, partitioned=True, partitions=partitions)


def test_new_partitions_follow_the_latest():
    found = divided(None, MIDNIGHT, MIDNIGHT + DAYS)
    assert laid_out(*found).missing(2) == [
        *pairwise(MIDNIGHT + number * DAYS for number in (1, 2, 3))
    ]
    assert laid_out(*found).missing(0) == []


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
    assert laid_out(*found).missing(ahead) == made


def test_an_interval_that_ends_now_is_over():
    found = divided(None, NOON - HOURS, NOON)
    assert laid_out(*found).missing(0) == [(NOON, MIDNIGHT + DAYS)]
    assert laid_out(*found).covered_until == NOON


def test_future_partitions_count_only_without_a_gap():
    found = divided(None, MIDNIGHT, MIDNIGHT + DAYS)
    later = divided(MIDNIGHT + 3 * DAYS, MIDNIGHT + 4 * DAYS)
    assert laid_out(*found, *later).covered_until == MIDNIGHT + DAYS
    assert laid_out(*found, *divided(MIDNIGHT + DAYS, None)).covered_until is None
    assert (
        laid_out(
            *divided(None, MIDNIGHT, MIDNIGHT + DAYS, detaching=True)
        ).covered_until
        == NOON
    )


def test_two_whole_future_days_are_enough():
    assert not laid_out(*divided(None, MIDNIGHT + 3 * DAYS)).is_short()
    assert laid_out(*divided(None, MIDNIGHT + 3 * DAYS - HOURS)).is_short()


@pytest.mark.parametrize(
    ("upper", "contents", "why"),
    [
        (NOON, (0, 0, NOON - HOURS, NOON), ""),
        (NOON, (0, 0, None, NOON), ""),
        (NOON + HOURS, (0, 0, None, NOON), "not over yet"),
        (None, (0, 0, None, NOON), "not over yet"),
        (NOON, (1, 0, None, NOON), "1 live"),
        (NOON, (0, 2, NOON - HOURS, NOON), "2 on hold"),
        (NOON, (0, 0, NOON, NOON), "the last due at 2026-03-01 12:00:00+00:00"),
    ],
)
def test_when_a_partition_can_be_dropped(upper, contents, why):
    assert why_kept(Partition(None, upper, 1, "p"), *contents) == why


def test_a_partition_is_named_by_its_beginning():
    assert name_of("s", MIDNIGHT) == f"s.{TABLE}_p2026_03_01"
    assert name_of("s", NOON) == f"s.{TABLE}_p2026_03_01_1200"
