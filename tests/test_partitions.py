"""Partitions: what there should be, how a table gets and loses them, and that no key is lost or run twice by it."""

from __future__ import annotations

import json
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from uuid import uuid4

import pytest
from django.core.management import CommandError, call_command
from django.db import OperationalError, connection, connections, transaction
from hypothesis import strategies as st
from psycopg.errors import DeadlockDetected

from django_idempotency import checks, conversion, engine, interventions, maintenance, partitions
from django_idempotency.conversion import disable, enable, enable_plan, enabling
from django_idempotency.exceptions import NotConvertible, PartitionsUnsupported, StoreConflict, StoreUnavailable
from django_idempotency.models import IdempotencyRecord, Status
from django_idempotency.outcomes import Claimed, Keep, StoredResponse
from django_idempotency.partition_layout import (
    TABLE,
    Bounds,
    Contents,
    Interval,
    Partition,
    covered_until,
    detachment,
    future_width,
    is_short,
    layout,
    missing,
    reserves,
    to_divide,
    why_kept,
    why_last,
)
from django_idempotency.partitions import drop, ensure, name_of, status
from django_idempotency.policy import Policy
from django_idempotency.stats import stats
from django_idempotency.stores import store_for
from django_idempotency.stores.database import ahead, store_errors
from tests.callers import claim, door, effects, is_replay, operation, paying, record, shift
from tests.holder import commanding
from tests.partitioned import divide
from tests.properties import given
from tests.threads import OtherThread, in_threads, just_before, wait_little_for_locks
from tests.waiting import eventually

HOUR, DAY = 3600, 24 * 3600
NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)
DAYS, HOURS = timedelta(days=1), timedelta(hours=1)


# --- What there should be --------------------------------------------------------------------------------------------


def divided(*ends, **flags):
    """Partitions with these bounds, ``None`` for no end."""
    bounds = [Bounds(lower, upper) for lower, upper in pairwise(ends)]
    return [Partition(oid=number, name=f"p{number}", bounds=each, **flags) for number, each in enumerate(bounds)]


MIDNIGHT = NOON.replace(hour=0)
MONDAY = datetime(1970, 1, 1, tzinfo=UTC) + (NOON - datetime(1970, 1, 1, tzinfo=UTC)) // (7 * DAYS) * (7 * DAYS)
ACTIVITY = "SELECT 1 FROM pg_stat_activity WHERE datname = current_database()"


def test_partitions_go_on_from_the_latest_for_as_many_intervals_as_are_wanted():
    found = divided(None, MIDNIGHT, MIDNIGHT + DAYS)
    assert missing(found, NOON, 2) == [
        Bounds(MIDNIGHT + DAYS, MIDNIGHT + 2 * DAYS),
        Bounds(MIDNIGHT + 2 * DAYS, MIDNIGHT + 3 * DAYS),
    ]
    assert missing(found, NOON, 0) == []
    hourly = divided(None, NOON, NOON + HOURS)
    assert [bounds.lower for bounds in missing(hourly, NOON, 3)] == [NOON + number * HOURS for number in (1, 2, 3)]


def test_what_lies_between_a_latest_that_is_long_past_and_now_is_left_out():
    found = divided(None, MIDNIGHT - 9 * DAYS, MIDNIGHT - 8 * DAYS)
    assert missing(found, NOON, 1) == [Bounds(MIDNIGHT, MIDNIGHT + DAYS), Bounds(MIDNIGHT + DAYS, MIDNIGHT + 2 * DAYS)]


def test_a_gap_is_filled_from_now_on_as_far_as_it_is_free_and_in_step_with_the_latest():
    later = divided(MIDNIGHT + 2 * DAYS, MIDNIGHT + 3 * DAYS)
    assert [bounds.lower for bounds in missing([*divided(None, MIDNIGHT - 9 * DAYS), *later], NOON, 3)] == [
        *(MIDNIGHT, MIDNIGHT + DAYS, MIDNIGHT + 3 * DAYS)
    ]
    ragged = [*divided(None, NOON - HOURS), *divided(NOON + 2 * HOURS, NOON + 2 * HOURS + DAYS)]
    assert missing(ragged, NOON, 0) == [Bounds(NOON - HOURS, NOON + 2 * HOURS)]
    endless = [*divided(MIDNIGHT - DAYS, MIDNIGHT), *divided(MIDNIGHT + DAYS, None)]
    assert missing(endless, NOON, 7) == [Bounds(MIDNIGHT, MIDNIGHT + DAYS)]


def test_what_the_default_partition_may_have_by_now_is_left_to_it():
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
def test_there_is_nothing_to_add_where_the_next_one_is_not_ours_to_tell(found):
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


# --- Reserves: pure --------------------------------------------------------------------------------------------------


def reserved(*ends, seconds=HOUR):
    return divided(*ends, reserve=seconds)


def test_beyond_the_hours_ahead_days_are_in_reserve():
    found = divided(None, NOON, NOON + HOURS)
    assert [bounds.upper for bounds in missing(found, NOON, 12)] == [NOON + hour * HOURS for hour in range(2, 14)]
    after = NOON + 13 * HOURS
    assert reserves(found, NOON, 12) == [
        Bounds(after, MIDNIGHT + 2 * DAYS),
        Bounds(MIDNIGHT + 2 * DAYS, MIDNIGHT + 3 * DAYS),
        Bounds(MIDNIGHT + 3 * DAYS, MIDNIGHT + 4 * DAYS),
    ]
    assert reserves([*found, *reserved(NOON + HOURS, MIDNIGHT + 4 * DAYS)], NOON, 12) == []


def test_days_need_no_reserve_and_neither_does_what_is_not_ours_to_make():
    assert reserves(divided(None, MIDNIGHT, MIDNIGHT + DAYS), NOON, 7) == []
    assert reserves(divided(None, NOON), NOON, 7) == []
    assert reserves(divided(None, NOON, NOON + HOURS, None), NOON, 12) == []


def test_a_reserve_is_divided_when_it_begins_within_half_of_what_is_wanted_ahead():
    made = divided(None, *(NOON + hour * HOURS for hour in range(8)))
    found = [*made, *reserved(NOON + 7 * HOURS, MIDNIGHT + DAYS, MIDNIGHT + 2 * DAYS)]
    first, second = found[-2:]
    assert to_divide(found, NOON, 12) == []
    assert to_divide(found, NOON + HOURS, 12) == [first]
    assert to_divide(found, NOON, 14) == to_divide(found, NOON, 13) == [first]
    assert to_divide(found, NOON + 6 * HOURS, 1) == [first]
    assert to_divide(found, NOON + 6 * HOURS, 0) == []
    assert to_divide(found, NOON + 7 * HOURS, 12) == [second]  # the first is in use by now
    closed = replace(first, retired=True)
    assert to_divide([*made, closed], NOON + 9 * HOURS, 12) == [closed]
    assert missing(found, NOON + HOURS, 12) == []


def test_reserves_are_left_alone_where_nothing_would_take_their_place():
    soon = reserved(NOON + HOURS, MIDNIGHT + DAYS)
    assert to_divide([*divided(None, NOON, NOON + HOURS), *soon], NOON, 12) == soon
    for others in (
        divided(MIDNIGHT + DAYS, MIDNIGHT + 2 * DAYS),
        divided(MIDNIGHT + DAYS, MIDNIGHT + 32 * DAYS),
        divided(None, None, default=True),
    ):
        found = [*divided(None, NOON, NOON + HOURS), *soon, *others]
        assert to_divide(found, NOON, 12) == reserves(found, NOON, 12) == []


def test_hours_go_on_where_only_reserves_are_left_and_where_the_latest_piece_is_a_short_one():
    found = reserved(MIDNIGHT, MIDNIGHT + DAYS)
    assert {bounds.width for bounds in missing(found, NOON, 14)} == {HOURS}
    found += divided(MIDNIGHT + DAYS, MIDNIGHT + DAYS + HOURS / 4)
    assert {bounds.width for bounds in missing(found, NOON, 14)} == {HOURS}


