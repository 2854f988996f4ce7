"""The counters count what the signals tell, once, whatever becomes of processes and
database, and cost no lease.
"""

from __future__ import annotations

import os
from datetime import timedelta

import pytest
from django.db import DatabaseError, connection
from django.db.models import Sum
from django.http import HttpResponse
from django.utils import timezone

from django_idempotency.contrib.dashboard.counters import (
    MAINTENANCE,
    MOST_VIEWS,
    OLDEST,
    OTHER_VIEWS,
    PERIOD,
    Counters,
    counters,
    prune,
)
from django_idempotency.contrib.dashboard.models import IdempotencyCounter
from django_idempotency.contrib.outbox.signals import FAMILY
from django_idempotency.maintenance.cleaner import cleanup
from django_idempotency.reporting.events import EVENTS, send, send_several
from django_idempotency.values.outcomes import Operation
from django_idempotency.values.policy import Lease, Policy
from tests.contrib.dashboard.counting_process import counting
from tests.laws.test_leases_are_kept import (
    LEASE,
    locked,
    outside_a_test_run,
    renewed,
    renewed_every_second,
)
from tests.support.callers import BODY, Gate, claim, entry_point, paying
from tests.support.checks import ids_found
from tests.support.threads import in_threads
from tests.support.waiting import eventually

__all__ = ["outside_a_test_run", "renewed_every_second"]

pytestmark = pytest.mark.usefixtures("payer")

DAY = 24 * 3600
PAYING = "tests.support.callers.paying"
SOON, NEVER = 0.05, 3600


@pytest.fixture(autouse=True)
def counted(payer):
    """What this test has counted, from the table and by view and event; nothing of what
    others have.
    """
    counters._reset()

    def flushed():
        counters.flush()
        return in_the_table()

    yield flushed
    counters._reset()


def in_the_table():
    """But for the age of the oldest pending key: it is noted once there is one of half
    a second.
    """
    rows = (
        IdempotencyCounter.objects.exclude(event=OLDEST)
        .order_by()
        .values_list("view", "event")
        .annotate(Sum("count"))
    )
    return {(view, event): count for view, event, count in rows}


def total(event):
    return sum(
        count for (_view, found), count in in_the_table().items() if found == event
    )


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: event.counted_as)
def test_every_signal_is_counted_by_its_name_and_its_view(counted, event):
    for sender, times in ((paying, 2), (None, 1)):
        for _time in range(times):
            named = {"reason": event.reason} if event.reason else {}
            send(event.signal, Operation("s", "k", bytes(32), sender=sender), **named)
    assert counted() == {
        (PAYING, event.counted_as): 2,
        (MAINTENANCE, event.counted_as): 1,
    }


def test_events_of_a_wing_are_counted_by_publisher(counted):
    event = FAMILY.events[0]
    for using in ("default", "elsewhere"):
        send_several(event.signal, "webhooks", 3, using)
    assert counted() == {("(outbox webhooks)", event.name): 6}


def test_each_outcome_of_a_request_is_counted_by_view(counted):
    pay = entry_point(paying)
    pay("a")
    pay("a")
    pay("a", b"{}")
    claim("gone", policy=Policy(mode="lease"))
    entry_point(paying, mode="lease")("gone")
    seen = counted()
    # the claim in this test, which is no view's
    assert seen.pop((MAINTENANCE, "key_claimed")) == 1
    assert seen == {
        (PAYING, "key_claimed"): 1,
        (PAYING, "key_completed"): 1,
        (PAYING, "response_replayed"): 1,
        (PAYING, "request_rejected.key_reused"): 1,
        (PAYING, "request_rejected.in_flight"): 1,
    }


def test_counters_hold_neither_keys_nor_scopes(counted):
    entry_point(paying, scope=lambda request: "user:4711")("secret-key")
    counted()
    row = " ".join(
        str(value)
        for values in IdempotencyCounter.objects.values_list()
        for value in values
    )
    assert "paying" in row
    assert not [
        word for word in ("secret-key", "4711", BODY.decode(), "/pay/") if word in row
    ]


def test_names_differ_by_case_and_trailing_space(counted):
    names = ["shop.Pay", "shop.pay", "shop.pay "]
    for view in names:
        counters.count("key_claimed", view)
    assert counted() == {(view, "key_claimed"): 1 for view in names}


def test_a_name_that_is_too_long_keeps_its_end(counted):
    def view(request):
        return HttpResponse()

    view.__qualname__ = "x" * 300 + ".pay"
    entry_point(view)()
    (called, _event), *_others = counted()
    assert called.endswith("xxx.pay")
    assert len(called) == 200


def test_a_row_stands_for_five_minutes_of_the_databases_clock(counted):
    before = timezone.now()
    counters.count("key_claimed", PAYING)
    counted()
    since = IdempotencyCounter.objects.get().since
    assert since.timestamp() % PERIOD == 0
    assert before - timedelta(seconds=PERIOD) < since <= timezone.now()


def test_later_counts_are_added(counted):
    for _time in range(3):
        counters.count("key_claimed", PAYING)
        counters.count("key_claimed", PAYING)
        counted()
    assert counted() == {(PAYING, "key_claimed"): 6}


def test_without_the_setting_nothing_is_counted(counted, settings):
    settings.IDEMPOTENCY = {"DASHBOARD": {"STATS_RETENTION": None}}
    entry_point(paying)()
    assert counted() == {}


def test_requests_survive_an_error_in_counting(monkeypatch, caplog):
    monkeypatch.setattr(Counters, "count", lambda self, *counted: 1 / 0)
    assert entry_point(paying)().status_code == 201
    assert "ZeroDivisionError" in caplog.text


