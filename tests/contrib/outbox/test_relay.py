"""One relay: order by key, whose fault a failure is, what is tried again and what is
given up.
"""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager

import pytest
from django.db import OperationalError, connection, transaction

from django_idempotency.contrib.outbox.models import Lane, OutboxEvent, Relay, Status
from django_idempotency.contrib.outbox.publishing import publish
from django_idempotency.contrib.outbox.signals import outbox_failed
from django_idempotency.messages.publisher import (
    Confirmed,
    ConnectionLost,
    PublisherUnavailable,
)
from django_idempotency.models import DatabaseNow
from tests.contrib.outbox.conftest import receiver
from tests.contrib.outbox.events import buffers_of, publish_all, waiting
from tests.support.callers import heard
from tests.support.sql import run_sql
from tests.support.waiting import eventually


def left():
    return list(OutboxEvent.objects.order_by("id").values_list("topic", flat=True))


def test_a_refused_head_keeps_its_key_and_lets_others_pass(outbox, relay):
    outbox(FIRST_DELAY=60, LONGEST_DELAY=60)
    publish_all("bad/k", "next/k", "other/o", "unkeyed")
    one = relay(refusing="bad")
    one.run_once()
    assert sorted(receiver(one).topics) == ["other", "unkeyed"]
    publish_all("later/k")
    one.run_once()
    assert left() == ["bad", "next", "later"]
    assert OutboxEvent.objects.get(topic="bad").attempts == 1


def test_a_key_goes_on_in_order_when_its_head_is_out(relay):
    publish_all("bad/k", *(f"{n:03}/k" for n in range(100)))
    one = relay(refusing="bad")
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


def test_a_dead_head_holds_its_key(outbox, relay):
    outbox(MAX_ATTEMPTS=1)
    publish_all("bad/k", "next/k", "other/o")
    one = relay(refusing="bad")
    one.run_once()
    assert receiver(one).topics == ["other"]
    dead = OutboxEvent.objects.get(topic="bad")
    assert (dead.status, dead.attempts, dead.error) == (Status.DEAD, 1, "no")


def test_an_outage_does_not_use_up_attempts_of_events(relay):
    publish_all("a")
    one = relay()
    receiver(one).is_up = False
    with pytest.raises(PublisherUnavailable):
        one.run_once()
    assert OutboxEvent.objects.get().attempts == 0
    receiver(one).is_up = True
    assert one.run_once() == 1


@pytest.fixture
def without_sweeps(monkeypatch):
    """A relay reads what is behind its cursor only if it remembers to. All that it
    reads is old at once.
    """
    monkeypatch.setattr("django_idempotency.contrib.outbox.cursor.OVERLAP", 0)
    monkeypatch.setattr(
        "django_idempotency.contrib.outbox.cursor.SWEEP_EVERY", 1_000_000
    )


@pytest.mark.parametrize("raised_by", ["connect", "send"])
def test_order_by_key_survives_an_outage_of_the_broker(
    without_sweeps, relay, raised_by
):
    one = relay()
    publish_all("1/k", "2/k")
    setattr(receiver(one), raised_by, unavailable)
    for _pause in range(3):
        with pytest.raises(PublisherUnavailable):
            one.step()
    delattr(receiver(one), raised_by)
    publish_all("3/k", "4/k")
    one.run_once()
    assert receiver(one).topics == ["1", "2", "3", "4"]


def unavailable(*arguments):
    raise PublisherUnavailable("it is down")


def test_order_by_key_survives_a_failure_that_could_not_be_noted(
    without_sweeps, outbox, relay
):
    outbox(FIRST_DELAY=60, LONGEST_DELAY=60)
    one = relay(refusing="bad")
    publish_all("bad/k")

    def fail(execute, sql, *details):
        if sql.startswith("UPDATE") and OutboxEvent._meta.db_table in sql:
            raise OperationalError("the database went away")
        return execute(sql, *details)

    with connection.execute_wrapper(fail), pytest.raises(OperationalError):
        one.step()
    publish_all("next/k")
    one.run_once()
    assert receiver(one).topics == []
    assert OutboxEvent.objects.get(topic="bad").attempts == 1


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


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RecursionError("too deep"), "the publisher raised RecursionError: too deep"),
        (ConnectionLost("it hung up"), "connection lost: it hung up"),
    ],
)
def test_an_event_that_makes_its_publisher_raise_is_found_out(
    outbox, relay, error, reason
):
    outbox(MAX_ATTEMPTS=3)
    publish_all("a", "poison/k", "held/k", "b")
    one = relay()

    def raise_for(event):
        if event.topic == "poison":
            raise error

    receiver(one).during = raise_for
    eventually(
        lambda: one.step() == 0 and OutboxEvent.objects.filter(status=Status.DEAD)
    )
    assert sorted(receiver(one).topics) == ["a", "b"]
    assert left() == ["poison", "held"]
    dead = OutboxEvent.objects.get(topic="poison")
    assert (dead.attempts, dead.error) == (3, reason)


