"""A key runs once, whatever partition its record is in."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from uuid import uuid4

import pytest
from django.db import connections, transaction

from django_idempotency.contrib.partitions.catalog import read_layout
from django_idempotency.contrib.partitions.conversion import enable
from django_idempotency.models import IdempotencyRecord
from django_idempotency.stores import store_for
from django_idempotency.values.outcomes import Claimed
from django_idempotency.values.policy import Atomic, Policy
from testproject.models import LedgerEntry
from tests.contrib.partitions.table import (
    ACTIVITY,
    HOUR,
    OLDEST,
    TODAY,
    YESTERDAY,
    old,
    rows,
)
from tests.support.callers import (
    Gate,
    effects,
    entry_point,
    is_replay,
    operation,
    paying,
)
from tests.support.partitioned import divide
from tests.support.sql import run_sql
from tests.support.threads import in_threads, just_after
from tests.support.waiting import eventually

pytestmark = [pytest.mark.postgresql, pytest.mark.plain_table]


def test_yesterdays_key_is_replayed_and_refused_as_todays(days):
    old(purge_at=HOUR)
    assert rows(YESTERDAY) == 1
    assert is_replay(entry_point(paying)())
    assert entry_point(paying)("k", b"{}").status_code == 422
    assert effects() == 1


@pytest.mark.parametrize("mode", ["atomic", "lease"])
def test_an_expired_key_that_is_used_again_moves_to_todays_partition(days, mode):
    old(mode=mode)
    assert entry_point(paying, mode=mode)().status_code == 201
    assert (rows(YESTERDAY), rows(TODAY), effects()) == (0, 1, 2)
    assert is_replay(entry_point(paying, mode=mode)())


def test_of_many_who_use_an_expired_key_again_at_once_one_runs(days):
    for number in range(20):
        old(f"k{number}")
        answers = in_threads(
            4, lambda _, number=number: entry_point(paying)(f"k{number}")
        )
        assert sorted({answer.status_code for answer in answers} - {409}) == [201]
        assert (
            len({answer.content for answer in answers if answer.status_code == 201})
            == 1
        )
    assert effects() == 40


LEVELS = ["read committed", "repeatable read", "serializable"]


# Seconds that a first claim has until midnight, before all is done again with more: a
# busy machine may have stalled.
SPARE = (0.5, 5, 20)


def is_over(midnight):
    return run_sql("SELECT clock_timestamp() > %s", [midnight])[0][0]


def divide_before_midnight(spare, count=1):
    """Divide the table ``count`` times, 100 ms apart, from a time on that a first claim
    is in time for if it begins within ``spare`` seconds. Return the last of these
    times.
    """
    times = [number * timedelta(milliseconds=100) for number in range(count)]
    began = read_layout().now
    divide(*(began + time for time in times))
    needed = read_layout().now - began
    first = read_layout().now + 3 * needed + timedelta(seconds=spare)
    divide(*(first + time for time in times))
    return first + times[-1]


@pytest.mark.parametrize("level", LEVELS)
def test_a_key_claimed_across_midnight_is_claimed_once(
    table, other_thread, observer, level
):
    """Before midnight, not committed yet; and again after it, where another partition
    is in charge.

    The second is at whatever level. It has begun before the first commits, so its
    statement does not see that record.
    """
    other_thread(run_sql, f"SET default_transaction_isolation = '{level}'")
    policy, waiting = Policy(mode="lease"), f"{ACTIVITY} AND wait_event = 'advisory'"

    def claimed_in_time(spare):
        midnight = divide_before_midnight(spare)
        with ThreadPoolExecutor(1) as pool:
            with transaction.atomic():
                first = store_for(policy).claim(operation(), uuid4())
                if is_over(midnight):
                    return False
                eventually(lambda: is_over(midnight), within=120)
                second = pool.submit(
                    other_thread, store_for(policy).claim, operation(), uuid4()
                )
                eventually(lambda: second.done() or observer(run_sql, waiting))
            assert isinstance(first, Claimed)
            assert second.result(60).record.token == first.token
        return True

    assert any(map(claimed_in_time, SPARE))
    assert (rows(OLDEST), rows(YESTERDAY)) == (1, 0)


@pytest.mark.parametrize(
    "policy",
    [{"mode": "atomic"}, {"mode": "lease"}, {"mode": Atomic(claim="lock")}],
    ids=str,
)
@pytest.mark.parametrize("level", LEVELS)
def test_keys_are_claimed_and_replayed_at_every_isolation_level(
    days, other_thread, level, policy
):
    other_thread(run_sql, f"SET default_transaction_isolation = '{level}'")
    first = other_thread(entry_point(paying, **policy))
    again = other_thread(entry_point(paying, **policy))
    assert (first.status_code, again.content, is_replay(again), effects()) == (
        201,
        first.content,
        True,
        1,
    )
    assert other_thread(run_sql, "SHOW transaction_isolation") == [(level,)]


def test_above_read_committed_the_policys_database_is_used(days, other_alias):
    policy = Policy(using=other_alias)
    level = "SET default_transaction_isolation = 'repeatable read'"
    run_sql(level, using=other_alias)
    assert isinstance(store_for(policy).claim(operation(), uuid4()), Claimed)


def test_at_repeatable_read_a_claim_by_lock_becomes_a_record(days, other_thread):
    other_thread(run_sql, "SET default_transaction_isolation = 'repeatable read'")
    claimed = other_thread(
        lambda: (
            store_for(Policy(mode=Atomic(claim="lock")))
            .claim(operation(), uuid4())
            .by_lock
        )
    )
    assert (claimed, IdempotencyRecord.objects.count()) == (False, 1)


@pytest.mark.parametrize("other", ["lock", "record"])
def test_a_run_across_midnight_keeps_the_key_whose_claim_is_a_lock(table, other):
    """Its record goes to the partition of its claim; who comes after midnight would
    make one in another.
    """

    def claimed_in_time(spare):
        LedgerEntry.objects.all().delete()
        midnight = divide_before_midnight(spare)
        with Gate().running(mode=Atomic(claim="lock")) as first:
            if is_over(midnight):
                return False
            eventually(lambda: is_over(midnight), within=120)
            assert entry_point(paying, mode=Atomic(claim=other))().status_code == 409
        assert first.result(60).status_code == 201
        return True

    assert any(map(claimed_in_time, SPARE))
    assert is_replay(entry_point(paying, mode=Atomic(claim=other))())
    assert (rows(OLDEST), rows(YESTERDAY), effects()) == (1, 0, 1)


@pytest.mark.parametrize("kinds", [("record", "record"), ("lock", "record")])
def test_callers_who_come_at_midnight_run_each_key_once(table, kinds):
    done = threading.Event()

    def pay(number):
        count = 0
        while not done.is_set():
            answer = entry_point(paying, mode=Atomic(claim=kinds[number % 2]))(
                f"k{count}"
            )
            # everybody has had an answer to it, or will get the same one
            count += answer.status_code == 201
            if read_layout().now > last_midnight:
                done.set()
        return count

    def used():
        """The partitions with records."""
        return sum(rows(partition.name) > 0 for partition in read_layout().partitions)

    for spare in SPARE:
        LedgerEntry.objects.all().delete()
        last_midnight = divide_before_midnight(spare, count=10)
        done.clear()
        counts = in_threads(4, pay, timeout=240)
        assert effects() == max(counts) == IdempotencyRecord.objects.count()
        if used() > 1:
            break
    assert used() > 1


WAITING_CLAIMS = """
SELECT count(*) FROM pg_locks JOIN pg_stat_activity AS waiting USING (pid)
WHERE NOT granted AND locktype = 'relation'
    AND (query LIKE '%%django_idempotency_claim%%'
        OR query LIKE '%%LEFT JOIN django_idempotency_record%%')
    AND datname = current_database()
