"""The Celery tasks, called, and under a real worker and a real beat; their schedule."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from django_idempotency.maintenance import passes
from django_idempotency.tasks import BEAT_SCHEDULE, BODIES_BEAT_SCHEDULE
from testproject.celery import app
from tests.support.maintained import all_done, done, work_for_all

pytestmark = [pytest.mark.celery, pytest.mark.usefixtures("payer")]

ROOT = Path(__file__).parents[2]
ENTRIES = BEAT_SCHEDULE | BODIES_BEAT_SCHEDULE


@pytest.mark.parametrize("entry", ENTRIES.values(), ids=ENTRIES)
def test_a_scheduled_run_is_over_before_the_next_begins(entry):
    """The message does not outlive ``expires``, nor the run ``time_limit``: so they
    can't overlap.
    """
    limits = entry["options"]
    assert limits["expires"] + limits["time_limit"] <= entry["schedule"]
    assert (
        entry["kwargs"]["max_seconds"]
        < limits["soft_time_limit"]
        < limits["time_limit"]
    )


def test_the_tasks_take_what_their_schedule_gives_do_the_work_and_return_json():
    app.loader.import_default_modules()
    work_for_all()
    results = {
        name: app.tasks[entry["task"]].apply(kwargs=entry["kwargs"]).get()
        for name, entry in ENTRIES.items()
    }
    assert {name: result["done"] for name, result in results.items()} == {
        "idempotency-reap": {"failed": 1, "on_hold": 0},
        "idempotency-cleanup": {"deleted": 1},
        "idempotency-drop-bodies": {"dropped": 1},
    }
    assert all(result["finished"] for result in results.values())
    assert json.loads(json.dumps(results)) == results
    assert all_done()


def test_a_pass_that_an_app_registers_later_is_a_task_too(monkeypatch):
    monkeypatch.setattr(passes.PASSES, "_items", [*passes.PASSES])
    passes.PASSES.register(replace(passes.CLEANUP, name="later"))
    done("due")
    assert app.tasks["django_idempotency.later"](max_seconds=1)["done"] == {
        "deleted": 1
    }


def test_the_schedule_can_be_imported_by_the_settings():
    program = (
        "from django_idempotency.tasks import BEAT_SCHEDULE;from"
        " django_idempotency.contrib.partitions import tasks; from django.apps import"
        " apps; assert not apps.ready"
    )
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)
