"""The tallies count what the signals tell, once, whatever becomes of the processes and the database meanwhile."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import timedelta

import pytest
from django.db import DatabaseError, connection
from django.db.models import Sum
from django.http import HttpResponse

from django_idempotency import signals, tallies
from django_idempotency.heartbeat import heartbeat
from django_idempotency.maintenance import cleanup, reap
from django_idempotency.models import IdempotencyTally
from django_idempotency.outcomes import Operation
from django_idempotency.policy import Policy
from django_idempotency.stores import store_for
from django_idempotency.tallies import EVENTS, MAINTENANCE, MOST_VIEWS, OTHER_VIEWS, PERIOD, Tallies, forget
from tests.callers import BODY, claim, door, paying, shift
from tests.databases import environment
from tests.tallier import tallying
from tests.threads import in_threads
from tests.waiting import eventually

pytestmark = pytest.mark.usefixtures("payer")

DAY = 24 * 3600
PAYING = "tests.callers.paying"
SOON, NEVER = 0.05, 3600


@pytest.fixture(autouse=True)
def counted(payer):
    """What this test has counted, from the table and by view and event; nothing of what others have."""
    tallies.tallies._reset()

    def flushed():
        tallies.tallies.flush()
        return in_the_table()

    yield flushed
    tallies.tallies._reset()


def in_the_table():
    rows = IdempotencyTally.objects.order_by().values_list("view", "event").annotate(Sum("count"))
    return {(view, event): count for view, event, count in rows}


def total(event):
    return sum(count for (_view, found), count in in_the_table().items() if found == event)


# --- What is counted -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("event", EVENTS)
def test_every_signal_is_counted_by_its_name_and_its_view(counted, event):
    for sender, times in ((paying, 2), (None, 1)):
        for _time in range(times):
            signals.send(EVENTS[event], Operation("s", "k", bytes(32), sender=sender))
    assert counted() == {(PAYING, event): 2, (MAINTENANCE, event): 1}


def test_what_requests_do_is_counted(counted):
    view = PAYING
    pay = door(paying)
    pay("a")
    pay("a")
    pay("a", b"{}")
    claim("gone", policy=Policy(mode="lease"))
    door(paying, mode="lease")("gone")
    seen = counted()
    assert seen.pop((MAINTENANCE, "claimed")) == 1  # the claim in this test, which is no view's
    assert seen == {
        (view, "claimed"): 1,
        (view, "completed"): 1,
        (view, "replayed"): 1,
        (view, "mismatched"): 1,
        (view, "in_flight"): 1,
    }


def test_maintenance_is_counted(counted):
    claim("k", policy=Policy())
    shift("k", locked_until=-10)
    reap()
    assert counted()[MAINTENANCE, "reaped"] == 1


def test_neither_a_key_nor_a_scope_is_in_a_tally(counted):
    door(paying, scope=lambda request: "user:4711")("secret-key")
    counted()
    row = " ".join(str(value) for values in IdempotencyTally.objects.values_list() for value in values)
    assert "paying" in row
    assert not [word for word in ("secret-key", "4711", BODY.decode(), "/pay/") if word in row]


def test_names_that_differ_in_case_or_in_a_space_alone_are_not_the_same(counted):
    names = ["shop.Pay", "shop.pay", "shop.pay "]
    for view in names:
        tallies.tallies.count("claimed", view)
    assert counted() == {(view, "claimed"): 1 for view in names}


def test_a_name_that_is_too_long_keeps_its_end(counted):
    def view(request):
        return HttpResponse()

    view.__qualname__ = "x" * 300 + ".pay"
    door(view)()
    ((called, _event), *_others) = counted()
    assert called.endswith("xxx.pay")
    assert len(called) == 200


def test_a_row_stands_for_five_minutes_of_the_databases_clock(counted):
    before = now()
    tallies.tallies.count("claimed", PAYING)
    counted()
    since = IdempotencyTally.objects.get().since
    assert since.timestamp() % PERIOD == 0
    assert before - timedelta(seconds=PERIOD) < since <= now()


def now():
    return store_for(Policy()).now(Policy())


def test_what_comes_later_is_added(counted):
    for _time in range(3):
        tallies.tallies.count("claimed", PAYING)
        tallies.tallies.count("claimed", PAYING)
        counted()
    assert counted() == {(PAYING, "claimed"): 6}


def test_a_process_tells_only_so_many_views_apart(counted):
    for number in range(MOST_VIEWS + 5):
        for _time in range(2):
            tallies.tallies.count("claimed", f"view{number}")
    seen = counted()
    assert len(seen) == MOST_VIEWS + 1
    assert seen[OTHER_VIEWS, "claimed"] == 5 * 2


def test_without_the_setting_nothing_is_counted(counted, settings):
    settings.IDEMPOTENCY = {"TALLY": None}
    door(paying)()
    assert counted() == {}


def test_an_error_in_counting_fails_no_request(monkeypatch, caplog):
    monkeypatch.setattr(Tallies, "count", lambda self, event, view: 1 / 0)
    assert door(paying)().status_code == 201
    assert "ZeroDivisionError" in caplog.text


def test_in_a_test_run_no_thread_writes():
    door(paying)()
    assert heartbeat._thread is None


# --- Retention -------------------------------------------------------------------------------------------------------


def aged(**days):
    """Tallies by the name of their view, so many days old."""
    for view, age in days.items():
        IdempotencyTally.objects.create(since=now() - timedelta(days=age), view=view, event="claimed", count=1)


def kept():
    return set(IdempotencyTally.objects.values_list("view", flat=True))


def test_cleaning_up_deletes_tallies_past_their_time(settings):
    settings.IDEMPOTENCY = {"TALLY": 2 * DAY}
    aged(old=2.1, new=1.9)
    cleanup()
    assert kept() == {"new"}


def test_tallies_are_forgotten_in_bounded_statements_oldest_first(monkeypatch):
    monkeypatch.setattr(tallies, "FORGOTTEN_AT_ONCE", 2)
    aged(a=30, b=29, c=28, d=27, new=1)
    assert [forget(), kept()] == [2, {"c", "d", "new"}]
    assert [forget(), forget(), kept()] == [2, 0, {"new"}]


def test_once_nothing_is_counted_any_more_the_tallies_go(settings):
    settings.IDEMPOTENCY = {"TALLY": None}
    aged(a=0.1)
    assert forget() == 1


# --- The database goes away ------------------------------------------------------------------------------------------


@pytest.mark.row_locks
def test_what_could_not_be_written_is_counted_still_and_once(counted, proxy):
    proxy.go_away()
    tallies.tallies.count("claimed", PAYING)
    for _time in range(3):
        with pytest.raises(DatabaseError):
            tallies.tallies.flush()
        tallies.tallies.count("claimed", PAYING)
    proxy.come_back()
    connection.close()
    assert counted() == {(PAYING, "claimed"): 4}
    assert counted() == {(PAYING, "claimed"): 4}


def test_memory_is_bounded_while_nothing_can_be_written(counted):
    for number in range(3 * MOST_VIEWS):
        for event in EVENTS:
            tallies.tallies.count(event, f"view{number}")
    assert len(tallies.tallies._counts) == (MOST_VIEWS + 1) * len(EVENTS)
    counted()  # and the most there can be is not too much for one statement
    assert IdempotencyTally.objects.count() == (MOST_VIEWS + 1) * len(EVENTS)


# --- Many at once ----------------------------------------------------------------------------------------------------


def test_threads_that_count_at_once_lose_nothing(counted):
    def count(_index):
        for _time in range(2000):
            tallies.tallies.count("claimed", PAYING)

    in_threads(4, count)
    assert counted() == {(PAYING, "claimed"): 8000}


@pytest.mark.postgresql
def test_processes_that_write_the_same_rows_in_another_order_do_not_deadlock():
    views = [f"view{number}" for number in range(200)]

    def write(index):
        mine = Tallies()
        for _time in range(30):
            for view in views if index else reversed(views):
                mine.count("claimed", view)
            mine.flush()

    in_threads(2, write)
    assert total("claimed") == 2 * 30 * 200


@pytest.mark.server
def test_two_processes_at_once_count_every_request_once():
    with tallying(SOON) as one, tallying(SOON) as other:
        for process, key in ((one, "a"), (other, "b")):
            process.begin(key, 200)
        for process in (one, other):
            process.finish()
        for process in (one, other):
            process.end()
    view = PAYING
    assert in_the_table() == {(view, "claimed"): 2, (view, "completed"): 2, (view, "replayed"): 398}


@pytest.mark.server
@pytest.mark.parametrize("way", ["end", "terminate"])
def test_a_process_that_ends_writes_what_it_has_counted(way):
    with tallying(NEVER) as process:
        process.request("k", 10)
        assert in_the_table() == {}
        getattr(process, way)()
    assert (total("claimed"), total("replayed")) == (1, 9)


@pytest.mark.server
def test_a_killed_process_takes_no_more_along_than_it_has_not_written_yet():
    with tallying(SOON) as process:
        process.request("k", 10)
        eventually(lambda: total("replayed") == 9)
        process.begin("k", 1000)
        eventually(lambda: total("replayed") > 9)
        process.kill()
    assert 9 < total("replayed") <= 9 + 1000
    assert (total("claimed"), total("completed")) == (1, 1)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process_does_not_write_what_its_parent_has_counted(counted):
    tallies.tallies.count("claimed", PAYING)
    if child := os.fork():
        assert os.waitpid(child, 0)[1] == 0
    else:
        os._exit(len(tallies.tallies._counts))
    assert counted() == {(PAYING, "claimed"): 1}


@pytest.mark.server
def test_the_workers_of_a_server_write_what_they_have_counted_when_it_stops(server_database, tmp_path):
    from tests.servers import running_server

    before = told(server_database)
    with running_server(server_database, tmp_path) as server:
        for _time in range(5):
            assert server.post("/legacy/refunds/", {"amount": 1, "reference": "r"}, key=f"{tmp_path}").is_success
    assert told(server_database).get("replays", 0) >= before.get("replays", 0) + 4


def told(database):
    """What happened at one view in the last hour, as the command tells."""
    command = [sys.executable, "-m", "testproject", "idempotency_stats", "--json"]
    given = environment() | {"DATABASE_URL": database, "DEBUG": "1"}
    run = subprocess.run(command, env=given, stdout=subprocess.PIPE, check=True)
    return json.loads(run.stdout)["views"].get("testproject.views.refund", {})