"""


@pytest.mark.parametrize(
    "kinds", [("lock", "lock"), ("lock", "record"), ("record", "lock")]
)
def test_a_claim_that_waited_for_a_conversion_is_met_by_those_after_it(
    table, other_thread, kinds
):
    """It has begun with the table that is a partition now."""
    first_kind, second_kind = kinds
    gate = Gate()
    planned, claim = threading.Event(), threading.Event()

    def first():
        try:
            # from the sixth call on the function's plans are kept
            for number in range(8):
                entry_point(paying, mode=Atomic(claim=first_kind))(f"other-{number}")
            planned.set()
            assert claim.wait(60)
            return entry_point(gate, mode=Atomic(claim=first_kind))()
        finally:
            connections.close_all()

    def claim_while_it_is_locked():
        claim.set()
        eventually(lambda: other_thread(run_sql, WAITING_CLAIMS)[0][0] >= 1)

    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(first)
        try:
            assert planned.wait(60)
            with just_after(r"LOCK TABLE .*ACCESS EXCLUSIVE", claim_while_it_is_locked):
                enable()
            assert gate.entered.wait(60)
            assert (
                entry_point(paying, mode=Atomic(claim=second_kind))().status_code == 409
            )
        finally:
            claim.set()
            gate.let_go.set()
        assert answer.result(60).status_code == 201
    assert effects() == 9
