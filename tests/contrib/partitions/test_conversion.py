"""A table becomes partitioned under load, and keeps every row."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from django.core.management import call_command
from django.db import connection

from django_idempotency import engine
from django_idempotency.contrib.partitions.catalog import read_layout
from django_idempotency.contrib.partitions.conversion import enable, enable_plan
from django_idempotency.contrib.partitions.layout import TABLE, NotConvertible
from django_idempotency.models import IdempotencyRecord, Status
from django_idempotency.stores import store_for
from django_idempotency.values.outcomes import Keep, StoredResponse
from django_idempotency.values.policy import Lease, Policy
from tests.contrib.partitions.table import DAYS, described, old
from tests.support.callers import claim, effects, entry_point, is_replay, paying, record
from tests.support.sql import run_sql
from tests.support.threads import in_threads, just_before
from tests.support.waiting import eventually

pytestmark = [pytest.mark.postgresql, pytest.mark.plain_table]


def test_enable_keeps_every_row_and_the_tables_definition(table):
    run_sql(f"GRANT SELECT ON {TABLE} TO PUBLIC")
    try:
        old("old")
        live = claim("live", policy=Policy(mode=Lease(seconds=3600)))
        before, kept = (
            described(),
            list(IdempotencyRecord.objects.order_by("pk").values()),
        )
        assert enable()
        assert read_layout().partitioned
        assert list(IdempotencyRecord.objects.order_by("pk").values()) == kept
        after = described()
        assert after["columns"] == before["columns"]
        assert after["rest"] == before["rest"]
        # The primary key is each partition's own, and so are the storage parameters.
        assert set(before["constraints"]) - set(after["constraints"]) == {
            (f"{TABLE}_pkey", "p", True)
        }
        assert set(before["indexes"]) - set(after["indexes"]) == {(f"{TABLE}_pkey", "")}
        assert after["options"] == [(None,)]
        first, second = read_layout().partitions
        assert (first.lower, second.upper - second.lower) == (None, DAYS)
        for partition in (first, second):
            sql = "SELECT reloptions FROM pg_class WHERE oid = %s"
            assert run_sql(sql, [partition.oid]) == before["options"]
        assert store_for(Policy()).renew([live]) == {live.token}
        call_command(
            "makemigrations",
            "django_idempotency",
            check=True,
            dry_run=True,
            verbosity=0,
        )
        assert not enable()
    finally:
        run_sql(f"REVOKE SELECT ON {TABLE} FROM PUBLIC")


def test_enable_follows_its_plan_and_the_switch_does_not_read_rows(table, other_thread):
    old()
    before = described()["indexes"]
    planned, sent = enable_plan(), []

    def listen(execute, sql, *details):
        sent.append(sql)
        return execute(sql, *details)

    with connection.execute_wrapper(listen):
        enable()
    assert [sql for sql in sent if sql in planned] == [
        sql for sql in planned if sql not in ("BEGIN", "COMMIT")
    ]
    # Its indexes are those that were there: none was built anew, which takes long.
    of_first = (
        "SELECT indexrelid::regclass::text FROM pg_index WHERE indrelid ="
        f" '{TABLE}_p0'::regclass"
    )
    names = [name for (name,) in run_sql(of_first)]
    assert sorted(names) == [f"{name}_p0" for name, _predicate in before]


@pytest.mark.parametrize(
    ("obstacle", "removal", "named"),
    [
        (
            f"CREATE VIEW stuck AS SELECT * FROM {TABLE}",
            "DROP VIEW stuck",
            "view stuck",
        ),
        (
            f"CREATE TABLE step (record uuid REFERENCES {TABLE})",
            "DROP TABLE step",
            "step_record_fkey",
        ),
        (
            f"CREATE UNIQUE INDEX mine ON {TABLE} (token)",
            "DROP INDEX mine",
            "index mine",
        ),
        (
            (
                f"CREATE TRIGGER mine BEFORE UPDATE ON {TABLE} FOR EACH ROW"
                " EXECUTE FUNCTION suppress_redundant_updates_trigger()"
            ),
            f"DROP TRIGGER mine ON {TABLE}",
            "trigger mine",
        ),
        (f"CREATE TABLE {TABLE}_p0 ()", f"DROP TABLE {TABLE}_p0", f"table {TABLE}_p0"),
        (
            f"ALTER TABLE {TABLE} ENABLE ROW LEVEL SECURITY",
            f"ALTER TABLE {TABLE} DISABLE ROW LEVEL SECURITY",
            "row level",
        ),
        (
            "CREATE PUBLICATION mine FOR ALL TABLES",
            "DROP PUBLICATION mine",
            "the publication mine",
        ),
    ],
    ids=[
        "view",
        "foreign key",
        "unique index",
        "trigger",
        "left behind",
        "row level security",
        "publication",
    ],
)
def test_an_obstacle_to_a_conversion_stops_it_however_late_it_comes_and_is_named(
    table, other_thread, obstacle, removal, named
):
    before = described()
    late = just_before("LOCK TABLE", lambda: other_thread(run_sql, obstacle))
    try:
        with late, pytest.raises(NotConvertible, match=named):
            enable()
        assert not read_layout().partitioned
        assert not read_layout().halfway
    finally:
        run_sql(removal)
    assert described() == before
    assert enable()


@pytest.mark.usefixtures("table", "impatient")
def test_an_unavailable_lock_leaves_the_table_as_it_was(other_thread):
    before = described()
    claimed = claim("live", policy=Policy())
    with engine.execution(claimed, Policy()) as run:
        with pytest.raises(NotConvertible, match="could not be obtained"):
            other_thread(enable)
        run.verdict = Keep(StoredResponse(201))
    assert described() == before
    assert record("live").status == Status.COMPLETED


def test_of_two_who_enable_at_once_the_second_is_refused(table, other_thread):
    def enable_too():
        with pytest.raises(NotConvertible, match="Another session"):
            other_thread(enable)

    with just_before("ALTER TABLE .* VALIDATE", enable_too):
        assert enable()


def test_requests_continue_during_a_conversion(table):
    """On connections that have prepared their statements, and in a session that has run
    the claim before.
    """
    stop = threading.Event()

    def pay_again_and_again(number):
        count = 0
        while not stop.is_set():
            key = f"{number}-{count}"
            first = entry_point(paying)(key)
            again = entry_point(paying)(key)
            assert (first.status_code, again.content, is_replay(again)) == (
                201,
                first.content,
                True,
            )
            count += 1
        return count

    with ThreadPoolExecutor(1) as pool:
        traffic = pool.submit(in_threads, 3, pay_again_and_again)
        try:
            eventually(lambda: effects() > 10)
            enable()
            before = effects()
            eventually(lambda: effects() > before + 10 or traffic.done())
        finally:
            stop.set()
    assert effects() == sum(traffic.result())


def test_a_session_claims_after_its_plain_table_was_dropped(table, other_thread):
    assert other_thread(entry_point(paying), "before").status_code == 201
    enable()
    IdempotencyRecord.objects.all().delete()
    now = read_layout().now
    run_sql(f"ALTER TABLE {TABLE} DETACH PARTITION {TABLE}_p0; DROP TABLE {TABLE}_p0")
    like = f"CREATE TABLE {TABLE}_p1 PARTITION OF {TABLE} (PRIMARY KEY (id))"
    run_sql(f"{like} FOR VALUES FROM (MINVALUE) TO ('{now + DAYS}')")
    assert other_thread(entry_point(paying), "after").status_code == 201
    assert is_replay(other_thread(entry_point(paying), "after"))
