"""The heartbeat outlives whatever goes wrong in it: the leases of the whole process hang on it."""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import pytest

from django_idempotency import engine
from django_idempotency.exceptions import ClaimLost, StoreUnavailable
from django_idempotency.heartbeat import Heartbeat
from django_idempotency.models import IdempotencyRecord
from django_idempotency.outcomes import Operation
from django_idempotency.policy import Policy
from tests.threads import in_threads
from tests.waiting import eventually

LEASE = Policy(mode="lease", lease=500)
UNKNOWN = Policy(mode="lease", using="nowhere")


@pytest.fixture
def claim(transactional_db):
    return engine.claim(Operation("s", "k", b"f" * 32), Policy(mode="lease", lease=20))


@pytest.fixture
def beats(monkeypatch):
    """A heartbeat that beats only when told."""
    monkeypatch.setattr(Heartbeat, "_wake", lambda self, seconds: None)
    return Heartbeat()


def beat(beats):
    """In a thread of its own, as it is: it closes stale connections."""
    in_threads(1, lambda _: beats.beat())


def left():
    record = IdempotencyRecord.objects.get(key="k")
    return record.locked_until - record.locked_at


def test_a_beat_renews_what_is_kept_and_no_longer_what_is_not(beats, claim):
    with beats.keeping(claim, LEASE):
        assert left() == timedelta(seconds=20)
        beat(beats)
        assert left() > timedelta(seconds=490)
    IdempotencyRecord.objects.update(locked_until=IdempotencyRecord.objects.get().locked_at)
    beat(beats)
    assert left() == timedelta(0)


@pytest.mark.usefixtures("outside_a_test_run")
def test_one_lease_that_cannot_be_renewed_does_not_cost_the_others_theirs(beats, claim):
    beats.count_replay(claim.id, UNKNOWN)
    other = engine.claim(Operation("s", "other", b"f" * 32), LEASE)
    with beats.keeping(other, UNKNOWN), beats.keeping(claim, LEASE):
        beat(beats)
    assert IdempotencyRecord.objects.get(key="k").locked_until > IdempotencyRecord.objects.get(key="other").locked_until


@pytest.mark.parametrize(("error", "tries"), [(ValueError, 3), (StoreUnavailable, 3), (ClaimLost, 1)])
def test_a_late_completion_is_tried_at_every_beat_until_it_succeeds_or_the_claim_is_lost(beats, claim, error, tries):
    tried = []

    def finish():
        tried.append(True)
        if len(tried) < 3:
            raise error

    with beats.keeping(claim, LEASE):
        beats.finish_later(claim, finish)
    for _ in range(5):
        beat(beats)
    assert len(tried) == tries


# --- Counting --------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("outside_a_test_run")
def test_replays_are_counted_at_the_next_beat(beats, claim):
    for _time in range(2):
        beats.count_replay(claim.id, LEASE)
    beat(beats)
    assert IdempotencyRecord.objects.get(key="k").replays == 2


def test_in_a_test_run_nothing_is_counted_even_when_the_thread_lives_for_something_else(beats, claim):
    """Or the end of the process would write it to a database that was never meant."""
    with beats.keeping(claim, LEASE):
        beats.count_replay(claim.id, LEASE)
        beat(beats)
    assert IdempotencyRecord.objects.get(key="k").replays == 0


# --- Errands ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def outside_a_test_run(monkeypatch):
    monkeypatch.setattr("django_idempotency.heartbeat.in_test_run", lambda: False)


class Errand:
    """Fails so many times, then is done; tells when it is."""

    def __init__(self, failures=0):
        self.failures, self.tries, self.done = failures, 0, threading.Event()

    def __call__(self):
        self.tries += 1
        if self.tries <= self.failures:
            raise ValueError
        self.done.set()


