"""What is written in the background is written once it can be, and nothing that goes
wrong with it stops the rest.
"""

from __future__ import annotations

import threading
from functools import partial
from uuid import uuid4

import pytest

from django_idempotency import engine
from django_idempotency.engine.background import Background, Worker
from django_idempotency.models import IdempotencyRecord
from django_idempotency.stores.database import DatabaseStore
from django_idempotency.values.exceptions import ClaimLost, StoreUnavailable
from django_idempotency.values.outcomes import Operation
from django_idempotency.values.policy import Lease, Policy
from tests.support.threads import in_threads

STORE = DatabaseStore(Policy(mode=Lease(seconds=500)), "default")
UNKNOWN = DatabaseStore(Policy(mode="lease", using="nowhere"), "nowhere")

pytestmark = pytest.mark.usefixtures("transactional_db")


@pytest.fixture
def background(monkeypatch):
    """It works when it is told."""
    monkeypatch.setattr(Worker, "wake", lambda self: None)
    return Background("background")


@pytest.fixture(autouse=True)
def in_test_run(monkeypatch, request):
    is_one = "in_a_test_run" in request.node.name
    monkeypatch.setattr(
        "django_idempotency.engine.background.in_test_run", lambda: is_one
    )


def work(background):
    """In a thread of its own: it gets a connection of its own there."""
    in_threads(1, lambda _: background.work())


class Recorder:
    """Fails so many times, then is done; tells when it is."""

    def __init__(self, failures=0):
        self.failures, self.tries, self.done = failures, 0, threading.Event()

    def __call__(self):
        self.tries += 1
        if self.tries <= self.failures:
            raise ValueError
        self.done.set()


@pytest.mark.parametrize(
    ("error", "tries"), [(ValueError, 3), (StoreUnavailable, 3), (ClaimLost, 1)]
)
def test_a_late_completion_is_retried(background, monkeypatch, error, tries):
    monkeypatch.setattr("django_idempotency.engine.background.COMPLETE_EVERY", 0)
    tried = []

    def write():
        tried.append(True)
        if len(tried) < 3:
            raise error

    background.complete(write, STORE)
    for _time in range(5):
        work(background)
    assert len(tried) == tries


def test_replays_are_counted_even_if_others_can_not_be(background):
    claim = engine.claim(Operation("s", "k", b"f" * 32), STORE.policy)
    background.count_replay(claim.id, UNKNOWN)
    for _time in range(2):
        background.count_replay(claim.id, STORE)
    work(background)
    assert IdempotencyRecord.objects.get().replays == 2


def test_work_is_tried_until_it_succeeds():
    background, recorder = Background("background"), Recorder(failures=2)
    with background.changed:  # or the thread might have ended before it is looked at
        background.later(recorder, 0.01, STORE)
        thread = background._thread
    assert recorder.done.wait(60)
    thread.join(60)
    assert (recorder.tries, thread.is_alive(), background._thread) == (3, False, None)


def test_work_that_is_asked_for_twice_is_done_once(background):
    recorder = Recorder()
    for _time in range(2):
        background.later(recorder, 0, STORE)
    work(background)
    work(background)
    assert recorder.tries == 1


def test_work_is_not_done_before_its_time(background):
    recorder = Recorder()
    background.later(recorder, 3600, STORE)
    work(background)
    assert recorder.tries == 0


def test_work_that_is_asked_for_while_it_is_done_is_done_again(background):
    tries = []

    def recorder():
        tries.append(True)
        if len(tries) == 1:
            background.later(recorder, 0, STORE)

    background.later(recorder, 0, STORE)
    for _time in range(3):
        work(background)
    assert len(tries) == 2


def test_the_end_of_the_process_finishes_the_work_that_is_left(monkeypatch):
    monkeypatch.setattr("django_idempotency.engine.background.PATIENCE_AT_EXIT", 60)
    background, recorder = Background("background"), Recorder()
    background.later(recorder, 3600, STORE)
    background.stop()
    assert recorder.tries == 1


def test_the_end_of_the_process_waits_only_a_moment(monkeypatch):
    monkeypatch.setattr("django_idempotency.engine.background.PATIENCE_AT_EXIT", 0.01)
    background, let_go = Background("background"), threading.Event()
    background.later(lambda: let_go.wait(60), 3600, STORE)
    thread = background._thread
    background.stop()
    assert thread.is_alive()
    let_go.set()
    thread.join(60)


def test_in_a_test_run_background_work_is_left_out():
    """Or the end of the process would write it to a database that was never meant."""
    background = Background("background")
    background.count_replay(uuid4(), STORE)
    background.later(Recorder(), 3600, STORE)
    assert (background.due(), background._thread) == (None, None)


def test_the_log_names_what_failed(background, caplog):
    def failing():
        raise LookupError

    background.later(partial(failing), 0, STORE)
    work(background)
    (record,) = caplog.records
    assert record.getMessage().endswith("failing: LookupError")