@given(
    st.lists(st.tuples(st.integers(1, 80 * HOUR), st.integers(1, 40)), max_size=30),
    st.sampled_from([HOUR // 4, HOUR, 5 * HOUR, 7 * HOUR]),
    st.integers(0, HOUR),
)
def test_whenever_ensure_is_run_there_are_days_ahead_and_few_partitions(runs, width, offset):
    """Every third time no reserve can be divided."""
    width, now = timedelta(seconds=width), NOON + timedelta(seconds=offset)
    found = divided(None, now, now + width)
    most = 12
    for turn, (pause, count) in enumerate([(0, 12), *runs]):
        now, most, divides = now + timedelta(seconds=pause), max(most, count), turn % 3 < 2
        found = ensured(found, now, count, divides=divides)
        assert future_width(found) == width
        assert covered_until(found, now) > now + 3 * DAYS
        assert not is_short(found, now)
        ends = sorted((partition.bounds.lower, partition.bounds.upper) for partition in found[1:])
        assert all(upper <= lower for (_, upper), (lower, _) in pairwise(ends))
        future = [partition for partition in found[1:] if partition.bounds.lower > now]
        assert len(future) <= most + 8
        if divides:
            assert to_divide(found, now, count) == []


def ensured(found, now, count, *, divides):
    """As ``ensure`` leaves them, which looks anew after each that it makes."""

    def filled(found):
        while True:
            made = [Partition(0, "", bounds) for bounds in missing(found, now, count)]
            seconds = int(future_width(found).total_seconds())
            made += [Partition(0, "", bounds, reserve=seconds) for bounds in reserves(found, now, count)]
            if not made:
                return found
            found = sorted([*found, made[0]], key=lambda partition: partition.bounds.upper)

    found = filled(found)
    for reserve in to_divide(found, now, count) if divides else []:
        found = filled([partition for partition in found if partition != reserve])
    return found


def test_the_last_that_tells_the_interval_stays():
    found = divided(None, NOON, NOON + HOURS)
    assert "run ensure" in why_last(found, "p1")
    assert why_last(found, "p0") == ""
    assert why_last([*found, *reserved(NOON + HOURS, MIDNIGHT + DAYS)], "p1") == ""
    assert why_last(divided(None, NOON), "p0") == ""


@pytest.mark.parametrize(
    ("upper", "contents", "why"),
    [
        (NOON, Contents(0, 0, NOON - HOURS, NOON), ""),
        (NOON, Contents(0, 0, None, NOON), ""),
        (NOON + HOURS, Contents(0, 0, None, NOON), "not over yet"),
        (None, Contents(0, 0, None, NOON), "not over yet"),
        (NOON, Contents(1, 0, None, NOON), "1 live"),
        (NOON, Contents(0, 2, NOON - HOURS, NOON), "2 held"),
        (NOON, Contents(0, 0, NOON, NOON), "the last due at 2026-03-01 12:00:00+00:00"),
    ],
)
def test_a_partition_can_go_once_nothing_in_it_is_live_or_held_or_still_to_be_kept(upper, contents, why):
    assert why_kept(Bounds(None, upper), contents) == why


def test_a_partition_is_named_by_its_beginning():
    assert name_of("s", Bounds(MIDNIGHT, MIDNIGHT + DAYS)) == f"s.{TABLE}_p2026_03_01"
    assert name_of("s", Bounds(NOON, NOON + HOURS)) == f"s.{TABLE}_p2026_03_01_1200"


# --- Fixtures --------------------------------------------------------------------------------------------------------


def run_sql(sql, parameters=None):
    with connection.cursor() as cursor:
        cursor.execute(sql, parameters)
        return cursor.fetchall() if cursor.description else None


@pytest.fixture
def table(payer):
    """The record table, plain before the test and after it."""
    yield
    IdempotencyRecord.objects.all().delete()
    for partition in layout().partitions:
        if partition.detaching:
            run_sql(detachment(partition.name, begun=True))
    disable()
    for (name,) in run_sql("SELECT relname FROM pg_class WHERE relname LIKE %s AND relkind = 'r'", [f"{TABLE}\\_p%"]):
        run_sql(f"DROP TABLE {name}")


@pytest.fixture
def days(table):
    """Partitions of yesterday and before, of the last hour and now, and of tomorrow and later."""
    now = layout().now
    divide(now - DAYS, now - HOURS, now + DAYS)


@pytest.fixture
def elsewhere():
    """Another thread, with a connection of its own."""
    thread = OtherThread()
    yield thread
    thread.close()


observer = elsewhere  # one more

postgresql = pytest.mark.postgresql
plain_table = pytest.mark.plain_table
OLDEST, YESTERDAY, TODAY = (f"public.{TABLE}_p{number}" for number in range(3))


def rows(partition):
    return run_sql(f"SELECT count(*) FROM {partition}")[0][0]


def old(key="k", *, age=2 * HOUR, purge_at=-HOUR, **policy):
    """A key with an answer, that was claimed so many seconds ago, and whose time is up by default."""
    assert door(paying, **policy)(key).status_code == 201
    shift(key, created_at=-age, expires_at=purge_at, purge_at=purge_at)


@pytest.fixture
def impatient(monkeypatch):
    """Where locks are not to be had, it is given up soon."""
    monkeypatch.setattr(partitions, "PAUSE", 0.01)
    monkeypatch.setattr(conversion, "ATTEMPTS", 3)


# --- Enabling and disabling ------------------------------------------------------------------------------------------


def described():
    """All that makes the table what it is: columns, constraints, indexes, owner, grants and comment."""
    of_table = f"'{TABLE}'::regclass"
    return {
        "columns": run_sql(f"""
            SELECT attname, format_type(atttypid, atttypmod), attnotnull, pg_get_expr(adbin, adrelid), attstorage
            FROM pg_attribute LEFT JOIN pg_attrdef ON adrelid = attrelid AND adnum = attnum
            WHERE attrelid = {of_table} AND attnum > 0 ORDER BY attnum
        """),
        "constraints": run_sql(f"""
            SELECT conname, contype, convalidated FROM pg_constraint WHERE conrelid = {of_table} ORDER BY conname
        """),
        "indexes": [
            (name, re.sub(r"::[a-z ]+(\[\])?|[()]", "", predicate or ""))  # the casts are written in several ways
            for name, predicate in run_sql(f"""
                SELECT relname, pg_get_expr(indpred, indrelid) FROM pg_index JOIN pg_class ON oid = indexrelid
                WHERE indrelid = {of_table} ORDER BY relname
            """)
        ],
        "rest": run_sql(f"""
            SELECT relowner::regrole::text, relacl::text, obj_description(oid), relreplident
            FROM pg_class WHERE oid = {of_table}
        """),
        "options": run_sql(f"SELECT reloptions FROM pg_class WHERE oid = {of_table}"),
    }


@postgresql
@plain_table
@pytest.mark.parametrize("interval", list(Interval))
def test_enable_keeps_every_row_and_all_that_makes_the_table_what_it_is(table, interval):
    run_sql(f"COMMENT ON TABLE {TABLE} IS 'It''s here'; GRANT SELECT ON {TABLE} TO PUBLIC")
    try:
        old("old")
        live = claim("live", policy=Policy(mode="lease"))
        before, kept = described(), list(IdempotencyRecord.objects.order_by("pk").values())
        assert enable(interval).changed
        assert layout().partitioned
        assert list(IdempotencyRecord.objects.order_by("pk").values()) == kept
        after = described()
        assert after["columns"] == before["columns"]
        assert after["rest"] == before["rest"]
        # The primary key is each partition's own, and so are the storage parameters.
        assert set(before["constraints"]) - set(after["constraints"]) == {(f"{TABLE}_pkey", "p", True)}
        assert set(before["indexes"]) - set(after["indexes"]) == {(f"{TABLE}_pkey", "")}
        assert after["options"] == [(None,)]
        first, second = layout().partitions
        assert (first.bounds.lower, second.bounds.width) == (None, interval.width)
        for partition in (first, second):
            sql = "SELECT reloptions FROM pg_class WHERE oid = %s"
            assert run_sql(sql, [partition.oid]) == before["options"]
            assert partition.keyed
        assert store_for(Policy()).renew([live], Policy()) == {live.token}
        call_command("makemigrations", "django_idempotency", check=True, dry_run=True, verbosity=0)

        assert not enable(interval).changed
        assert disable().changed
        assert described() == before
        assert not disable().changed
        assert {row["key"] for row in IdempotencyRecord.objects.values()} == {"old", "live"}
    finally:
        run_sql(f"COMMENT ON TABLE {TABLE} IS NULL; REVOKE SELECT ON {TABLE} FROM PUBLIC")


@postgresql
@plain_table
def test_enable_does_what_its_plan_says_and_the_switch_looks_at_no_row(table, elsewhere):
    old()
    before = described()["indexes"]
    planned = enable_plan()
    sent = []

    def listen(execute, sql, *details):
        sent.append(sql)
        return execute(sql, *details)

    with connection.execute_wrapper(listen):
        enable()
    assert [sql for sql in sent if sql in planned.statements] == [*planned.before, *planned.switch]
    # Its indexes are those that were there: none was built anew, which takes long.
    of_first = f"SELECT indexrelid::regclass::text FROM pg_index WHERE indrelid = '{TABLE}_p0'::regclass"
    names = [name for (name,) in run_sql(of_first)]
    assert sorted(names) == [f"{name}_p0" for name, _predicate in before]


@postgresql
@plain_table
@pytest.mark.parametrize(
    ("obstacle", "removal", "named"),
    [
        (f"CREATE VIEW stuck AS SELECT * FROM {TABLE}", "DROP VIEW stuck", "view stuck"),
        (f"CREATE TABLE step (record uuid REFERENCES {TABLE})", "DROP TABLE step", "step_record_fkey"),
        (f"CREATE UNIQUE INDEX mine ON {TABLE} (token)", "DROP INDEX mine", "mine, which is unique"),
        (
            f"CREATE TRIGGER mine BEFORE UPDATE ON {TABLE} FOR EACH ROW"
            " EXECUTE FUNCTION suppress_redundant_updates_trigger()",
            f"DROP TRIGGER mine ON {TABLE}",
            "trigger mine",
        ),
        (f"ALTER TABLE {TABLE} SET UNLOGGED", f"ALTER TABLE {TABLE} SET LOGGED", "UNLOGGED"),
        (f"CREATE TABLE {TABLE}_p0 ()", f"DROP TABLE {TABLE}_p0", f"table {TABLE}_p0"),
    ],
    ids=["view", "foreign key", "unique index", "trigger", "unlogged", "left behind"],
)
@pytest.mark.parametrize("moment", ["SELECT", "LOCK TABLE"])
def test_what_a_conversion_would_lose_is_in_its_way(table, elsewhere, moment, obstacle, removal, named):
    """However late it comes."""
    before = described()
    try:
        with just_before(moment, lambda: elsewhere(run_sql, obstacle)), pytest.raises(NotConvertible, match=named):
            enable()
        assert not layout().partitioned
        assert not layout().halfway
    finally:
        run_sql(removal)
    assert described() == before
    assert enable().partitioned


@postgresql
@plain_table
@pytest.mark.usefixtures("table", "impatient")
def test_a_lock_that_can_not_be_had_leaves_the_table_as_it_was_and_nobody_waits_long(elsewhere):
    before = described()
    claimed = claim("live", policy=Policy())
    with engine.execution(claimed, Policy()) as run:
        with pytest.raises(NotConvertible, match="lock"):
            elsewhere(enable)
        run.settle(Keep(StoredResponse(201)))
    assert described() == before
    assert record("live").status == Status.COMPLETED


@postgresql
@plain_table
def test_an_enable_that_ends_early_takes_back_its_check(table):
    before = described()
    steps = enabling()
    next(steps)
    assert layout().halfway
    steps.close()
    assert described() == before


@postgresql
@plain_table
def test_a_check_is_not_taken_from_an_enable_that_lives(table, elsewhere):
    steps = enabling()
    next(steps)
    elsewhere(ensure)
    assert layout().halfway
    with pytest.raises(NotConvertible, match="Somebody else"):
        elsewhere(enable)
    assert [*steps][-1].partitioned


@postgresql
@plain_table
def test_requests_go_on_as_before_while_the_table_is_converted_and_back(table):
    """On connections that have prepared their statements, and in a session that has run the claim before."""
    stop = threading.Event()

    def pay_again_and_again(number):
        count = 0
        while not stop.is_set():
            key = f"{number}-{count}"
            first = door(paying)(key)
            again = door(paying)(key)
            assert (first.status_code, again.content, is_replay(again)) == (201, first.content, True)
            count += 1
        return count

    with ThreadPoolExecutor(1) as pool:
        traffic = pool.submit(in_threads, 3, pay_again_and_again)
        try:
            eventually(lambda: effects() > 10)
            for convert in (enable, disable, enable):
                convert()
                before = effects()
                eventually(lambda before=before: effects() > before + 10 or traffic.done())
        finally:
            stop.set()
    assert effects() == sum(traffic.result())


@postgresql
@plain_table
def test_a_session_that_knew_the_plain_table_claims_when_that_is_long_dropped(table, elsewhere):
    assert elsewhere(door(paying), "before").status_code == 201
    enable()
    IdempotencyRecord.objects.all().delete()
    now = layout().now
    run_sql(f"ALTER TABLE {TABLE} DETACH PARTITION {TABLE}_p0; DROP TABLE {TABLE}_p0")
    like = f"CREATE TABLE {TABLE}_p1 PARTITION OF {TABLE} (PRIMARY KEY (id))"
    run_sql(f"{like} FOR VALUES FROM (MINVALUE) TO ('{now + DAYS}')")
    assert elsewhere(door(paying), "after").status_code == 201
    assert is_replay(elsewhere(door(paying), "after"))


# --- Ensuring --------------------------------------------------------------------------------------------------------


@postgresql
@plain_table
def test_ensure_makes_what_is_missing_and_then_nothing(table):
    enable()
    made = ensure(ahead=3)
    assert len(made.created) == 1
    assert status().covered_until == layout().now.replace(hour=0, minute=0, second=0, microsecond=0) + 4 * DAYS
    again = ensure(ahead=3)
    assert (again.created, again.covered_until) == ((), made.covered_until)
    options = run_sql(
        "SELECT DISTINCT reloptions FROM pg_class WHERE oid = ANY(%s)", [[p.oid for p in layout().partitions]]
    )
    assert len(options) == 1
    assert all(partition.keyed for partition in layout().partitions)


@postgresql
@plain_table
def test_ensure_gives_now_its_partition_where_only_later_ones_are_left(table):
    """Somebody has detached the one of today, and its table still has the name."""
    today = layout().now.replace(hour=0, minute=0, second=0, microsecond=0)
    divide(*(today + number * DAYS for number in range(9)))
    run_sql(f"ALTER TABLE {TABLE} DETACH PARTITION {TABLE}_p1")
    run_sql(f"ALTER TABLE {TABLE}_p1 RENAME TO {name_of('public', Bounds(today, today + DAYS)).partition('.')[2]}")
    assert door(paying)().status_code == 503
    (made,) = ensure().created
    assert made == f"{name_of('public', Bounds(today, today + DAYS))}_2"
    assert door(paying)().status_code == 201
    assert rows(made) == 1
    assert not status().short


@postgresql
@plain_table
def test_ensure_twice_at_once_makes_each_partition_once(table):
    enable()
    made = in_threads(4, lambda _: ensure(ahead=9))
    assert len([name for one in made for name in one.created]) == len({n for one in made for n in one.created}) == 7


@postgresql
@plain_table
def test_ensure_holds_up_nobody_and_waits_for_nobody(table, elsewhere):
    enable()
    claimed = claim(policy=Policy())
    with engine.execution(claimed, Policy()) as run:
        assert elsewhere(ensure).created
        run.settle(Keep(StoredResponse(201)))
    with transaction.atomic():
        run_sql(f"LOCK TABLE ONLY {TABLE} IN SHARE UPDATE EXCLUSIVE MODE")
        elsewhere(run_sql, "SET statement_timeout = '5s'")
        assert elsewhere(door(paying), "other").status_code == 201


@postgresql
@plain_table
def test_a_future_partition_that_somebody_else_made_gets_its_key(table):
    enable()
    upper = layout().partitions[-1].bounds.upper
    sql = f"CREATE TABLE {TABLE}_px PARTITION OF {TABLE} FOR VALUES FROM ('{upper}') TO ('{upper + DAYS}')"
    run_sql(sql)
    assert not status().partitions[-1].keyed
    assert "django_idempotency.W027" in [message.id for message in checks.check_partitions(None, ["default"])]
    assert f"public.{TABLE}_px" in ensure().created
    assert all(standing.keyed for standing in status().partitions)


@postgresql
@plain_table
def test_new_partitions_have_the_storage_parameters_of_the_latest_that_has_some(table):
    run_sql(f"ALTER TABLE {TABLE} SET (fillfactor = 90, toast.autovacuum_enabled = false)")
    try:
        before = described()["options"]
        enable()
        upper = layout().partitions[-1].bounds.upper
        sql = f"CREATE TABLE {TABLE}_px PARTITION OF {TABLE} (PRIMARY KEY (id))"
        run_sql(f"{sql} FOR VALUES FROM ('{upper}') TO ('{upper + DAYS}')")
        made = ensure(ahead=5).created
        options = (
            "SELECT reloptions, (SELECT reloptions FROM pg_class WHERE oid = part.reltoastrelid) FROM pg_class part"
        )
        for name in made:
            found = run_sql(f"{options} WHERE oid = %s::regclass", [name])
            assert found == [(*before[0], ["autovacuum_enabled=false"])]
        disable()
        assert described()["options"] == before
    finally:
        disable()
        run_sql(f"ALTER TABLE {TABLE} RESET (fillfactor, toast.autovacuum_enabled)")


@postgresql
@plain_table
def test_infinity_is_no_end(table):
    divide(MIDNIGHT, MIDNIGHT + DAYS)
    for name, bounds in [(OLDEST, "'-infinity') TO ('2026-01-01'"), (TODAY, "'2026-04-01') TO ('infinity'")]:
        run_sql(f"DROP TABLE {name}")
        run_sql(f"CREATE TABLE {name} PARTITION OF {TABLE} (PRIMARY KEY (id)) FOR VALUES FROM ({bounds})")
    first, *_, last = layout().partitions
    assert (first.bounds.lower, last.bounds.upper) == (None, None)
    assert checks.check_partitions(None, ["default"]) == []
    assert ensure().created == ()
    assert OLDEST in drop().dropped


@postgresql
@plain_table
def test_a_partition_that_is_divided_itself_is_dropped_whole(days):
    run_sql(f"DROP TABLE {OLDEST}")
    divided_again = "FOR VALUES FROM (MINVALUE) TO ('2020-01-01') PARTITION BY HASH (id)"
    run_sql(f"CREATE TABLE {OLDEST} PARTITION OF {TABLE} {divided_again}")
    run_sql(f"CREATE TABLE {OLDEST}x PARTITION OF {OLDEST} FOR VALUES WITH (MODULUS 1, REMAINDER 0)")
    old(age=10 * 365 * DAY)
    assert rows(OLDEST) == 1
    assert OLDEST in drop().dropped
    assert IdempotencyRecord.objects.count() == 0
    assert door(paying)().status_code == 201


@postgresql
@plain_table
def test_days_are_those_of_utc_in_whatever_time_zone_the_connections_are(table, elsewhere, monkeypatch):
    monkeypatch.setitem(connection.settings_dict, "TIME_ZONE", "Asia/Kathmandu")
    elsewhere(enable)
    elsewhere(ensure)
    uppers = {partition.bounds.upper for partition in layout().partitions}
    assert {(upper.hour, upper.minute) for upper in uppers} == {(0, 0)}
    assert elsewhere(layout).partitions == layout().partitions
    assert elsewhere(run_sql, "SHOW timezone") == [("Asia/Kathmandu",)]


@postgresql
@plain_table
def test_the_check_warns_of_too_few_partitions(table):
    assert checks.check_partitions(None, ["default"]) == []
    enable()
    ensure()
    assert checks.check_partitions(None, ["default"]) == []
    run_sql(f"DROP TABLE {', '.join(partition.name for partition in layout().partitions[1:])}")
    (message,) = checks.check_partitions(None, ["default"])
    assert (message.id, "ensure" in message.hint) == ("django_idempotency.W026", True)


@postgresql
@plain_table
@pytest.mark.parametrize("mode", ["atomic", "lease"])
def test_without_a_partition_a_request_is_refused_and_told_what_to_run(table, caplog, mode):
    divide(layout().now - HOURS)
    run_sql(f"DROP TABLE {YESTERDAY}")
    answer = door(paying, mode=mode)()
    assert (answer.status_code, answer.headers["Retry-After"]) == (503, "1")
    assert effects() == 0
    assert "idempotency_partitions ensure" in caplog.text
    with pytest.raises(StoreUnavailable, match="idempotency_partitions ensure"):
        claim(policy=Policy())


# --- Reserves --------------------------------------------------------------------------------------------------------


def make(*made):
    """Partitions as ``ensure`` makes them: bounds in hours from half an hour ago on, and how long a reserve's are."""
    enable()
    run_sql(f"DROP TABLE {', '.join(partition.name for partition in layout().partitions)}")
    begin = layout().now - HOURS / 2
    for number, (lower, upper, reserve) in enumerate(made):
        bounds = Bounds(None if lower is None else begin + lower * HOURS, begin + upper * HOURS)
        name = f"public.{TABLE}_p{number}"
        for statement in partitions.creation("public", name, bounds, partitions.Template(), reserve=reserve):
            run_sql(statement)
    return begin


@pytest.fixture
def hours(table):
    """Partitions of these two hours, and the rest in reserve; when they begin."""
    return make((None, 0, None), (0, 1, None), (1, 2, None), (2, 20, HOUR), (20, 120, HOUR))


RESERVE = f"public.{TABLE}_p3"


def places(begin):
    """What there is from two hours later on: bounds, in hours from then on, and whether it is a reserve."""
    return [
        ((partition.bounds.lower - begin) / HOURS, (partition.bounds.upper - begin) / HOURS, bool(partition.reserve))
        for partition in layout().partitions
        if partition.bounds.lower is not None and partition.bounds.lower >= begin + 2 * HOURS
    ]


@postgresql
@plain_table
def test_hours_are_made_for_half_a_day_and_reserves_for_three_days(table):
    make((None, 0, None), (0, 1, None))
    made = ensure()
    standing = status().partitions
    assert [one.reserve for one in standing] == [*[False] * 14, *[True] * (len(standing) - 14)]
    assert 3 <= len(standing) - 14 <= 4
    assert all(one.name.endswith("_reserve") is one.reserve and one.keyed for one in standing)
    assert len(made.created) == len(standing) - 2
    assert status().covered_until >= layout().now + 3 * DAYS
    assert checks.check_partitions(None, ["default"]) == []
    assert ensure() == partitions.Ensured(covered_until=made.covered_until)


@postgresql
@plain_table
def test_a_reserve_whose_time_has_come_is_divided(hours, elsewhere):
    door(paying)("before")
    made = ensure()
    assert places(hours) == [*((hour, hour + 1, False) for hour in range(2, 13)), (13, 20, True), (20, 120, True)]
    assert (len(made.created), made.undivided) == (12, {})
    assert (ensure().created, checks.check_partitions(None, ["default"])) == ((), [])
    assert is_replay(elsewhere(door(paying), "before"))
    assert elsewhere(door(paying), "after").status_code == 201
    make_record(hours + 2.5 * HOURS)
    make_record(hours + 19.5 * HOURS)
    assert IdempotencyRecord.objects.count() == 4


@postgresql
@plain_table
def test_a_reserve_that_has_a_record_already_stays_with_it(hours, capsys):
    """The clock of the database was ahead for a while."""
    make_record(hours + 3 * HOURS)
    assert ensure().undivided == {RESERVE: "it has records already"}
    assert (rows(RESERVE), places(hours)) == (1, [(2, 20, True), (20, 120, True)])
    call_command("idempotency_partitions", "ensure")
    assert f"{RESERVE} stays undivided: it has records already" in capsys.readouterr().out


@postgresql
@plain_table
def test_a_record_that_comes_just_before_the_lock_keeps_the_reserve(hours, elsewhere):
    late = hours + 3 * HOURS
    with just_before(f"LOCK TABLE {RESERVE}", lambda: elsewhere(make_record, late)):
        assert RESERVE in ensure().undivided
    assert rows(RESERVE) == 1


@postgresql
@plain_table
def test_each_reserve_that_stays_is_told(table, capsys):
    begin = make((None, 0, None), (0, 1, None), (1, 2, None), (2, 4, HOUR), (4, 6, HOUR), (6, 96, HOUR))
    make_record(begin + 3 * HOURS)
    make_record(begin + 5 * HOURS)
    assert list(ensure().undivided) == [RESERVE, f"public.{TABLE}_p4"]
    run_sql(f"TRUNCATE TABLE {TABLE}_p4")
    divided = ensure()
    assert (list(divided.undivided), len(divided.created)) == ([RESERVE], 2)


@postgresql
@plain_table
def test_reserves_are_divided_while_views_run_all_the_time(hours, elsewhere, observer):
    """Somebody is always in a view, which has used the table."""
    held = []

    def come(number):
        policy = Policy(grace=0)
        while len(held) < 2 or not done.is_set():
            with engine.execution(claim(f"k{number}-{len(held)}", policy=policy), policy) as run:
                held.append(number)
                turns[number].wait(0.3)
                run.settle(Keep(StoredResponse(201)))

    turns, done = [threading.Event(), threading.Event()], threading.Event()
    with ThreadPoolExecutor(1) as pool:
        views = pool.submit(in_threads, 2, come)
        eventually(lambda: len(held) >= 2)
        try:
            assert elsewhere(ensure).undivided == {}
        finally:
            done.set()
            views.result()
    assert len(places(hours)) == 13


@postgresql
@plain_table
def test_a_reserve_stays_while_somebody_has_used_the_table_for_minutes(hours, elsewhere, monkeypatch):
    monkeypatch.setattr(partitions, "LONG_USE", partitions.LONG_USE.replace("1 min", "1 ms"))
    with long_transaction(elsewhere):
        run_sql("SELECT pg_sleep(0.002)")
        with in_300_ms(here):
            assert ensure().undivided == {RESERVE: "in use by a long transaction"}
    assert places(hours) == [(2, 20, True), (20, 120, True)]
    assert len(ensure().created) == 12


@postgresql
@plain_table
def test_nobody_waits_for_a_reserve_to_be_cleared(hours, elsewhere, observer):
    """It waits for a transaction; those that come meanwhile go on."""
    observer(run_sql, "SET statement_timeout = '2s'")
    with ThreadPoolExecutor(1) as pool:
        with long_transaction(elsewhere):
            ensuring = pool.submit(in_threads, 1, lambda _: ensure())
            waits = f"{ACTIVITY} AND query LIKE '%DETACH%' AND wait_event = 'virtualxid'"
            eventually(lambda: observer(run_sql, waits) or ensuring.done())
            for number in range(20):
                assert observer(door(paying), f"k{number}").status_code == 201
            assert not ensuring.done()
            assert observer(run_sql, "SHOW statement_timeout") == [("2s",)]  # none was begun again
        (ensured,) = ensuring.result()
    assert len(ensured.created) == 12


@postgresql
@plain_table
def test_while_the_table_is_converted_no_reserve_is_cleared(hours, elsewhere):
    with partitions.at_work("default", alone=True):
        assert elsewhere(ensure).undivided == {RESERVE: "the table is being converted"}
    assert len(ensure().created) == 12


@postgresql
@plain_table
def test_several_who_divide_a_reserve_at_once_do_it_once(hours):
    made = in_threads(4, lambda _: ensure())
    assert len([name for one in made for name in one.created]) == 12
    assert len(places(hours)) == 13


@postgresql
@plain_table
@pytest.mark.parametrize("step", [f"LOCK TABLE {RESERVE}", "ALTER TABLE .* DETACH", "DROP TABLE"])
def test_a_reserve_that_somebody_else_divides_meanwhile_is_divided(hours, elsewhere, step):
    with just_before(step, lambda: elsewhere(ensure)):
        assert ensure().undivided == {}
    assert len(places(hours)) == 13


@postgresql
@plain_table
def test_callers_run_each_key_once_while_a_reserve_is_divided(hours):
    """Every claim looks into what is just being changed."""
    divided = threading.Event()

    def come(number):
        if number == 0:
            try:
                return len(ensure().created)
            finally:
                divided.set()
        count = 0
        while count < 20 or not divided.is_set():
            answer = door(paying)(f"k{count}")
            count += answer.status_code == 201
        return count

    made, *counts = in_threads(5, come)
    assert made == 12
    assert effects() == max(counts) == IdempotencyRecord.objects.count()


@postgresql
@plain_table
def test_a_reserve_that_is_in_use_is_a_partition_like_others_and_hours_go_on_behind_it(table):
    """Nobody has run ensure for some hours."""
    begin = make((None, -6, None), (-6, -5, None), (-5, -4, None), (-4, 3, HOUR), (3, 96, HOUR))
    assert door(paying)().status_code == 201
    assert rows(RESERVE) == 1
    ensure()
    assert places(begin)[:3] == [(3, 4, False), (4, 5, False), (5, 6, False)]
    assert is_replay(door(paying)())


@postgresql
@plain_table
@pytest.mark.parametrize(
    ("step", "retired", "detached"),
    [
        ("LOCK TABLE .*_p3", False, False),
        ("ALTER TABLE .*_p3 ADD CONSTRAINT", False, False),
        ("ALTER TABLE .* DETACH .*_p3", True, False),
        ("DROP TABLE .*_p3", False, True),
        ("CREATE TABLE", False, True),
    ],
)
@pytest.mark.server
def test_a_division_that_is_killed_goes_on(hours, elsewhere, step, retired, detached):
    make_keys()
    kill("ensure", before=step)
    assert_keys_are_as_before(elsewhere)
    assert [partition.retired for partition in layout().partitions] == [
        *[False] * 3,
        *[retired] * (not detached),
        False,
    ]
    assert ("django_idempotency.W026" in warnings()) is (retired or detached)
    run_again("ensure")
    assert_keys_are_as_before(elsewhere)
    assert (len(places(hours)), warnings()) == (13, set())
    run_again("drop")
    assert run_sql("SELECT 1 FROM pg_class WHERE relname = %s", [f"{TABLE}_p3"]) == []


@postgresql
@plain_table
def test_the_plan_tells_how_a_reserve_is_divided(hours, told, capsys):
    planned = told("ensure", "--plan")["statements"]
    sent = []

    def listen(execute, sql, *details):
        sent.append(sql)
        return execute(sql, *details)

    with connection.execute_wrapper(listen):
        told("ensure")
    changes = [sql for sql in sent if re.match("LOCK TABLE public|TRUNCATE|CREATE|ALTER|DROP", sql)]
    assert [sql for sql in planned if sql not in ("BEGIN", "COMMIT")] == [
        sql.replace("IF EXISTS ", "") for sql in changes
    ]
    assert planned[0] == "BEGIN"
    assert planned.index("COMMIT") == 4
    call_command("idempotency_partitions", "status")
    assert capsys.readouterr().out.count("a reserve") == 2


@postgresql
@plain_table
def test_a_check_of_somebody_elses_is_no_mark_of_a_reserve(hours):
    for suffix in ("x", "99999999999", "0"):
        run_sql(f"ALTER TABLE {TABLE}_p1 ADD CONSTRAINT idempotency_record_reserve_{suffix} CHECK (true)")
    assert [partition.reserve for partition in layout().partitions] == [None, None, None, HOUR, HOUR]


@postgresql
@plain_table
def test_after_a_long_rest_drop_leaves_what_ensure_goes_on_from(table):
    make((None, -91, None), (-91, -90, None), (-90, -89, None), (-89, -80, HOUR))
    dropped = drop()
    assert "run ensure" in dropped.kept[RESERVE]
    assert [standing.kept for standing in status().partitions] == [dropped.kept[RESERVE]]
    assert len(ensure().created) > 12
    assert door(paying)().status_code == 201
    assert drop().dropped == (RESERVE,)


@postgresql
@plain_table
def test_status_leaves_out_what_somebody_drops_meanwhile(days, elsewhere):
    with just_before("SELECT nullif", lambda: elsewhere(run_sql, f"DROP TABLE {OLDEST}")):
        assert status().partitions[0].name == YESTERDAY


# --- One key, several partitions -------------------------------------------------------------------------------------


@postgresql
@plain_table
def test_yesterdays_key_is_replayed_and_refused_as_todays(days):
    old(purge_at=HOUR)
    assert rows(YESTERDAY) == 1
    assert is_replay(door(paying)())
    assert door(paying)("k", b"{}").status_code == 422
    assert effects() == 1


@postgresql
@plain_table
@pytest.mark.parametrize("mode", ["atomic", "lease"])
def test_an_expired_key_that_is_used_again_moves_to_todays_partition(days, mode):
    old(mode=mode)
    assert door(paying, mode=mode)().status_code == 201
    assert (rows(YESTERDAY), rows(TODAY), effects()) == (0, 1, 2)
    assert is_replay(door(paying, mode=mode)())


@postgresql
@plain_table
def test_of_many_who_use_an_expired_key_again_at_once_one_runs(days):
    for number in range(20):
        old(f"k{number}")
        answers = in_threads(4, lambda _, number=number: door(paying)(f"k{number}"))
        assert sorted({answer.status_code for answer in answers} - {409}) == [201]
        assert len({answer.content for answer in answers if answer.status_code == 201}) == 1
    assert effects() == 40


LEVELS = ["read committed", "repeatable read", "serializable"]


@postgresql
@plain_table
@pytest.mark.parametrize("level", LEVELS)
def test_a_key_claimed_across_midnight_is_claimed_once(table, elsewhere, observer, level):
    """Before midnight, not committed yet; and again after it, where another partition is in charge.

    The second is at whatever level. It has begun before the first commits, so its statement does not see that record.
    """
    elsewhere(run_sql, f"SET default_transaction_isolation = '{level}'")
    midnight = layout().now + timedelta(milliseconds=500)
    divide(midnight)
    policy, waiting = Policy(mode="lease"), f"{ACTIVITY} AND wait_event = 'advisory'"
    with ThreadPoolExecutor(1) as pool:
        with transaction.atomic():
            first = store_for(policy).claim(operation(), uuid4(), policy)
            eventually(lambda: run_sql("SELECT clock_timestamp() > %s", [midnight])[0][0])
            second = pool.submit(elsewhere, store_for(policy).claim, operation(), uuid4(), policy)
            eventually(lambda: second.done() or observer(run_sql, waiting))
        assert isinstance(first, Claimed)
        assert second.result(30).record.token == first.token
    assert (rows(OLDEST), rows(YESTERDAY)) == (1, 0)


@postgresql
@plain_table
@pytest.mark.parametrize("mode", ["atomic", "lease"])
@pytest.mark.parametrize("level", LEVELS)
def test_keys_are_claimed_and_replayed_at_every_isolation_level(days, elsewhere, level, mode):
    elsewhere(run_sql, f"SET default_transaction_isolation = '{level}'")
    first = elsewhere(door(paying, mode=mode))
    again = elsewhere(door(paying, mode=mode))
    assert (first.status_code, again.content, is_replay(again), effects()) == (201, first.content, True, 1)
    assert elsewhere(run_sql, "SHOW transaction_isolation") == [(level,)]


@postgresql
@plain_table
def test_above_read_committed_too_a_key_is_claimed_in_the_database_that_the_policy_states(days, other_alias):
    policy = Policy(using=other_alias)
    with connections[other_alias].cursor() as cursor:
        cursor.execute("SET default_transaction_isolation = 'repeatable read'")
    assert isinstance(store_for(policy).claim(operation(), uuid4(), policy), Claimed)


@postgresql
@plain_table
def test_callers_who_come_at_midnight_run_each_key_once(table):
    midnights = [layout().now + number * timedelta(milliseconds=100) for number in range(2, 22)]
    divide(*midnights)
    done = threading.Event()

    def pay(number):
        count = 0
        while not done.is_set():
            answer = door(paying)(f"k{count}")
            count += answer.status_code == 201  # everybody has had an answer to it, or will get the same one
            if layout().now > midnights[-1]:
                done.set()
        return count

    counts = in_threads(4, pay)
    assert effects() == max(counts) == IdempotencyRecord.objects.count()
    assert sum(rows(partition.name) > 0 for partition in layout().partitions) > 1


# --- Dropping --------------------------------------------------------------------------------------------------------


@postgresql
@plain_table
def test_drop_drops_what_is_over_and_keeps_what_holds_something(days):
    old("done", age=2 * DAY)
    old("late", purge_at=HOUR)
    old("done-too")
    door(paying)("today")
    dropped = drop()
    assert dropped.dropped == (OLDEST,)
    ((name, reason),) = dropped.kept.items()
    assert name == YESTERDAY
    assert reason.startswith("the last due at ")
    assert set(IdempotencyRecord.objects.values_list("key", flat=True)) == {"late", "done-too", "today"}
    shift("late", expires_at=-1, purge_at=-1)
    assert drop().dropped == (YESTERDAY,)
    assert drop() == partitions.Dropped()
    assert is_replay(door(paying)("today"))


def live(**policy):
    claim(policy=Policy(**policy))
    shift(created_at=-2 * HOUR, locked_at=-2 * HOUR, locked_until=-HOUR, expires_at=-HOUR, purge_at=-HOUR)


@postgresql
@plain_table
def test_a_partition_with_a_live_or_a_held_key_is_never_dropped_however_old(days):
    live(mode="lease", on_crash="hold")
    assert drop().kept == {YESTERDAY: "1 live"}
    maintenance.reap()
    shift(expires_at=-HOUR, purge_at=-HOUR)
    assert drop().kept == {YESTERDAY: "1 held"}
    interventions.release(record().pk)
    assert drop().dropped == (YESTERDAY,)


@postgresql
@plain_table
def test_status_tells_why_a_partition_stays(days):
    old(purge_at=HOUR)
    oldest, yesterday, today, tomorrow = status().partitions
    assert (oldest.kept, oldest.lower, oldest.live) == ("", None, 0)
    assert yesterday.kept.startswith("the last due at ")
    assert yesterday.purge_at == record().purge_at
    assert (today.kept, tomorrow.kept, tomorrow.upper) == ("not over yet", "not over yet", None)
    assert all(partition.bytes > 0 for partition in status().partitions)


LOCK_PARTITION = "LOCK TABLE public"


@postgresql
@plain_table
def test_a_key_that_is_used_again_just_before_the_lock_lives_on(days, elsewhere):
    old()
    with just_before(LOCK_PARTITION + f".{TABLE}_p1", lambda: elsewhere(door(paying))):
        drop()
    assert effects() == 2
    assert is_replay(door(paying)())


@postgresql
@plain_table
def test_a_key_that_comes_to_life_in_its_place_just_before_the_lock_keeps_the_partition(days, elsewhere):
    """Decided by a retry while it was not expired yet, and written now."""
    old()
    policy, mine = Policy(mode="lease"), Claimed(operation(), uuid4())
    store = store_for(policy)

    def take_over():
        IdempotencyRecord.objects.update(status=Status.FAILED)
        with store.contend(mine.id, policy) as seen:
            IdempotencyRecord.objects.update(
                status=Status.PROCESSING,
                token=mine.token,
                locked_at=ahead(0),
                locked_until=ahead(60),
                response_status=None,
                response_headers=None,
                response_body=None,
            )
        return seen

    with just_before(LOCK_PARTITION + f".{TABLE}_p1", lambda: elsewhere(take_over)):
        assert drop().kept == {YESTERDAY: "1 live"}
    assert store.complete(mine, StoredResponse(201), policy)


@postgresql
@plain_table
@pytest.mark.usefixtures("impatient")
def test_a_row_that_somebody_has_locked_keeps_its_partition(days, elsewhere):
    """Somebody who is about to use an expired key again: the row is about to move."""
    old()
    policy, token = Policy(mode="lease"), uuid4()
    store = store_for(policy)
    with store.contend(operation().id, policy) as seen:
        assert "in use" in elsewhere(drop).kept[YESTERDAY]
        claimed = store.take(seen, operation(), token, policy)
    assert drop().dropped == (OLDEST, YESTERDAY)
    assert record().token == token
    assert store.complete(claimed, StoredResponse(201), policy)


@postgresql
@plain_table
def test_a_claim_that_began_before_the_end_of_a_partition_finds_it_closed(days):
    """As late as that a statement must hang for as long as keys are kept; but then it must not be lost."""
    with pytest.raises(StoreConflict), just_before("ALTER TABLE .* DETACH .*_p1", insert_late):
        drop()
    assert drop().dropped == (YESTERDAY,)


def insert_late():
    with store_errors():
        make_record(layout().now - 2 * HOURS)


def make_record(created_at):
    """By a raw INSERT, past the claim."""
    columns = (
        "id, scope, key, method, path, fingerprint, mode, created_at, status, updated_at, expires_at, purge_at,"
        " response_status, response_headers"
    )
    run_sql(f"""
        INSERT INTO {TABLE} ({columns}) SELECT gen_random_uuid(), 's', 'k', '', '', '', 'atomic',
            '{created_at}', 'completed', now(), now(), now(), 200, '{{}}'
    """)


@contextmanager
def long_transaction(elsewhere):
    """Somebody uses the table."""
    block = elsewhere(transaction.atomic)
    elsewhere(block.__enter__)
    elsewhere(run_sql, f"LOCK TABLE ONLY {TABLE} IN ACCESS SHARE MODE")
    try:
        yield
    finally:
        elsewhere(block.__exit__, None, None, None)


@contextmanager
def in_300_ms(thread):
    thread(run_sql, "SET statement_timeout = '300ms'")
    try:
        yield
    finally:
        thread(run_sql, "RESET statement_timeout")


def here(work, *arguments):
    return work(*arguments)


@postgresql
@plain_table
def test_a_detach_that_was_cancelled_while_it_waited_is_finished(days, elsewhere):
    old()
    with long_transaction(elsewhere), in_300_ms(here):
        assert "timeout" in drop().kept[OLDEST]
    oldest, *_ = status().partitions
    assert (oldest.retired, oldest.detaching) == (True, True)
    assert checks.check_partitions(None, ["default"]) == []
    assert drop().dropped == (OLDEST, YESTERDAY)


def half_detach(partition, elsewhere, other):
    """As somebody leaves it who gives up while he waits."""
    with long_transaction(elsewhere), in_300_ms(other), pytest.raises(OperationalError):
        other(run_sql, f"ALTER TABLE {TABLE} DETACH PARTITION {partition} CONCURRENTLY")


@postgresql
@plain_table
def test_beside_a_partition_that_somebody_else_has_half_detached_all_stay_until_he_is_done(days, elsewhere, observer):
    old()
    half_detach(YESTERDAY, elsewhere, observer)
    (message,) = checks.check_partitions(None, ["default"])
    assert (message.id, "FINALIZE" in message.msg) == ("django_idempotency.W029", True)
    kept = drop().kept
    assert kept.keys() == {OLDEST, YESTERDAY}
    assert all(f"DETACH PARTITION {YESTERDAY} FINALIZE" in reason for reason in kept.values())
    assert rows(YESTERDAY) == 1
    run_sql(f"ALTER TABLE {TABLE} DETACH PARTITION {YESTERDAY} FINALIZE")
    assert drop().dropped == (OLDEST,)
    assert rows(YESTERDAY) == 1


@postgresql
@plain_table
def test_a_partition_that_somebody_begins_to_detach_just_before_the_lock_keeps_its_rows(days, elsewhere, observer):
    old()
    with just_before(LOCK_PARTITION + f".{TABLE}_p1", lambda: half_detach(YESTERDAY, elsewhere, observer)):
        assert "FINALIZE" in drop().kept[YESTERDAY]
    assert rows(YESTERDAY) == 1


@postgresql
@plain_table
@pytest.mark.parametrize("when", ["SELECT", "LOCK TABLE"])
def test_disable_copies_nothing_while_a_partition_is_half_detached(days, elsewhere, observer, when):
    """It would not see the rows in it, and drop them."""
    old()
    with (
        just_before(when, lambda: half_detach(YESTERDAY, elsewhere, observer)),
        pytest.raises(NotConvertible, match=f"DETACH PARTITION {YESTERDAY} FINALIZE"),
    ):
        disable()
    assert layout().partitioned
    run_sql(f"ALTER TABLE {TABLE} DETACH PARTITION {YESTERDAY} FINALIZE")
    assert disable().changed
    assert rows(YESTERDAY) == 1


@postgresql
@plain_table
def test_a_name_that_another_partition_has_by_the_time_of_the_lock_is_not_dropped(days, elsewhere):
    old()
    door(paying)("today")
    shift("today", expires_at=-1, purge_at=-1)

    def swap():
        for name, other in ((YESTERDAY, "px"), (TODAY, f"{TABLE}_p1"), ("px", f"{TABLE}_p2")):
            run_sql(f"ALTER TABLE {name} RENAME TO {other}")

    with just_before(LOCK_PARTITION + f".{TABLE}_p1", lambda: elsewhere(swap)):
        assert drop().kept == {YESTERDAY: "not over yet"}
    assert {row["key"] for row in IdempotencyRecord.objects.values()} == {"k", "today"}
    assert door(paying)("new").status_code == 201
    assert drop().dropped == (TODAY,)


@postgresql
@plain_table
@pytest.mark.parametrize("step", ["LOCK", "ALTER TABLE .* DETACH", "DROP TABLE"])
def test_while_partitions_are_dropped_the_table_is_not_converted(days, elsewhere, step):
    """A name could mean another table in between."""
    refused = []

    def convert():
        with pytest.raises(NotConvertible, match="Somebody else"):
            disable()
        refused.append(True)

    old()
    with just_before(f"{step} .*{TABLE}_p1", lambda: elsewhere(convert)):
        assert drop().dropped == (OLDEST, YESTERDAY)
    assert refused
    assert disable().changed


@postgresql
@plain_table
def test_while_the_table_is_converted_nothing_is_dropped(days, elsewhere):
    old()
    dropped = []
    with just_before("LOCK TABLE", lambda: dropped.append(elsewhere(drop))):
        disable()
    assert dropped == [partitions.Dropped(kept=dict.fromkeys((OLDEST, YESTERDAY), partitions.CONVERTED))]
    assert record()


@postgresql
@plain_table
def test_nobody_waits_for_a_drop_that_waits_for_a_long_transaction(days, elsewhere):
    old()
    claimed = claim("long", policy=Policy())
    with ThreadPoolExecutor(1) as pool, engine.execution(claimed, Policy()) as run:
        dropping = pool.submit(in_threads, 1, lambda _: drop())
        waits = f"{ACTIVITY} AND query LIKE '%DETACH%' AND wait_event = 'virtualxid'"
        eventually(lambda: elsewhere(run_sql, waits) or dropping.done())
        elsewhere(run_sql, "SET statement_timeout = '2s'")
        for number in range(20):
            assert elsewhere(door(paying), f"k{number}").status_code == 201
        assert not dropping.done()
        run.settle(Keep(StoredResponse(201)))
    ((dropped),) = dropping.result()
    assert dropped.dropped == (OLDEST, YESTERDAY)


@postgresql
@plain_table
@pytest.mark.parametrize("step", ["LOCK", "ALTER TABLE .* DETACH", "DROP TABLE"])
def test_what_somebody_else_drops_meanwhile_is_gone(days, elsewhere, step):
    old()
    with just_before(f"{step} .*{TABLE}_p1", lambda: elsewhere(drop)):
        dropped = drop()
    assert dropped.kept in ({}, {YESTERDAY: partitions.GONE})
    assert len(layout().partitions) == 2
    assert run_sql("SELECT 1 FROM pg_class WHERE relname = %s", [f"{TABLE}_p1"]) == []


@postgresql
@plain_table
def test_two_who_drop_at_once_are_harmless(days):
    old()
    gone = in_threads(3, lambda _: drop())
    assert {name for one in gone for name in one.dropped} == {OLDEST, YESTERDAY}
    assert not layout().partitions[0].retired


@postgresql
@plain_table
def test_who_is_a_deadlocks_victim_while_it_looks_looks_again(days, monkeypatch):
    """Of two who drop, one may look at a partition that the other has locked while it waits for all who look."""
    looks = 0

    def look(**named):
        nonlocal looks
        looks += 1
        if looks in (1, 3, 6):
            raise OperationalError("deadlock detected") from DeadlockDetected()
        return layout(**named)

    old()
    monkeypatch.setattr(partitions, "layout", look)
    monkeypatch.setattr(partitions, "PAUSE", 0)
    assert OLDEST in drop().dropped


def fill(age, count):
    """So many answers, made so long ago and due by and by, and one held key."""
    run_sql(f"""
        INSERT INTO {TABLE} (
            id, scope, key, method, path, fingerprint, mode, created_at, status, updated_at, expires_at, purge_at, held,
            response_status, response_headers
        )
        SELECT gen_random_uuid(), 's', 'k', '', '', '', 'lease', now() - interval '{age} s',
            CASE WHEN n = 1 THEN 'failed' ELSE 'completed' END, now(), now() + make_interval(secs => n - {count // 2}),
            now() + make_interval(secs => n - {count // 2}), n = 1, CASE WHEN n > 1 THEN 200 END,
            CASE WHEN n > 1 THEN '{{}}'::jsonb END
        FROM generate_series(1, {count}) AS n
    """)
    run_sql(f"VACUUM ANALYZE {TABLE}")


@contextmanager
def explaining(words, options):
    """The plans, in the order that they are sent, of this thread's statements with these words."""
    plans = []

    def explain(execute, sql, parameters, many, context):
        if words in sql:
            with connections["default"].connection.cursor() as cursor:
                cursor.execute(f"EXPLAIN ({options}, FORMAT JSON) {sql}", parameters)
                plans.append(cursor.fetchone()[0][0]["Plan"])
        return execute(sql, parameters, many, context)

    with connection.execute_wrapper(explain):
        yield plans


def buffers_of(work, words):
    """How many each statement with these words read that ``work`` sends."""
    with explaining(words, "ANALYZE, BUFFERS") as plans:
        work()
    return [plan["Shared Hit Blocks"] + plan["Shared Read Blocks"] for plan in plans]


@postgresql
@plain_table
def test_what_keeps_a_partition_is_found_by_the_partial_indexes(days):
    fill(2 * HOUR, 20_000)
    assert [standing.held for standing in status().partitions] == [0, 1, 0, 0]
    looks = buffers_of(status, "max(purge_at)")
    assert len(looks) == 4
    assert max(looks) < 20


def clean_up():
    next(maintenance.cleaning(batch=100))


def reap():
    next(maintenance.reaping(batch=100))


def pay():
    door(paying)("new")


@postgresql
@plain_table
@pytest.mark.parametrize(
    ("work", "words", "most"),  # cleaning up, it looks and deletes at once
    [(clean_up, "SKIP LOCKED", 800), (reap, "SKIP LOCKED", 500), (pay, "django_idempotency_claim", 500)],
    ids=["cleanup", "reap", "claim"],
)
def test_over_all_partitions_only_the_rows_that_are_meant_are_read(days, work, words, most):
    fill(2 * HOUR, 20_000)
    fill(0, 20_000)
    (read,) = buffers_of(work, words)
    assert read < most


def ways(plan):
    """How a plan reads the partitions with rows: pairs of the partition and the index, or else the kind of scan."""
    parts = plan.get("Plans", [])
    found = {way for part in parts for way in ways(part)}
    if plan.get("Relation Name") in (f"{TABLE}_p1", f"{TABLE}_p2") and plan["Node Type"] != "ModifyTable":
        by = parts[0] if plan["Node Type"] == "Bitmap Heap Scan" else plan
        found.add((plan["Relation Name"], by.get("Index Name", by["Node Type"])))
    return found


def both_by(*columns):
    return [{(f"{TABLE}_p{number}", f"{TABLE}_p{number}_{column}") for number in (1, 2)} for column in columns]


(by_purge_at,) = both_by("purge_at_idx")


@postgresql
@plain_table
@pytest.mark.parametrize(
    ("work", "expected"),
    [
        (clean_up, [{*by_purge_at, *((part, "Tid Scan") for part, _index in by_purge_at)}]),
        (reap, both_by("locked_until_idx", "pkey")),
        (pay, [{(f"{TABLE}_p2", "Tid Scan")}] * 2),
    ],
    ids=["cleanup", "reap", "completion"],
)
def test_maintenance_goes_by_the_indexes_and_completion_into_one_partition(days, work, expected):
    """Looking and then writing, at once or not; locking the claimed record and then completing it."""
    live(mode="lease")
    fill(2 * HOUR, 20_000)
    fill(0, 20_000)
    with explaining(TABLE, "COSTS OFF") as plans:
        work()
    assert [ways(plan) for plan in plans] == expected


# --- Killed between two steps ----------------------------------------------------------------------------------------

COMMAND = "idempotency_partitions"


def make_keys():
    door(paying)("done")
    claim("live", policy=Policy(mode="lease"))


def assert_keys_are_as_before(elsewhere, paid=2):
    """At once: what waits for a lock that nobody gives back fails."""
    elsewhere(wait_little_for_locks)
    assert is_replay(elsewhere(door(paying), "done"))
    assert elsewhere(door(paying, mode="lease"), "live").status_code == 409
    assert elsewhere(door(paying), "new").status_code == 201
    assert is_replay(elsewhere(door(paying), "new"))
    assert IdempotencyRecord.objects.filter(key__in=["done", "live", "new"]).count() == 3
    assert effects() == paid


def kill(*arguments, before):
    with commanding(COMMAND, *arguments, before=before) as process:
        process.kill()


def run_again(*arguments):
    """Once the server has noticed that the other one is dead."""
    at_work = (
        f"{ACTIVITY} AND pid IN (SELECT pid FROM pg_locks WHERE locktype = 'advisory') AND pid <> pg_backend_pid()"
    )
    eventually(lambda: not run_sql(at_work))
    call_command(COMMAND, *arguments, verbosity=0)


def warnings():
    return {message.id for message in checks.check_partitions(None, ["default"])}


@postgresql
@plain_table
@pytest.mark.parametrize(
    ("step", "halfway", "partitioned"),
    [
        ("ALTER TABLE .* ADD CONSTRAINT", False, False),
        ("ALTER TABLE .* VALIDATE", True, False),
        ("LOCK TABLE", True, False),
        ("ALTER TABLE .* ATTACH PARTITION", True, False),
        ("LOCK TABLE ONLY", False, True),
    ],
)
@pytest.mark.server
def test_an_enable_that_is_killed_can_be_begun_again(table, elsewhere, step, halfway, partitioned):
    plain = described()
    make_keys()
    kill("enable", "--yes", before=step)
    assert_keys_are_as_before(elsewhere)
    assert (status().halfway, status().partitioned) == (halfway, partitioned)
    assert ("django_idempotency.W028" in warnings()) is halfway
    run_again("enable", "--yes")
    assert_keys_are_as_before(elsewhere)
    assert (status().halfway, status().partitioned, warnings()) == (False, True, set())
    disable()
    assert described() == plain


@postgresql
@plain_table
@pytest.mark.parametrize("step", ["ALTER TABLE .* VALIDATE", "LOCK TABLE"])
@pytest.mark.server
def test_ensure_takes_back_what_an_enable_left_that_was_killed(table, step):
    plain = described()
    kill("enable", "--yes", before=step)
    run_again("ensure")
    assert (described(), warnings()) == (plain, set())


@postgresql
@plain_table
@pytest.mark.parametrize("step", ["INSERT", "DROP TABLE", "ALTER TABLE .* ADD CONSTRAINT"])
@pytest.mark.server
def test_a_disable_that_is_killed_leaves_the_table_partitioned_and_can_be_begun_again(table, elsewhere, step):
    plain = described()
    make_keys()
    enable()
    before = layout().partitions
    kill("disable", "--yes", before=step)
    assert_keys_are_as_before(elsewhere)
    assert layout().partitions == before
    run_again("disable", "--yes")
    assert_keys_are_as_before(elsewhere)
    assert described() == plain


@postgresql
@plain_table
@pytest.mark.server
def test_nobody_waits_for_the_copying_of_a_disable_that_was_killed(table, elsewhere):
    """The server would go on with it, under its lock, and notice only at its end."""
    door(paying)("done")
    enable()
    run_sql(f"ALTER TABLE {TABLE} ADD CONSTRAINT slow CHECK (pg_sleep(60)::text = '') NOT VALID")
    try:
        with commanding(COMMAND, "disable", "--yes", before="INSERT") as process:
            process.go_on()
            eventually(lambda: run_sql(f"{ACTIVITY} AND wait_event = 'PgSleep'"))
            process.kill()
        elsewhere(wait_little_for_locks)
        assert is_replay(elsewhere(door(paying), "done"))
    finally:
        run_sql(f"ALTER TABLE {TABLE} DROP CONSTRAINT slow")


@postgresql
@plain_table
@pytest.mark.parametrize("step", ["ALTER TABLE .* ATTACH PARTITION", "CREATE TABLE {second}", "ALTER TABLE {second} "])
@pytest.mark.server
def test_an_ensure_that_is_killed_can_be_begun_again(table, elsewhere, step):
    make_keys()
    enable()
    upper = layout().partitions[-1].bounds.upper
    second = name_of("public", Bounds(upper + DAYS, upper + 2 * DAYS))
    kill("ensure", before=step.format(second=second))
    assert_keys_are_as_before(elsewhere)
    assert layout().partitions[-1].bounds.upper == upper + ("{" in step) * DAYS
    run_again("ensure")
    assert_keys_are_as_before(elsewhere)
    assert (warnings(), ensure().created) == (set(), ())


@postgresql
@plain_table
@pytest.mark.parametrize(
    ("step", "retired", "left_behind"),
    [
        ("LOCK TABLE .*_p1", [False], ()),
        ("ALTER TABLE .*_p1 ADD CONSTRAINT", [False], ()),
        ("ALTER TABLE .* DETACH .*_p1", [True], ()),
        ("DROP TABLE .*_p1", [], (YESTERDAY,)),
    ],
)
@pytest.mark.server
def test_a_drop_that_is_killed_goes_on(days, elsewhere, capsys, step, retired, left_behind):
    old("old")
    make_keys()
    kill("drop", before=step)
    if not any(retired) and not left_behind:
        assert rows(YESTERDAY) == 1
    found = status()
    assert [standing.retired for standing in found.partitions if standing.name == YESTERDAY] == retired
    assert found.left_behind == left_behind
    call_command(COMMAND, "status")
    assert capsys.readouterr().out.count("run drop") == len(left_behind) + sum(retired)
    assert_keys_are_as_before(elsewhere, 3)
    run_again("drop")
    assert len(layout().partitions) == 2
    assert run_sql("SELECT 1 FROM pg_class WHERE relname = %s", [f"{TABLE}_p1"]) == []
    assert_keys_are_as_before(elsewhere, 3)
    assert door(paying)("old").status_code == 201


@postgresql
@plain_table
@pytest.mark.parametrize("then", [["drop"], ["disable", "--yes"]], ids=["drop", "disable"])
@pytest.mark.server
def test_a_drop_that_is_killed_while_it_waits_is_ended_by_the_server_and_goes_on(days, elsewhere, observer, then):
    """Its wait would keep others from making partitions, and from converting the table."""
    old("old")
    make_keys()
    waits = f"{ACTIVITY} AND query LIKE '%DETACH%' AND wait_event = 'virtualxid'"
    with long_transaction(observer):
        with commanding(COMMAND, "drop", before="ALTER TABLE .* DETACH") as process:
            process.go_on()
            eventually(lambda: run_sql(waits))
            process.kill()
        assert_keys_are_as_before(elsewhere, 3)
        eventually(lambda: not run_sql(waits))
        assert [standing.name for standing in status().partitions if standing.detaching] == [OLDEST]
        assert ensure().created == ()
    run_again(*then)
    assert len(layout().partitions) == (2 if then == ["drop"] else 0)
    assert run_sql("SELECT 1 FROM pg_class WHERE relname = %s", [f"{TABLE}_p0"]) == []
    assert_keys_are_as_before(elsewhere, 3)


# --- The rest of the package, on partitions --------------------------------------------------------------------------


@postgresql
@plain_table
def test_what_is_at_the_same_place_in_another_partition_is_not_deleted(days):
    old("kept", age=2 * DAY, purge_at=HOUR)
    old("gone", age=DAY)
    with connection.cursor() as cursor:
        cursor.execute(f"SELECT count(DISTINCT ctid), count(DISTINCT tableoid) FROM {TABLE}")
        assert cursor.fetchone() == (1, 2)
    assert maintenance.cleanup().rows == 1
    assert record("kept") is not None


@postgresql
@plain_table
def test_maintenance_goes_through_all_partitions(days):
    old("a", age=2 * DAY)
    old("b")
    old("c", age=0)
    live(mode="lease")
    assert maintenance.cleanup(batch=2, pause=0).rows == 3
    assert maintenance.reap().failed == 1
    assert record().status == Status.FAILED
    assert rows(YESTERDAY) == 1


@postgresql
@plain_table
def test_the_size_is_the_sum_of_the_partitions(days):
    old()
    assert stats().bytes == sum(standing.bytes for standing in status().partitions)


@postgresql
@plain_table
def test_a_live_key_on_the_day_before_is_renewed_and_completed_there(days):
    policy = Policy(mode="lease")
    claimed = claim(policy=policy)
    shift(created_at=-2 * HOUR)
    claimed = Claimed(claimed.operation, claimed.token)  # as one that took over has it
    store = store_for(policy)
    assert store.renew([claimed], policy) == {claimed.token}
    assert store.complete(claimed, StoredResponse(201, (), b"done"), policy)
    store.count_replays({claimed.id: 2}, policy)
    assert (rows(YESTERDAY), record().replays) == (1, 2)


# --- The command, the tasks, other databases -------------------------------------------------------------------------


@pytest.fixture
def told(capsys):
    """Run the command; what it printed, read as JSON."""

    def run(*arguments):
        call_command("idempotency_partitions", *arguments, "--json")
        return json.loads(capsys.readouterr().out)

    return run


@postgresql
@plain_table
def test_the_command_changes_nothing_without_yes(table, told, capsys):
    assert not told("status")["partitioned"]
    planned = told("enable", "--interval=hour", "--plan")["statements"]
    assert planned == enable_plan(Interval.HOUR).statements
    call_command("idempotency_partitions", "enable")
    printed = capsys.readouterr()
    assert "CREATE TABLE" in printed.out
    assert "--yes" in printed.err
    assert not layout().partitioned
    assert told("enable", "--yes")["changed"]
    told("disable")
    assert layout().partitioned
    assert told("disable", "--yes") == {"database": "default", "partitioned": False, "changed": True}


@postgresql
@plain_table
def test_the_command_keeps_partitions(table, told, capsys):
    assert told("ensure")["partitioned"] is told("drop")["partitioned"] is False
    call_command("idempotency_partitions", "enable", "--yes", "--interval=hour")
    capsys.readouterr()
    assert told("ensure", "--plan")["statements"] == []
    planned = told("ensure", "--ahead=100", "--plan")["statements"]
    made = told("ensure", "--ahead=100")["created"]
    assert made
    assert sum("ATTACH" in statement for statement in planned) == len(made)
    call_command("idempotency_partitions", "status")
    assert f"public.{TABLE}_p0: … – " in capsys.readouterr().out


@postgresql
@plain_table
def test_drop_prints_its_plan_and_does_it(days, told, capsys):
    old()
    planned = told("drop", "--plan")["statements"]
    assert [statement for statement in planned if statement.startswith("DROP")] == [
        f"DROP TABLE {OLDEST}",
        f"DROP TABLE {YESTERDAY}",
    ]
    assert record()
    call_command("idempotency_partitions", "drop")
    assert capsys.readouterr().out == "2 partitions dropped.\n"


def test_plan_and_yes_exclude_each_other(payer):
    with pytest.raises(CommandError, match="not both"):
        call_command("idempotency_partitions", "enable", "--plan", "--yes")


@pytest.mark.other_databases
def test_on_another_database_it_is_an_error_that_says_so(payer):
    for work in (layout, status, ensure, drop, enable, disable):
        with pytest.raises(PartitionsUnsupported, match="PostgreSQL"):
            work()
    with pytest.raises(CommandError, match="PostgreSQL"):
        call_command("idempotency_partitions", "status")
    assert checks.check_partitions(None, ["default"]) == []


@postgresql
@plain_table
def test_beside_a_default_partition_everything_stays_as_it_is(table):
    now = layout().now
    divide(now - HOURS)
    run_sql(f"DROP TABLE {YESTERDAY}")
    run_sql(f"CREATE TABLE {TABLE}_p9 PARTITION OF {TABLE} (PRIMARY KEY (id)) DEFAULT")
    old()
    assert "default partition" in drop().kept[OLDEST]
    assert (rows(OLDEST), status().covered_until) == (1, None)


@postgresql
@plain_table
@pytest.mark.celery
def test_the_celery_tasks_keep_partitions_and_do_nothing_on_a_plain_table(table):
    from django_idempotency.tasks import PARTITIONS_BEAT_SCHEDULE
    from testproject.celery import app

    app.loader.import_default_modules()
    by_name = {entry["task"]: app.tasks[entry["task"]] for entry in PARTITIONS_BEAT_SCHEDULE.values()}
    for entry in PARTITIONS_BEAT_SCHEDULE.values():
        assert entry["options"]["expires"] + entry["options"]["time_limit"] <= entry["schedule"]
    for task in by_name.values():
        assert not json.loads(json.dumps(task()))["partitioned"]
    enable()
    assert json.loads(json.dumps(by_name["django_idempotency.ensure_partitions"]()))["created"]
    assert json.loads(json.dumps(by_name["django_idempotency.drop_partitions"]()))["dropped"] == []


@postgresql
@plain_table
@pytest.mark.django_tasks
def test_the_builtin_tasks_keep_partitions_and_do_nothing_on_a_plain_table(table):
    from django_idempotency import builtin_tasks

    for task in (builtin_tasks.ensure_partitions, builtin_tasks.drop_partitions):
        result = task.enqueue()
        assert result.status == "SUCCESSFUL", result.errors
        assert not result.return_value["partitioned"]
    enable()
    assert builtin_tasks.ensure_partitions.enqueue().return_value["created"]