def test_an_event_that_made_its_publisher_raise_is_tried_again_alone(outbox, relay):
    publish_all("poison")
    one = relay()
    receiver(one).deadly = lambda event: event.topic == "poison"
    one.step()
    publish_all(*"abc")
    eventually(
        lambda: OutboxEvent.objects.filter(attempts=1, available_at__lte=DatabaseNow())
    )
    assert one.step() == 4
    calls = [[event.topic for event in call] for call in receiver(one).calls]
    assert all(call == ["poison"] for call in calls if "poison" in call)
    assert sorted(receiver(one).topics) == ["a", "b", "c"]


def test_an_event_that_stays_silent_among_others_is_to_blame(outbox, relay):
    outbox(FIRST_DELAY=60, LONGEST_DELAY=60)
    publish_all("a", "silent", "b")
    one = relay()
    receiver(one).silent = lambda event: event.topic == "silent"
    one.run_once()
    event = OutboxEvent.objects.get()
    assert (event.topic, event.attempts) == ("silent", 1)
    assert "no confirmation within 60 s" in event.error


def test_silence_while_nothing_is_confirmed_does_not_use_up_attempts(outbox, relay):
    outbox(FIRST_DELAY=60, LONGEST_DELAY=60)
    publish_all("bad", "silent")
    one = relay()
    receiver(one).refuses = lambda event: "too large" if event.topic == "bad" else None
    receiver(one).silent = lambda event: len(receiver(one).calls[-1]) > 1
    one.run_once()
    assert receiver(one).topics == ["silent"]
    assert left() == ["bad"]


def test_an_event_waits_for_the_previous_of_its_key_and_for_no_other(relay):
    """The first of one key is confirmed when all events of the others are."""
    publish_all("slow/a", "next/a", *(f"{n}/{key}" for n in range(3) for key in "bc"))
    one = relay()
    order = []

    def send(events, timeout):
        late = []
        for event in events:
            order.append(event.topic)
            if event.topic == "slow":
                late.append(event)
            else:
                yield Confirmed(event)
        yield from map(Confirmed, late)
        order.append("slow is confirmed")
        yield from map(Confirmed, events)

    receiver(one).send = send
    assert one.step() == 8
    assert left() == []
    assert order[0] == "slow"
    assert sorted(order[1:7]) == sorted("001122")
    assert order[7:] == ["slow is confirmed"]


def test_an_event_that_is_silent_after_all_others_were_confirmed_is_sent_alone(relay):
    """The broker may have begun to hang."""
    publish_all("a", "b", "silent")
    one = relay()
    receiver(one).silent = lambda event: (
        event.topic == "silent" and len(receiver(one).calls) == 1
    )
    assert one.run_once() == 3
    assert receiver(one).events[-1].attempts == 0


def test_a_broken_connection_alone_is_nobodys_fault(relay):
    publish_all("a")
    one = relay()
    breaks = iter([True])
    receiver(one).deadly = lambda event: next(breaks, False)
    one.run_once()
    assert receiver(one).topics == ["a"]
    assert receiver(one).events[0].attempts == 0


@pytest.mark.row_locks
def test_an_event_that_commits_late_is_not_lost(relay, other_thread):
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


def test_events_are_sent_outside_a_transaction(relay):
    publish_all("a/k", "b/k")
    one = relay()
    seen = []
    receiver(one).during = lambda event: seen.append(
        (connection.in_atomic_block, connection.get_autocommit())
    )
    one.run_once()
    assert seen == [(False, True)] * 2


def test_an_event_that_is_held_back_does_not_fill_its_lane(outbox, relay):
    outbox(FIRST_DELAY=60, LONGEST_DELAY=60, BATCH=8)
    publish_all("bad/k", *(f"{n}/k" for n in range(300)))
    one = relay(refusing="bad")
    one.run_once()
    publish_all(*(f"free-{n}" for n in range(100)))
    one.run_once()
    assert sum(topic.startswith("free") for topic in receiver(one).topics) == 100


def test_an_idle_relay_keeps_its_lanes_between_two_looks(outbox, relay):
    """It renews its lease for longer than events may take and a lease lasts."""
    outbox(POLL=300, SEND_TIMEOUT=0.1, LEASE=1)
    one, renewals, kept = relay(), [], []
    renew = one.lanes._try_to_renew
    one.lanes._try_to_renew = lambda id: renewals.append(time.monotonic()) or renew(id)

    class Stop(threading.Event):
        def wait(self, seconds):
            late = time.monotonic() + 2
            kept.append(
                eventually(
                    lambda: (
                        any(renewal > late for renewal in renewals)
                        and one.lanes.are_ours
                    )
                )
            )
            self.set()

    one.run(Stop())
    assert kept == [True]


