"""What happened of late is told by the counters alone."""

from __future__ import annotations

import pytest

from django_idempotency.admin.lists import SITUATIONS
from django_idempotency.contrib.dashboard import formatting as of_counters
from django_idempotency.contrib.dashboard.activity import activity, figures_of, views
from django_idempotency.contrib.dashboard.formatting import busiest
from django_idempotency.maintenance import formatting
from django_idempotency.maintenance.formatting import amount, duration, share, volume
from django_idempotency.maintenance.stats import DAY, HOUR
from tests.support.happening import happen

REJECTED = {
    f"request_rejected.{why}": count
    for why, count in (("in_flight", 2), ("key_reused", 1), ("on_hold", 1))
}
ENDED = {
    "key_completed": 9,
    "key_failed": 1,
    "key_released": 2,
    "key_reaped": 3,
    "stale_write_rejected": 4,
}


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        (
            {"key_claimed": 90, "key_taken_over": 1, "response_replayed": 5} | REJECTED,
            {"requests": 100, "replays": 5, "deduplicated": 0.05},
        ),
        (
            {"request_rejected.in_flight": 2, "request_rejected.wait_timeout": 3},
            {"conflicts": 5},
        ),
        (
            ENDED | {"store_failed": 5},
            {
                "requests": 0,
                "deduplicated": 0.0,
                "completed": 9,
                "failed": 1,
                "released": 2,
                "reaped": 3,
            }
            | {"stale_writes": 4, "store_errors": 5},
        ),
        (
            {"key_claimed": 2, "claim_lost": 1, "response_replayed": 1},
            {"requests": 2, "replays": 1, "lost": 1},
        ),
    ],
    ids=[
        "replays",
        "waited in vain",
        "outcomes of runs are no requests",
        "a rival was quicker",
    ],
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
    assert found["many"] == figures_of(
        {"key_claimed": 10, "response_replayed": 5, "request_rejected.in_flight": 0}
    )
    assert [figure.name for figure in busiest(found, "replays")] == [
        "at many",
        "at few",
        "at some",
    ]
    assert [figure.name for figure in busiest(found, "conflicts", most=2)] == [
        "at few",
        "at none",
    ]


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
    assert (amount(1234567), amount(None), amount(10, 10)) == (
        "1,234,567",
        "unknown",
        "10 or more",
    )
    assert (share(0.00424), volume(1536), volume(None)) == (
        "0.42 %",
        "1.5 KB",
        "unknown",
    )


def test_figures_that_need_attention_are_marked():
    alarming = figures_of({}) | {
        "requests": 3,
        "on_hold": 1,
        "lost": 1,
        "stale_writes": 1,
    }
    marked = [
        figure.name for figure in of_counters.happened(alarming) if figure.alarming
    ]
    assert len(marked) == 2
    assert not any(
        figure.alarming
        for figure in of_counters.happened(
            {**figures_of({}), "requests": 3, "replays": 3}
        )
    )
    assert [formatting.figures({"lag": lag})[0].alarming for lag in (1800, 1801)] == [
        False,
        True,
    ]
    for name in ("stuck", "on_hold"):
        (figure,) = formatting.figures({name: 1})
        assert (figure.alarming, figure.situation) == (True, name)
        assert name in SITUATIONS
