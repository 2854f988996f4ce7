"""Series into bars: none is hidden, none is higher than the chart, and the numbers are SVG's in every language."""

from __future__ import annotations

import pytest
from django.utils import translation
from hypothesis import given
from hypothesis import strategies as st

from django_idempotency.contrib.dashboard.charts import HEIGHT, LEAST, bars, level, segments, top_of

values = st.lists(st.floats(0, 1e12), min_size=1, max_size=200)


@pytest.mark.parametrize(
    ("numbers", "least", "top"),
    [
        ([], 1, 1),
        ([0, 0], 4, 4),
        ([2.1], 1, 3),
        ([5], 1, 5),
        ([5.01], 1, 6),
        ([11, 20], 1, 20),
        ([999], 1, 1000),
        ([0.0042], 0.01, 0.01),
        ([0.0101], 0.01, 0.015),
        ([0.3], 0.01, 0.3),
        ([0.9], 0.01, 1),
    ],
)
def test_the_axis_ends_at_a_round_number(numbers, least, top):
    assert top_of(numbers, least=least) == top


@given(values)
def test_bars_fit_the_chart_and_can_be_seen(numbers):
    top = top_of(numbers)
    drawn = bars(numbers, ["" for _number in numbers], top=top)
    assert len(drawn) == sum(number > 0 for number in numbers)
    for bar in drawn:
        assert LEAST <= float(bar.height) <= HEIGHT
        assert float(bar.y) + float(bar.height) == pytest.approx(HEIGHT, abs=0.01)


@given(values)
def test_bars_stand_side_by_side_each_in_its_place(numbers):
    drawn = bars(numbers, [str(place) for place in range(len(numbers))], top=top_of(numbers))
    for bar in drawn:
        place = int(bar.label)
        assert place < float(bar.x) < float(bar.x) + float(bar.width) < place + 1
        assert numbers[place] > 0


def test_a_bar_is_as_high_as_its_share_of_the_axis():
    (bar,) = bars([0, 25], ["", "here"], top=50)
    assert (bar.height, bar.y, bar.label) == ("50", "50", "here")
    assert level(10, top=50) == "80"


@given(st.lists(st.floats(0, 1e12), max_size=5))
def test_parts_follow_each_other_within_the_whole(numbers):
    parts = [(str(place), number) for place, number in enumerate(numbers)]
    end = 0.0
    for segment in segments(parts, whole=sum(numbers)):
        assert float(segment.x) == pytest.approx(end, abs=0.01)
        end = float(segment.x) + float(segment.width)
    assert end == pytest.approx(100 if any(numbers) else 0, abs=0.01)


def test_a_chart_of_nothing_has_no_segments():
    assert segments([("a", 0.0)], whole=0.0) == []


def test_numbers_have_a_point_in_every_language():
    with translation.override("de"):
        (bar,) = bars([1], [""], top=3)
    assert (bar.height, bar.x) == ("33.333", "0.1")
