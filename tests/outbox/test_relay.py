"""One relay: order by key, whose fault a failure is, what is tried again and what is given up."""

from __future__ import annotations

import threading

import pytest
from django.db import connection, transaction

from django_idempotency.outbox.models import Lane, OutboxEvent, Status
from django_idempotency.outbox.publishers.base import PublisherUnavailable
from django_idempotency.outbox.publishing import publish
from django_idempotency.outbox.signals import event_failed
from testproject.benchmarks.outbox import holding_xmin
from tests.outbox.conftest import receiver
from tests.support import plans


def publish_all(*events):
    """Each an event's topic, with its key behind a slash, in one transaction."""
    with transaction.atomic():
        return [publish(topic, {}, key=key) for topic, _, key in (event.partition("/") for event in events)]


def left():
    return list(OutboxEvent.objects.order_by("id").values_list("topic", flat=True))


def test_what_was_published_is_sent_and_gone(relay):
    ids = publish_all("a", "b")
    one = relay()
    assert one.run_once() == 2
    assert [event.id for event in receiver(one).events] == ids
    assert left() == []


def test_confirmed_events_are_kept_where_a_retention_is_stated(outbox, relay):
    outbox(RETENTION=60)
    publish_all("a")
    relay().run_once()
    event = OutboxEvent.objects.get()
    assert (event.status, event.finished_at is not None) == (Status.PUBLISHED, True)


def test_events_of_a_key_go_in_order_and_one_at_a_time(relay):
    publish_all("1/k", "2/k", "3/k", "x/other", "y")
    one = relay()
    one.run_once()
    assert [topic for topic in receiver(one).topics if topic in "123"] == ["1", "2", "3"]
    calls = [[event.key for event in call if event.key] for call in receiver(one).calls]
    assert all(len(keys) == len(set(keys)) for keys in calls)


def test_a_refused_head_keeps_its_key_and_lets_others_pass(outbox, relay):
    outbox(FIRST_DELAY=60, LONGEST_DELAY=60)
    publish_all("bad/k", "next/k", "other/o", "unkeyed")
    one = relay()
    receiver(one).refuses = lambda event: "no" if event.topic == "bad" else None
    one.run_once()
    assert sorted(receiver(one).topics) == ["other", "unkeyed"]
    publish_all("later/k")
    one.run_once()
    assert left() == ["bad", "next", "later"]
    assert OutboxEvent.objects.get(topic="bad").attempts == 1


def test_a_key_goes_on_in_order_when_its_head_is_out(relay):
    publish_all("bad/k", *(f"{n:03}/k" for n in range(100)))
    one = relay()
    receiver(one).refuses = lambda event: "no" if event.topic == "bad" else None
    one.step()
    publish_all("new/k", *(f"new-{n}" for n in range(200)))
    one.step()
    receiver(one).refuses = lambda event: None
    while one.step() or left():
        pass
    assert [event.topic for event in receiver(one).events if event.key] == [
        "bad",
        *(f"{n:03}" for n in range(100)),
        "new",
    ]


@pytest.mark.parametrize(("policy", "sent"), [("hold", ["other"]), ("free", ["next", "other"])])
def test_a_dead_head_holds_or_frees_its_key(outbox, relay, policy, sent):
    outbox(DEAD_HEAD=policy, MAX_ATTEMPTS=1)
    publish_all("bad/k", "next/k", "other/o")
    one = relay()
    receiver(one).refuses = lambda event: "no" if event.topic == "bad" else None
    one.run_once()
    assert sorted(receiver(one).topics) == sent
    dead = OutboxEvent.objects.get(topic="bad")
    assert (dead.status, dead.attempts, dead.error) == (Status.DEAD, 1, "no")


def test_an_event_is_given_up_after_the_last_attempt(outbox, relay):
    outbox(MAX_ATTEMPTS=3, FIRST_DELAY=0.001, LONGEST_DELAY=0.001)
    publish_all("bad")
    one = relay()
    receiver(one).refuses = lambda event: "no"
    while OutboxEvent.objects.get().status != Status.DEAD:
        one.step()
    assert one.step() == 0
    assert len(receiver(one).calls) == 3


def test_what_can_never_be_sent_is_given_up_at_once(relay):
    publish_all("bad")
    one = relay()
    receiver(one).refuses, receiver(one).permanent = lambda event: "never", True
    one.run_once()
    assert OutboxEvent.objects.get().status == Status.DEAD


def test_an_outage_is_no_attempt_of_any_event(relay):
    publish_all("a")
    one = relay()
    receiver(one).is_up = False
    with pytest.raises(PublisherUnavailable):
        one.run_once()
    assert OutboxEvent.objects.get().attempts == 0
    receiver(one).is_up = True
    assert one.run_once() == 1


def test_a_relay_that_runs_waits_an_outage_out(relay):
    publish_all("a")
    one, stop = relay(), threading.Event()
    outages = iter([False, False])

    def connect():
        if not next(outages, True):
            raise PublisherUnavailable("it is down")

    receiver(one).connect = connect
    receiver(one).during = lambda event: stop.set()
    one.run(stop)
    assert left() == []


def test_an_event_that_breaks_the_connection_is_found_out(outbox, relay):
    outbox(MAX_ATTEMPTS=1)
    publish_all("a", "deadly", "b")
    one = relay()
    receiver(one).deadly = lambda event: event.topic == "deadly"
    one.run_once()
    assert sorted(receiver(one).topics) == ["a", "b"]
    assert OutboxEvent.objects.get().status == Status.DEAD


