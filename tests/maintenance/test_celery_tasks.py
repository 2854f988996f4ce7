"""The Celery tasks, called, and under a real worker and a real beat; their schedule."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

import pytest
from kombu import Connection, Exchange, Queue

from django_idempotency.maintenance import passes
from django_idempotency.models import IdempotencyRecord
from django_idempotency.tasks import BEAT_SCHEDULE, BODIES_BEAT_SCHEDULE
from testproject.celery import app
from tests.support.databases import environment
from tests.support.maintained import all_done, done, work_for_all
from tests.support.waiting import eventually

pytestmark = [pytest.mark.celery, pytest.mark.usefixtures("payer")]

ROOT = Path(__file__).parents[2]
ENTRIES = BEAT_SCHEDULE | BODIES_BEAT_SCHEDULE


@pytest.mark.parametrize("entry", ENTRIES.values(), ids=ENTRIES)
def test_a_scheduled_run_is_over_before_the_next_begins(entry):
    """The message does not outlive ``expires``, nor the run ``time_limit``: so they can't overlap."""
    limits = entry["options"]
    assert limits["expires"] + limits["time_limit"] <= entry["schedule"]
    assert entry["kwargs"]["max_seconds"] < limits["soft_time_limit"] < limits["time_limit"]


def test_the_tasks_take_what_their_schedule_gives_do_the_work_and_return_json():
    app.loader.import_default_modules()
    work_for_all()
    results = {name: app.tasks[entry["task"]].apply(kwargs=entry["kwargs"]).get() for name, entry in ENTRIES.items()}
    assert {name: result["done"] for name, result in results.items()} == {
        "idempotency-reap": {"failed": 1, "on_hold": 0},
        "idempotency-cleanup": {"deleted": 1},
        "idempotency-drop-bodies": {"dropped": 1},
    }
    assert all(result["finished"] for result in results.values())
    assert json.loads(json.dumps(results)) == results
    assert all_done()


def test_a_pass_that_an_app_registers_later_is_a_task_too(monkeypatch):
    monkeypatch.setattr(passes, "PASSES", dict(passes.PASSES))
    passes.register(replace(passes.CLEANUP, name="later"))
    done("due")
    assert app.tasks["django_idempotency.later"](max_seconds=1)["done"] == {"deleted": 1}


def test_the_schedule_can_be_imported_by_the_settings():
    program = (
        "from django_idempotency.tasks import BEAT_SCHEDULE;"
        "from django_idempotency.contrib.partitions import tasks; from django.apps import apps; assert not apps.ready"
    )
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)


@contextmanager
def running(broker_url, directory):
    """A worker and a beat on a queue of their own, and the file that both log to."""
    queue = f"idempotency-test-{uuid4().hex}"
    given = environment() | {
        "DJANGO_SETTINGS_MODULE": "tests.support.settings.beat",
        "CELERY_BROKER_URL": broker_url,
        "TEST_QUEUE": queue,
        "DEBUG": "1",
    }
    celery = [sys.executable, "-m", "celery", "--app", "testproject"]
    worker = ["worker", "--hostname", f"{queue}@tests", "--concurrency", "1", "--loglevel", "INFO"]
    worker += ["--without-gossip", "--without-mingle", "--without-heartbeat"]
    beat = ["beat", "--schedule", str(directory / "schedule"), "--pidfile", "", "--max-interval", "1"]
    log_file = directory / "celery.log"
    processes = []
    with ExitStack() as stack:
        log = stack.enter_context(log_file.open("wb"))
        stack.callback(forget, broker_url, queue)
        for command in (worker, beat):
            process = subprocess.Popen([*celery, *command], cwd=ROOT, env=given, stdout=log, stderr=log)
            stack.callback(process.wait)
            stack.callback(process.terminate)
            processes.append(process)
        yield processes, log_file


def forget(broker_url, queue):
    with Connection(broker_url) as broker:
        bound = Queue(queue, Exchange(queue), queue)(broker.default_channel)
        bound.declare()  # in Redis, who has not declared it does not know what else to delete
        bound.delete()
        bound.exchange.delete()


@pytest.mark.redis
def test_a_real_worker_and_beat_do_the_work(redis_url, tmp_path):
    """At once, though each interval is an hour."""
    work_for_all()
    with running(redis_url, tmp_path) as (processes, log):
        with suppress(TimeoutError):
            eventually(lambda: all_done() or any(process.poll() is not None for process in processes), within=150)
        assert all_done(), log.read_text(errors="replace")[-5000:]
    assert IdempotencyRecord.objects.count() == 2