def test_a_relay_that_lost_its_lanes_does_not_count_failures(relay):
    publish_all("bad")
    one = relay()
    receiver(one).refuses = lambda event: (
        "no" if Lane.objects.update(relay_id=None) else None
    )
    with heard(outbox_failed) as sent:
        one.step()
    assert (OutboxEvent.objects.get().attempts, sent) == (0, [])


@pytest.fixture
def quick_renewals(monkeypatch):
    """A relay soon finds out that it was removed, and keeps its lanes until it is."""
    monkeypatch.setattr("django_idempotency.contrib.outbox.lanes.RENEWALS_A_LEASE", 600)


def lose_lanes(relay):
    """As if another relay had removed it, because its lease ran out."""
    Relay.objects.filter(pk=relay.lanes.id).delete()
    eventually(lambda: not relay.lanes.are_ours)


@pytest.mark.row_locks
def test_a_relay_that_lost_its_lanes_takes_none_after_the_present_event(
    quick_renewals, relay
):
    publish_all("1/k", "2/k", "3/k")
    one, other = relay(), relay()
    receiver(one).during = lambda event: lose_lanes(one)
    one.step()
    other.run_once()
    assert receiver(one).topics == ["1"]
    assert receiver(other).topics == ["2", "3"]


@pytest.mark.row_locks
def test_a_relay_that_lost_its_lanes_does_not_send_suspects(quick_renewals, relay):
    publish_all("a", "b", "c")
    one = relay()
    receiver(one).deadly = lambda event: lose_lanes(one) is None
    one.step()
    assert len(receiver(one).calls) == 1


@contextmanager
def holding_xmin():
    other = connection.copy()
    with other.cursor() as cursor:
        cursor.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
        cursor.execute("SELECT pg_current_xact_id()")
        yield
        cursor.execute("ROLLBACK")
    other.close()


@pytest.mark.postgresql
def test_a_pass_steps_over_nothing_that_was_deleted_before(
    without_sweeps, outbox, relay
):
    """While ``xmin`` is held, what was deleted stays, and its index leads to it. Also
    where a failed event has come.
    """
    outbox(BATCH=500, FIRST_DELAY=1_000, LONGEST_DELAY=1_000)
    one, buffers = relay(refusing="bad"), []
    with holding_xmin():
        for round in range(5):
            if round:
                publish_all(*(f"t/k-{number}" for number in range(600)))
            publish_all("bad/k" if round == 4 else "good/k")
            while one.step():
                pass
            buffers.append(buffers_of(one.step))
    assert max(buffers[2:]) <= buffers[1] + 16


@pytest.mark.postgresql
def test_events_that_wait_for_their_next_attempt_are_not_stepped_over(outbox, relay):
    """By the statistics of a table that was empty, too."""
    outbox(FIRST_DELAY=1_000, LONGEST_DELAY=1_000)
    run_sql(f"TRUNCATE {OutboxEvent._meta.db_table}")
    run_sql(f"ANALYZE {OutboxEvent._meta.db_table}")
    one, buffers = relay(), []
    for _round in range(2):
        publish_all(*(f"t/k-{number}" for number in range(100)))
        buffers.append(buffers_of(one.step))
        waiting(20_000, "1 hour")
    assert len(receiver(one).events) == 200
    assert buffers[1] < buffers[0] + 1_000


@pytest.mark.postgresql
def test_events_that_fail_again_take_only_a_share(outbox, relay):
    outbox(FIRST_DELAY=1_000, LONGEST_DELAY=1_000, BATCH=100)
    waiting(1_000, "-1 second")
    publish_all(*(f"good-{number}" for number in range(100)))
    one = relay(refusing="bad")
    one.step()
    assert (
        len(receiver(one).events),
        OutboxEvent.objects.filter(attempts=4).count(),
    ) == (100, 25)
    one.run_once()
    assert OutboxEvent.objects.filter(attempts=4).count() == 1_000


def test_a_read_of_the_relay_is_bounded_by_bytes(relay):
    with transaction.atomic():
        for number in range(40):
            publish(str(number), b"x" * 1_000_000, key="k" * (number % 2))
    one = relay()
    assert one.step() == 17
    one.run_once()
    assert sorted(map(int, receiver(one).topics)) == list(range(40))
    assert [topic for topic in receiver(one).topics if int(topic) % 2] == [
        str(number) for number in range(1, 40, 2)
    ]
