"""``ensure`` makes the partitions that are missing, and nobody waits for it."""

from __future__ import annotations

import pytest
from django.db import connection, transaction

from django_idempotency import engine
from django_idempotency.contrib.partitions.catalog import read_layout
from django_idempotency.contrib.partitions.conversion import enable
from django_idempotency.contrib.partitions.layout import TABLE, midnight, name_of
from django_idempotency.contrib.partitions.upkeep import FAMILY, drop, ensure, status
from django_idempotency.values.exceptions import StoreUnavailable
from django_idempotency.values.outcomes import Keep, StoredResponse
from django_idempotency.values.policy import Policy
from tests.contrib.partitions.table import (
    DAYS,
    HOURS,
    MIDNIGHT,
    OLDEST,
    TODAY,
    YESTERDAY,
    rows,
)
from tests.support.callers import claim, effects, entry_point, paying
from tests.support.checks import PARTITIONS, found
from tests.support.partitioned import divide
from tests.support.sql import run_sql
from tests.support.threads import in_threads

pytestmark = [pytest.mark.postgresql, pytest.mark.plain_table]


def test_ensure_makes_what_is_missing_and_then_nothing(table):
    enable()
    made = ensure(ahead=3)
    assert len(made.created) == 1
    assert status().covered_until == midnight(read_layout().now) + 4 * DAYS
    again = ensure(ahead=3)
    assert (again.created, again.covered_until) == ((), made.covered_until)
    options = run_sql(
        "SELECT DISTINCT reloptions FROM pg_class WHERE oid = ANY(%s)",
        [[p.oid for p in read_layout().partitions]],
    )
    assert len(options) == 1


def test_ensure_makes_the_missing_partition_for_now(table):
    """Somebody has detached the one of today."""
    today = midnight(read_layout().now)
    divide(*(today + number * DAYS for number in range(9)))
    run_sql(f"ALTER TABLE {TABLE} DETACH PARTITION {TABLE}_p1")
    assert entry_point(paying)().status_code == 503
    (made,) = ensure().created
    assert made == name_of("public", today)
    assert entry_point(paying)().status_code == 201
    assert rows(made) == 1
    assert not status().short


def test_ensure_twice_at_once_makes_each_partition_once(table):
    enable()
    made = in_threads(4, lambda _: ensure(ahead=9))
    assert (
        len([name for one in made for name in one.created])
        == len({n for one in made for n in one.created})
        == 7
    )


def test_ensure_holds_up_nobody_and_waits_for_nobody(table, other_thread):
    enable()
    claimed = claim(policy=Policy())
    with engine.execution(claimed, Policy()) as run:
        assert other_thread(ensure).created
        run.verdict = Keep(StoredResponse(201))
    with transaction.atomic():
        run_sql(f"LOCK TABLE ONLY {TABLE} IN SHARE UPDATE EXCLUSIVE MODE")
        other_thread(run_sql, "SET statement_timeout = '30s'")
        assert other_thread(entry_point(paying), "other").status_code == 201


def test_infinity_is_not_a_time_of_expiry(table):
    divide(MIDNIGHT, MIDNIGHT + DAYS)
    for name, bounds in [
        (OLDEST, "'-infinity') TO ('2026-01-01'"),
        (TODAY, "'2026-04-01') TO ('infinity'"),
    ]:
        run_sql(f"DROP TABLE {name}")
        run_sql(
            f"CREATE TABLE {name} PARTITION OF {TABLE} (PRIMARY KEY (id)) FOR VALUES"
            f" FROM ({bounds})"
        )
    first, *_, last = read_layout().partitions
    assert (first.lower, last.upper) == (None, None)
    assert found(label=PARTITIONS) == []
    assert ensure().created == ()
    assert OLDEST in drop().dropped


def test_days_are_utc_in_any_connection_time_zone(table, other_thread, monkeypatch):
    monkeypatch.setitem(connection.settings_dict, "TIME_ZONE", "Asia/Kathmandu")
    other_thread(enable)
    other_thread(ensure)
    uppers = {partition.upper for partition in read_layout().partitions}
    assert {(upper.hour, upper.minute) for upper in uppers} == {(0, 0)}
    assert other_thread(read_layout).partitions == read_layout().partitions
    assert other_thread(run_sql, "SHOW timezone") == [("Asia/Kathmandu",)]


def test_the_check_warns_of_too_few_partitions(table):
    assert found(label=PARTITIONS) == []
    enable()
    ensure()
    assert found(label=PARTITIONS) == []
    run_sql(
        "DROP TABLE"
        f" {', '.join(partition.name for partition in read_layout().partitions[1:])}"
    )
    (message,) = found(label=PARTITIONS)
    assert (message.id, "ensure" in message.hint) == (
        "django_idempotency_partitions.W001",
        True,
    )


@pytest.mark.parametrize("mode", ["atomic", "lease"])
def test_without_a_partition_requests_get_503_and_a_hint(table, caplog, mode):
    divide(read_layout().now - HOURS)
    run_sql(f"DROP TABLE {YESTERDAY}")
    answer = entry_point(paying, mode=mode)()
    assert (answer.status_code, answer.headers["Retry-After"] in ("1", "2")) == (
        503,
        True,
    )
    assert effects() == 0
    assert "idempotency_partitions ensure" in caplog.text
    with pytest.raises(StoreUnavailable, match="idempotency_partitions ensure"):
        claim(policy=Policy())


def ahead():
    return [figures["ahead"] for figures in FAMILY.read("default").values()]


def test_a_missing_partition_shows_although_there_are_later_ones(table):
    assert ahead() == [], "the table is plain"
    today = midnight(read_layout().now)
    divide(*(today + number * DAYS for number in range(9)))
    assert ahead() == [], "the last one has no end"
    run_sql(f"ALTER TABLE {TABLE} DETACH PARTITION {TABLE}_p2")
    (short,) = ahead()
    assert 0 < short < 86400