@pytest.mark.usefixtures("outside_a_test_run")
def test_an_errand_is_tried_again_until_it_succeeds_and_then_the_thread_ends():
    beats, errand = Heartbeat(), Errand(failures=2)
    beats.later(errand, 0.01)
    thread = beats._thread
    assert errand.done.wait(10)
    thread.join(10)
    assert (errand.tries, thread.is_alive(), beats._thread) == (3, False, None)


@pytest.mark.usefixtures("outside_a_test_run")
def test_an_errand_that_is_asked_for_twice_is_done_once(beats):
    errand = Errand()
    for _time in range(2):
        beats.later(errand, 0)
    beat(beats)
    beat(beats)
    assert errand.tries == 1


@pytest.mark.usefixtures("outside_a_test_run")
def test_an_errand_is_not_done_before_its_time(beats):
    errand = Errand()
    beats.later(errand, 3600)
    beat(beats)
    assert errand.tries == 0


@pytest.mark.usefixtures("outside_a_test_run")
def test_what_is_asked_for_during_an_errand_is_another_one(beats):
    tries = []

    def errand():
        tries.append(True)
        if len(tries) == 1:
            beats.later(errand, 0)

    beats.later(errand, 0)
    for _time in range(3):
        beat(beats)
    assert len(tries) == 2


@pytest.mark.usefixtures("outside_a_test_run")
def test_the_end_of_the_process_does_what_is_left_and_waits_for_it():
    beats, errand = Heartbeat(), Errand()
    beats.later(errand, 3600)
    beats.end()
    assert errand.tries == 1


@pytest.mark.usefixtures("outside_a_test_run")
def test_the_end_of_the_process_waits_no_longer_than_a_moment(monkeypatch):
    monkeypatch.setattr("django_idempotency.heartbeat.PATIENCE_AT_EXIT", 0.01)
    beats, let_go = Heartbeat(), threading.Event()
    beats.later(lambda: let_go.wait(10), 3600)
    thread = beats._thread
    beats.end()
    assert thread.is_alive()
    let_go.set()
    thread.join(10)


def test_in_a_test_run_there_are_no_errands():
    beats, errand = Heartbeat(), Errand()
    beats.later(errand, 0)
    assert beats._thread is None


@pytest.mark.parametrize(("asleep_for", "woken"), [(5, True), (60, False)])
def test_the_thread_is_woken_only_for_what_is_due_while_it_would_sleep(asleep_for, woken, monkeypatch):
    beats = Heartbeat()
    told = []
    monkeypatch.setattr(beats._changed, "notify", lambda: told.append(True))
    beats._thread = threading.current_thread()
    beats._sleeps_until = time.monotonic() + 30
    beats._wake(asleep_for)
    assert bool(told) == woken


def test_a_lease_that_is_due_before_the_thread_would_wake_is_renewed_in_time(claim):
    """Beside another with a long lease, for which the thread sleeps long."""
    beats = Heartbeat()
    long = engine.claim(Operation("s", "long", b"f" * 32), LEASE)
    short = Policy(mode="lease", lease=3)
    with beats.keeping(long, LEASE):
        eventually(lambda: beats._sleeps_until > time.monotonic() + 100)
        with beats.keeping(claim, short):
            eventually(lambda: left() < timedelta(seconds=20) or None, within=10)
        sleeper = beats._thread
    beats.end()
    sleeper.join(10)


def test_a_thread_that_could_not_be_started_is_started_next_time(claim):
    """Or no lease of the process would be renewed any more."""
    heartbeat = Heartbeat()
    before = threading.stack_size(2**47 - 2**16)  # more than there is
    try:
        with pytest.raises(RuntimeError, match="can't start new thread"), heartbeat.keeping(claim, LEASE):
            pass
    finally:
        threading.stack_size(before)
    with heartbeat.keeping(claim, Policy(mode="lease", lease=1)):
        eventually(lambda: heartbeat._last_beat and left() < timedelta(seconds=20))
        thread = heartbeat._thread
    heartbeat.end()
    thread.join(10)