def aged(**days):
    """Counters by the name of their view, so many days old."""
    for view, age in days.items():
        IdempotencyCounter.objects.create(
            since=timezone.now() - timedelta(days=age),
            view=view,
            event="claimed",
            count=1,
        )


def kept():
    return set(IdempotencyCounter.objects.values_list("view", flat=True))


def test_cleaning_up_deletes_old_counters(settings):
    settings.IDEMPOTENCY = {"DASHBOARD": {"STATS_RETENTION": 2 * DAY}}
    aged(old=2.1, new=1.9)
    cleanup()
    assert kept() == {"new"}


def test_counters_are_pruned_in_bounded_statements(monkeypatch):
    monkeypatch.setattr("django_idempotency.contrib.dashboard.models.PRUNED_AT_ONCE", 2)
    aged(a=30, b=29, c=28, d=27, new=1)
    assert [prune(), kept()] == [2, {"c", "d", "new"}]
    assert [prune(), prune(), kept()] == [2, 0, {"new"}]


def test_once_nothing_is_counted_the_counters_go(settings):
    settings.IDEMPOTENCY = {"DASHBOARD": {"STATS_RETENTION": None}}
    aged(a=0.1)
    assert prune() == 1


@pytest.mark.row_locks
def test_counts_that_could_not_be_written_are_written_later_and_once(counted, proxy):
    proxy.go_away()
    counters.count("key_claimed", PAYING)
    for _time in range(3):
        with pytest.raises(DatabaseError):
            counters.flush()
        counters.count("key_claimed", PAYING)
    proxy.come_back()
    connection.close()
    assert counted() == {(PAYING, "key_claimed"): 4}
    assert counted() == {(PAYING, "key_claimed"): 4}


def test_memory_is_bounded_while_nothing_can_be_written(counted):
    for number in range(3 * MOST_VIEWS):
        for event in EVENTS:
            counters.count(event.counted_as, f"view{number}")
    assert sum(map(len, counters._counts.values())) == (MOST_VIEWS + 1) * len(EVENTS)
    # the most there can be is one statement
    assert counted()[OTHER_VIEWS, "key_claimed"] == 2 * MOST_VIEWS
    assert IdempotencyCounter.objects.count() == (MOST_VIEWS + 1) * len(EVENTS)


def test_threads_that_count_at_once_lose_nothing(counted):
    def count(_index):
        for _time in range(2000):
            counters.count("key_claimed", PAYING)

    in_threads(4, count)
    assert counted() == {(PAYING, "key_claimed"): 8000}


@pytest.mark.postgresql
def test_processes_that_count_do_not_deadlock():
    views = [f"view{number}" for number in range(200)]

    def write(index):
        mine = Counters()
        for _time in range(30):
            for view in views if index else reversed(views):
                mine.count("key_claimed", view)
            mine.flush()

    in_threads(2, write, timeout=240)
    assert total("key_claimed") == 2 * 30 * 200


@pytest.mark.server
def test_two_processes_at_once_count_every_request_once():
    with counting(SOON) as one, counting(SOON) as other:
        for process, key in ((one, "a"), (other, "b")):
            process.begin(key, 200)
        for process in (one, other):
            process.finish()
        for process in (one, other):
            process.end()
    expected = {"key_claimed": 2, "key_completed": 2, "response_replayed": 398}
    assert in_the_table() == {
        (PAYING, event): count for event, count in expected.items()
    }


@pytest.mark.server
@pytest.mark.parametrize("way", ["end", "terminate"])
def test_a_process_that_ends_writes_what_it_has_counted(way):
    with counting(NEVER) as process:
        process.request("k", 10)
        assert in_the_table() == {}
        getattr(process, way)()
    assert (total("key_claimed"), total("response_replayed")) == (1, 9)


@pytest.mark.server
def test_a_killed_process_loses_only_unwritten_counts():
    with counting(SOON) as process:
        process.request("k", 10)
        eventually(lambda: total("response_replayed") == 9)
        process.begin("k", 1000)
        eventually(lambda: total("response_replayed") > 9)
        process.kill()
    assert 9 < total("response_replayed") <= 9 + 1000
    assert (total("key_claimed"), total("key_completed")) == (1, 1)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process_does_not_write_what_its_parent_has_counted(counted):
    counters.count("key_claimed", PAYING)
    if child := os.fork():
        assert os.waitpid(child, 0)[1] == 0
    else:
        os._exit(sum(map(len, counters._counts.values())))
    assert counted() == {(PAYING, "key_claimed"): 1}


def test_w002_reports_counters_that_only_tenants_have_a_table_for(
    settings, monkeypatch
):
    def reported():
        return ids_found("W002", label="django_idempotency_dashboard")

    settings.SHARED_APPS = ["django_idempotency"]
    assert reported() == []
    monkeypatch.setattr(
        "django_idempotency.contrib.dashboard.checks.tenant_databases",
        lambda: iter(["default"]),
    )
    assert reported() == ["W002"]
    settings.IDEMPOTENCY = {"DASHBOARD": {"STATS_RETENTION": None}}
    assert reported() == []
    settings.IDEMPOTENCY = {}
    settings.SHARED_APPS = ["django_idempotency.contrib.dashboard"]
    assert reported() == []


@pytest.mark.postgresql
@pytest.mark.usefixtures("outside_a_test_run", "renewed_every_second")
def test_leases_survive_a_locked_table_of_counters(monkeypatch):
    monkeypatch.setattr(
        "django_idempotency.contrib.dashboard.counters.FLUSH_EVERY", 0.1
    )
    with (
        locked(
            f"LOCK TABLE {IdempotencyCounter._meta.db_table} IN ACCESS EXCLUSIVE MODE"
        ),
        Gate().running(mode=Lease(seconds=LEASE)),
    ):
        renewed()
        renewed()
