"""What happened of late is told by the counters alone, and where that leads is plain arithmetic."""

from __future__ import annotations

import pytest

from django_idempotency.contrib.dashboard import formatting as of_counters
from django_idempotency.contrib.dashboard.activity import (
    Projection,
    activity,
    busiest,
    figures_of,
    project,
    projection,
    views,
)
from django_idempotency.reporting.events import families
from django_idempotency.stats import formatting
from django_idempotency.stats.formatting import amount, duration, share, volume
from django_idempotency.stats.queries import DAY, HOUR, Due, Size, size
from tests.support.happening import happen

REJECTED = {f"request_rejected.{why}": count for why, count in (("in_flight", 2), ("key_reused", 1), ("on_hold", 1))}
ENDED = {"key_completed": 9, "key_failed": 1, "key_released": 2, "key_reaped": 3, "stale_write_rejected": 4}


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        (
            {"key_claimed": 90, "key_taken_over": 1, "response_replayed": 5} | REJECTED,
            {"requests": 100, "replays": 5, "deduplicated": 0.05},
        ),
        ({"request_rejected.in_flight": 2, "request_rejected.wait_timeout": 3}, {"conflicts": 5}),
        (
            ENDED | {"store_failed": 5},
            {"requests": 0, "deduplicated": 0.0, "completed": 9, "failed": 1, "released": 2, "reaped": 3}
            | {"stale_writes": 4, "store_errors": 5},
        ),
        ({"key_claimed": 2, "claim_lost": 1, "response_replayed": 1}, {"requests": 2, "replays": 1, "lost": 1}),
    ],
    ids=["replays", "waited in vain", "outcomes of runs are no requests", "a rival was quicker"],
)
def test_an_activity_sums_up_what_was_counted(counts, expected):
    found = figures_of(counts)
    assert {name: found[name] for name in expected} == expected


@pytest.mark.django_db
def test_the_last_hour_and_the_last_day():
    happen("a", claimed=1)
    happen("b", hours=0.9, claimed=2)
    happen("a", hours=1.1, claimed=4)
    happen("a", hours=25, claimed=8)
    assert (activity(HOUR)["requests"], activity(DAY)["requests"]) == (3, 7)


@pytest.mark.django_db
def test_each_view_by_itself_and_the_busiest_first():
    for name, replayed in (("few", 1), ("many", 5), ("none", 0), ("some", 1)):
        happen(name, claimed=10, replayed=replayed, in_flight=1 - (name == "many"))
    found = views(DAY)
    assert found["many"] == figures_of({"key_claimed": 10, "response_replayed": 5, "request_rejected.in_flight": 0})
    assert [name for name, _activity in busiest(found, "replays")] == ["many", "few", "some"]
    assert [name for name, _activity in busiest(found, "conflicts", most=2)] == ["few", "none"]


@pytest.mark.django_db
def test_without_counters_there_is_no_projection():
    assert projection(size()) == Projection()


def test_the_projection_of_a_day_kept_for_two_days_is_twice_the_rows():
    found = project(Size(rows=100, bytes=5000), 1000, seconds=DAY, kept_for=2 * DAY)
    assert found == Projection(rows_per_day=1000, expected_rows=2000, expected_bytes=2000 * 50)


def test_half_a_day_is_taken_for_a_day_and_an_hour_is_too_little():
    assert project(Size(), 1000, seconds=DAY / 2, kept_for=DAY).rows_per_day == 2000
    assert project(Size(), 1000, seconds=HOUR - 1, kept_for=DAY) == Projection()


@pytest.mark.parametrize("unknown", [Size(), Size(rows=0, bytes=8192), Size(rows=10)])
def test_without_the_size_of_a_row_the_bytes_are_not_guessed(unknown):
    assert project(unknown, 1000, seconds=DAY, kept_for=DAY).expected_bytes is None


@pytest.mark.django_db
def test_the_projection_goes_by_the_last_day_and_the_retention(settings):
    settings.IDEMPOTENCY = {"RETENTION": 3 * DAY}
    happen("a", hours=30, completed=1000)
    happen("a", hours=2, completed=10)
    assert projection(size()).expected_rows == 30


@pytest.mark.postgresql
@pytest.mark.django_db
def test_the_size_is_that_of_table_and_indexes():
    found = size()
    assert found.bytes == found.table_bytes + found.index_bytes
    assert found.index_bytes > 0


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0, "0 s"),
        (0.254, "0.25 s"),
        (9.99, "9.99 s"),
        (42.4, "42 s"),
        (60, "1 min"),
        (3601, "1 h"),
        (3 * 3600 + 7 * 60 + 12, "3 h 7 min"),
        (2 * 86400 + 59, "2 d"),
        (86399.7, "1 d"),
    ],
)
def test_a_duration_in_its_two_greatest_units(seconds, words):
    assert duration(seconds) == words


def test_amounts_shares_and_volumes():
    assert (amount(1234567), amount(None), amount(10, 10)) == ("1,234,567", "unknown", "10 or more")
    assert (share(0.00424), volume(1536), volume(None)) == ("0.42 %", "1.5 KB", "unknown")


def test_every_figure_of_an_activity_has_a_name():
    of_wings = {event.name for family in families() for event in family.events}
    assert of_counters.NAMES.keys() == figures_of({}).keys() - of_wings


def test_figures_that_need_attention_are_marked():
    alarming = figures_of({}) | {"requests": 3, "on_hold": 1, "lost": 1, "stale_writes": 1}
    marked = [figure.name for figure in of_counters.happened(alarming) if figure.alarming]
    assert len(marked) == 2
    assert not any(figure.alarming for figure in of_counters.happened({**figures_of({}), "requests": 3, "replays": 3}))
    assert [formatting.backlog(Due(due=1, lag=lag), 10)[1].alarming for lag in (1800, 1801)] == [False, True]