def test_an_event_that_stays_silent_among_others_is_to_blame(outbox, relay):
    outbox(FIRST_DELAY=60, LONGEST_DELAY=60)
    publish_all("a", "silent", "b")
    one = relay()
    receiver(one).silent = lambda event: event.topic == "silent"
    one.run_once()
    event = OutboxEvent.objects.get()
    assert (event.topic, event.attempts) == ("silent", 1)
    assert "no confirmation within 5 s" in event.error


def test_silence_while_nothing_is_confirmed_is_no_attempt(outbox, relay):
    outbox(FIRST_DELAY=60, LONGEST_DELAY=60)
    publish_all("bad", "silent")
    one = relay()
    receiver(one).refuses = lambda event: "too large" if event.topic == "bad" else None
    receiver(one).silent = lambda event: len(receiver(one).calls[-1]) > 1
    one.run_once()
    assert receiver(one).topics == ["silent"]
    assert left() == ["bad"]


def test_a_broken_connection_alone_is_nobodys_fault(relay):
    publish_all("a")
    one = relay()
    breaks = iter([True])
    receiver(one).deadly = lambda event: next(breaks, False)
    one.run_once()
    assert receiver(one).topics == ["a"]
    assert receiver(one).events[0].attempts == 0


@pytest.mark.row_locks
def test_what_commits_late_is_not_lost(relay, other_thread):
    one = relay()

    def begin():
        transaction.set_autocommit(False)
        connection.in_atomic_block = True
        publish("late", {})

    def end():
        connection.in_atomic_block = False
        connection.commit()
        transaction.set_autocommit(True)

    other_thread(begin)
    publish_all(*(f"early-{n}" for n in range(200)))
    one.run_once()
    assert len(receiver(one).events) == 200
    other_thread(end)
    publish_all("early")
    while left():
        one.step()
    assert {"late", "early"} <= set(receiver(one).topics)


def test_no_transaction_is_open_while_events_are_sent(relay):
    publish_all("a/k", "b/k")
    one = relay()
    seen = []
    receiver(one).during = lambda event: seen.append((connection.in_atomic_block, connection.get_autocommit()))
    one.run_once()
    assert seen == [(False, True)] * 2


def test_an_event_that_is_held_back_does_not_fill_its_lane(outbox, relay):
    outbox(FIRST_DELAY=60, LONGEST_DELAY=60, BATCH=8)
    publish_all("bad/k", *(f"{n}/k" for n in range(300)))
    one = relay()
    receiver(one).refuses = lambda event: "no" if event.topic == "bad" else None
    one.run_once()
    publish_all(*(f"free-{n}" for n in range(100)))
    one.run_once()
    assert sum(topic.startswith("free") for topic in receiver(one).topics) == 100


def test_an_idle_relay_keeps_its_lanes_between_two_looks(outbox, relay):
    outbox(POLL=30, SEND_TIMEOUT=0.1, LEASE=1)
    one, stop, kept = relay(), threading.Event(), []

    def wait(seconds, stop):
        stop.wait(4)
        kept.append(one.lanes.are_ours)
        stop.set()

    one.wakeup.wait = wait
    one.run(stop)
    assert kept == [True]


def test_a_relay_that_lost_its_lanes_counts_no_failure(relay):
    publish_all("bad")
    one, told = relay(), []

    def receive(**told_by_signal):
        told.append(told_by_signal)

    def lose_lanes(event):
        Lane.objects.update(relay_id=None)
        return "no"

    receiver(one).refuses = lose_lanes
    event_failed.connect(receive)
    try:
        one.step()
    finally:
        event_failed.disconnect(receive)
    assert (OutboxEvent.objects.get().attempts, told) == (0, [])


@pytest.mark.postgresql
def test_a_pass_steps_over_nothing_that_was_deleted_before(outbox, relay, monkeypatch):
    """While ``xmin`` is held, what was deleted stays, and its index leads to it. Also where a failed event has come."""
    outbox(BATCH=500, FIRST_DELAY=1_000, LONGEST_DELAY=1_000)
    monkeypatch.setattr("django_idempotency.outbox.cursor.OVERLAP", 0)
    monkeypatch.setattr("django_idempotency.outbox.cursor.SWEEP_EVERY", 1_000_000)
    one, buffers = relay(), []
    receiver(one).refuses = lambda event: "no" if event.topic == "bad" else None
    with holding_xmin():
        for round in range(5):
            if round:
                publish_all(*(f"t/k-{number}" for number in range(600)))
            publish_all("bad/k" if round == 4 else "good/k")
            while one.step():
                pass
            buffers.append(buffers_of(one.step))
    assert max(buffers[2:]) <= buffers[1] + 16


def buffers_of(work):
    """How many buffers are read by what ``work`` selects from the table of events."""
    counts = []

    def explain(execute, sql, params, *details):
        if OutboxEvent._meta.db_table in sql and sql.lstrip().startswith("SELECT"):
            with connection.connection.cursor() as cursor:
                cursor.execute(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {sql}", params)
                counts.append(plans.buffers(cursor.fetchone()[0][0]["Plan"]))
        return execute(sql, params, *details)

    with connection.execute_wrapper(explain):
        work()
    return sum(counts)
