"""``drop`` takes partitions whose time is over, and no key that is live, on hold or
used again.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from uuid import uuid4

import pytest
from django.core.management import call_command
from django.db import OperationalError

from django_idempotency import engine, maintenance
from django_idempotency.contrib.partitions import upkeep
from django_idempotency.contrib.partitions.catalog import read_layout
from django_idempotency.contrib.partitions.conversion import enable
from django_idempotency.contrib.partitions.layout import TABLE
from django_idempotency.contrib.partitions.upkeep import Dropped, drop, ensure, status
from django_idempotency.maintenance import decisions
from django_idempotency.maintenance.stats import due
from django_idempotency.models import IdempotencyRecord, Status
from django_idempotency.stores import store_for
from django_idempotency.stores.database import ahead
from django_idempotency.stores.errors import store_errors
from django_idempotency.values.exceptions import StoreConflict
from django_idempotency.values.outcomes import Claimed, Keep, StoredResponse
from django_idempotency.values.policy import Lease, Policy
from django_idempotency.values.rules import FOR_GOOD
from tests.contrib.partitions.table import (
    ACTIVITY,
    DAY,
    DAYS,
    HOUR,
    HOURS,
    OLDEST,
    YESTERDAY,
    live,
    long_transaction,
    old,
    pay,
    rows,
)
from tests.support.callers import (
    claim,
    entry_point,
    is_replay,
    operation,
    paying,
    record,
    shift,
)
from tests.support.checks import PARTITIONS, found, ids_found
from tests.support.maintained import RecordFactory
from tests.support.sql import run_sql
from tests.support.statements import buffers, explaining
from tests.support.threads import in_threads, just_before
from tests.support.waiting import eventually

pytestmark = [pytest.mark.postgresql, pytest.mark.plain_table]


def test_drop_drops_what_is_over_and_keeps_what_holds_something(days):
    old("done", age=2 * DAY)
    old("late", purge_at=HOUR)
    old("done-too")
    entry_point(paying)("today")
    dropped = drop()
    assert dropped.dropped == (OLDEST,)
    ((name, reason),) = dropped.kept.items()
    assert name == YESTERDAY
    assert reason.startswith("the last due at ")
    assert set(IdempotencyRecord.objects.values_list("key", flat=True)) == {
        "late",
        "done-too",
        "today",
    }
    shift("late", expires_at=-1, purge_at=-1)
    assert drop().dropped == (YESTERDAY,)
    assert drop() == Dropped()
    assert is_replay(entry_point(paying)("today"))


def test_a_partition_in_use_is_never_dropped(days):
    live(mode=Lease(on_crash="hold"))
    assert drop().kept == {YESTERDAY: "1 live"}
    maintenance.reap()
    shift(expires_at=-HOUR, purge_at=-HOUR)
    assert drop().kept == {YESTERDAY: "1 on hold"}
    decisions.allow_retry(record().pk)
    assert drop().dropped == (YESTERDAY,)


def test_status_tells_why_a_partition_stays(days):
    old(purge_at=HOUR)
    oldest, yesterday, today, tomorrow = status().partitions
    assert (oldest.kept, oldest.lower) == ("", None)
    assert yesterday.kept.startswith("the last due at ")
    assert (today.kept, tomorrow.kept, tomorrow.upper) == (
        "not over yet",
        "not over yet",
        None,
    )


LOCK_PARTITION = "LOCK TABLE public"


def test_a_key_reused_just_before_the_lock_keeps_its_partition(days, other_thread):
    """Decided by a retry while it was not expired yet, and written now."""
    old()
    policy, mine = Policy(mode="lease"), Claimed(operation(), uuid4())
    store = store_for(policy)

    def take_over():
        IdempotencyRecord.objects.update(status=Status.FAILED)
        with store.try_lock(mine.id) as seen:
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

    with just_before(LOCK_PARTITION + f".{TABLE}_p1", lambda: other_thread(take_over)):
        assert drop().kept == {YESTERDAY: "1 live"}
    assert store.complete(mine, StoredResponse(201))


@pytest.mark.usefixtures("impatient")
def test_a_row_that_somebody_has_locked_keeps_its_partition(days, other_thread):
    """Somebody who is about to use an expired key again: the row is about to move."""
    old()
    policy, token = Policy(mode="lease"), uuid4()
    store = store_for(policy)
    with store.try_lock(operation().id) as seen:
        assert "in use" in other_thread(drop).kept[YESTERDAY]
        claimed = store.reassign(seen, operation(), token)
    assert drop().dropped == (OLDEST, YESTERDAY)
    assert record().token == token
    assert store.complete(claimed, StoredResponse(201))


@pytest.mark.parametrize(
    ("due_for", "behind"), [(23 * HOURS, 0), (26 * HOURS, 2 * 3600)]
)
def test_a_record_that_waits_for_its_partition_is_not_late_for_a_day(
    days, due_for, behind
):
    """Nothing else deletes it where ``drop`` is all that runs."""
    drop()  # the former table is gone
    RecordFactory(created_at=read_layout().now)
    due_at = read_layout().now - due_for
    IdempotencyRecord.objects.update(expires_at=due_at, purge_at=due_at)
    late = due()
    assert (late["due"], late["lag"]) == (1, pytest.approx(behind, abs=60))


@pytest.mark.parametrize(("due_for", "behind"), [(70 * HOURS, 0), (74 * HOURS, 7200)])
def test_a_record_in_the_former_table_is_not_late_before_that_can_be_dropped(
    table, due_for, behind
):
    """It takes records for two more days, and waits until the last one has expired, a
    day later.
    """
    enable()
    due_at = read_layout().now - due_for
    RecordFactory(created_at=due_at)
    IdempotencyRecord.objects.update(expires_at=due_at, purge_at=due_at)
    assert due()["lag"] == pytest.approx(behind, abs=60)


def test_an_early_claim_finds_the_partition_closed(days):
    """As late as that a statement must hang for as long as keys are kept; but then it
    must not be lost.
    """
    with (
        pytest.raises(StoreConflict),
        just_before("ALTER TABLE .* DETACH .*_p1", insert_late),
    ):
        drop()
    assert drop().dropped == (YESTERDAY,)


def insert_late():
    with store_errors():
        RecordFactory(created_at=read_layout().now - 2 * HOURS)


DETACH_WAITS = "query LIKE '%DETACH%' AND wait_event = 'virtualxid'"


CANCEL = (
    f"SELECT pg_cancel_backend(pid) {ACTIVITY.removeprefix('SELECT 1')} AND"
    f" {DETACH_WAITS}"
)


def test_a_detach_that_was_cancelled_while_it_waited_is_finished(days, other_thread):
    old()
    with long_transaction(other_thread), ThreadPoolExecutor(1) as pool:
        dropping = pool.submit(in_threads, 1, lambda _: drop())
        eventually(lambda: run_sql(CANCEL) or dropping.done())
        (dropped,) = dropping.result()
    assert "canceling statement" in dropped.kept[OLDEST]
    oldest, *_ = status().partitions
    assert (oldest.retired, oldest.detaching) == (True, True)
    assert found(label=PARTITIONS) == []
    assert drop().dropped == (OLDEST, YESTERDAY)


def test_records_kept_for_good_are_refused_as_they_keep_their_partition(days, settings):
    assert ids_found("E003", label=PARTITIONS) == []
    settings.IDEMPOTENCY = {"RETENTION": None}
    assert ids_found("E003", label=PARTITIONS) == ["E003"]
    settings.IDEMPOTENCY = {}
    old("k", purge_at=FOR_GOOD)
    assert ids_found("E003", label=PARTITIONS) == ["E003"]
    assert YESTERDAY in drop().kept


def half_detach(partition, other_thread, other):
    """As somebody leaves it who gives up while he waits."""
    detach = f"ALTER TABLE {TABLE} DETACH PARTITION {partition} CONCURRENTLY"
    with long_transaction(other_thread), ThreadPoolExecutor(1) as pool:
        detaching = pool.submit(other, run_sql, detach)
        eventually(lambda: run_sql(CANCEL) or detaching.done())
        with pytest.raises(OperationalError, match="canceling statement"):
            detaching.result()


def test_a_half_detached_partition_stays(days, other_thread, observer):
    old()
    half_detach(YESTERDAY, other_thread, observer)
    (message,) = found(label=PARTITIONS)
    assert (message.id, "FINALIZE" in message.msg) == (
        "django_idempotency_partitions.W002",
        True,
    )
    kept = drop().kept
    assert kept.keys() == {OLDEST, YESTERDAY}
    assert f"DETACH PARTITION {YESTERDAY} FINALIZE" in kept[YESTERDAY]
    assert "already pending detach" in kept[OLDEST]
    assert rows(YESTERDAY) == 1
    run_sql(f"ALTER TABLE {TABLE} DETACH PARTITION {YESTERDAY} FINALIZE")
    assert drop().dropped == (OLDEST,)
    assert rows(YESTERDAY) == 1


def test_ensure_fails_if_a_half_detached_partition_leaves_too_little(
    table, other_thread, observer, capsys
):
    enable()
    ensure()
    call_command("idempotency_partitions", "ensure")
    layout = read_layout()
    (tomorrow,) = (
        partition.name
        for partition in layout.partitions
        if partition.covers(layout.now + DAYS)
    )
    half_detach(tomorrow, other_thread, observer)
    with pytest.raises(SystemExit):
        call_command("idempotency_partitions", "ensure")
    assert "That is too short" in capsys.readouterr().out


def test_nobody_waits_for_a_drop_that_waits_for_a_long_transaction(days, other_thread):
    old()
    claimed = claim("long", policy=Policy())
    with ThreadPoolExecutor(1) as pool, engine.execution(claimed, Policy()) as run:
        dropping = pool.submit(in_threads, 1, lambda _: drop())
        waits = f"{ACTIVITY} AND {DETACH_WAITS}"
        eventually(lambda: other_thread(run_sql, waits) or dropping.done())
        other_thread(run_sql, "SET statement_timeout = '30s'")
        for number in range(20):
            assert other_thread(entry_point(paying), f"k{number}").status_code == 201
        assert not dropping.done()
        run.verdict = Keep(StoredResponse(201))
    (dropped,) = dropping.result()
    assert dropped.dropped == (OLDEST, YESTERDAY)


@pytest.mark.parametrize("step", ["LOCK", "ALTER TABLE .* DETACH", "DROP TABLE"])
def test_a_partition_that_another_session_drops_meanwhile_counts_as_gone(
    days, other_thread, step
):
    old()
    with just_before(f"{step} .*{TABLE}_p1", lambda: other_thread(drop)):
        dropped = drop()
    assert dropped.kept in ({}, {YESTERDAY: upkeep.GONE})
    assert len(read_layout().partitions) == 2
    assert run_sql("SELECT 1 FROM pg_class WHERE relname = %s", [f"{TABLE}_p1"]) == []


def fill(age, count):
    """So many responses, made so long ago and due by and by, and one key on hold."""
    run_sql(f"""
        INSERT INTO {TABLE} (
            id, scope, key, method, path, fingerprint, mode, created_at, status,
                updated_at, expires_at, purge_at,
            on_hold, response_status, response_headers
        )
        SELECT gen_random_uuid(), 's', 'k', '', '', '', 'lease', now() -
            interval '{age} s',
            CASE WHEN n = 1 THEN 'failed' ELSE 'completed' END, now(),
                now() + make_interval(secs => n - {count // 2}),
            now() + make_interval(secs => n - {count // 2}), n = 1, CASE
                WHEN n > 1 THEN 200 END,
            CASE WHEN n > 1 THEN '{{}}'::jsonb END
        FROM generate_series(1, {count}) AS n
    """)
    run_sql(f"VACUUM ANALYZE {TABLE}")


def buffers_of(work, words):
    """How many each statement with these words read that ``work`` sends."""
    with explaining(words) as plans:
        work()
    return [*map(buffers, plans)]


def test_records_that_keep_a_partition_are_found_by_the_partial_indexes(days):
    fill(2 * HOUR, 20_000)
    assert [
        standing.kept.partition(",")[0] for standing in status().partitions[:2]
    ] == ["", "1 on hold"]
    looks = buffers_of(status, "max(purge_at)")
    assert len(looks) == 4
    assert max(looks) < 20


def test_a_claim_reads_only_its_row_in_all_partitions(days):
    fill(2 * HOUR, 20_000)
    fill(0, 20_000)
    # A session reads the catalogs once, and again after an ANALYZE of any partition.
    read = [buffers_of(pay, "django_idempotency_claim") for _time in range(4)]
    assert all(len(claims) == 1 for claims in read)
    assert min(read)[0] < 50


def ways(plan):
    """How a plan reads the partitions with rows: pairs of the partition and the index,
    or else the kind of scan.
    """
    parts = plan.get("Plans", [])
    found = {way for part in parts for way in ways(part)}
    if (
        plan.get("Relation Name") in (f"{TABLE}_p1", f"{TABLE}_p2")
        and plan["Node Type"] != "ModifyTable"
    ):
        by = parts[0] if plan["Node Type"] == "Bitmap Heap Scan" else plan
        found.add((plan["Relation Name"], by.get("Index Name", by["Node Type"])))
    return found


def test_a_run_is_completed_in_the_partition_of_its_claim_alone(days):
    fill(2 * HOUR, 20_000)
    fill(0, 20_000)
    with explaining(TABLE, "COSTS OFF") as plans:
        pay()
    locking, completing = plans[-2:]
    assert ways(locking) == {(f"{TABLE}_p2", "Tid Scan")}
    assert ways(completing) == {(f"{TABLE}_p2", f"{TABLE}_p2_pkey")}
