"""Tasks of Django's own framework: run once, however often they are run or enqueued."""

from __future__ import annotations

import signal
import subprocess
import sys
from contextlib import suppress

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.db import transaction

from django_idempotency import Rejected
from django_idempotency.messages.django_tasks import idempotent_task
from django_idempotency.models import IdempotencyRecord
from tests.support.callers import all_effects
from tests.support.databases import environment
from tests.support.waiting import wait_for_row_locks

pytestmark = [pytest.mark.django_tasks, pytest.mark.usefixtures("transactional_db")]


@pytest.fixture
def tasks():
    from tests.messages import tasks_of_django

    return tasks_of_django


def run_again(result):
    """What a worker does with a task whose first worker died before it could say how it
    ended.
    """
    from django.tasks import TaskContext

    return result.task.call(
        TaskContext(task_result=result), *result.args, **result.kwargs
    )


def test_a_task_that_is_run_again_returns_its_first_result(tasks):
    result = tasks.paying.enqueue("r-1")
    assert result.return_value == run_again(result) == {"paid": 5, "reference": "r-1"}
    assert all_effects() == 1


def test_the_decorator_above_task_is_refused(tasks):
    with pytest.raises(ImproperlyConfigured, match="Put it below @task"):
        idempotent_task(tasks.paying)


def test_a_task_without_a_context_is_an_error_that_says_to_take_one():
    from django.tasks import task

    failed = task(unprotected).enqueue("r-1")
    assert failed.errors[0].exception_class is ImproperlyConfigured
    assert "write @task(takes_context=True)" in failed.errors[0].traceback


@idempotent_task
def unprotected(reference):
    raise AssertionError("it ran")


def test_tasks_with_one_key_are_one(tasks):
    results = [tasks.paying_once.enqueue("r-1") for _time in range(3)]
    assert [result.return_value["paid"] for result in results] == [5] * 3
    assert all_effects() == 1
    tasks.paying_once.enqueue(reference="r-2")
    assert all_effects() == 2


def test_a_task_that_fails_leaves_nothing_and_can_be_run_again(tasks):
    failed = tasks.paying.enqueue("r-1", fails=True)
    assert failed.errors[0].exception_class is LookupError
    assert all_effects() == 0
    with pytest.raises(LookupError):
        run_again(failed)


def test_a_task_with_other_arguments_under_the_same_key_is_rejected(tasks):
    tasks.paying_once.enqueue("r-1")
    other = tasks.paying_once.enqueue("r-1", fails=True)
    assert other.errors[0].exception_class is Rejected
    assert all_effects() == 1


def test_failures_of_a_key_are_not_counted_as_crashes_of_a_task(tasks):
    for _time in range(3):
        failed = tasks.paying_once.enqueue("r-1", fails=True)
        assert failed.errors[0].exception_class is LookupError
    assert IdempotencyRecord.objects.get(key="charge-r-1").attempts == 3
    with pytest.raises(LookupError):
        run_again(failed)


def test_only_a_task_that_has_ended_its_worker_too_often_is_rejected(tasks):
    program = (
        "import django; django.setup(); from tests.messages import tasks_of_django;"
        " tasks_of_django.run('t-1', 'r-1')"
    )
    for _time in range(2):
        ended = subprocess.run(
            [sys.executable, "-c", program],
            env=environment() | {tasks.DIES: "1"},
            check=False,
        )
        assert ended.returncode == -signal.SIGKILL
        wait_for_row_locks()
    with pytest.raises(Rejected, match="2 attempts"):
        tasks.run("t-1", "r-1", attempt=3)
    assert all_effects() == 0
    assert tasks.run("t-2", "r-1")["paid"] == 5


@pytest.mark.parametrize("fails", [True, False])
def test_a_task_that_runs_inside_a_transaction_is_a_part_of_it(tasks, fails):
    """Django's default backend runs a task at once, wherever it is enqueued."""
    with suppress(LookupError), transaction.atomic():
        result = tasks.paying.enqueue("r-1")
        assert result.return_value == {"paid": 5, "reference": "r-1"}
        if fails:
            raise LookupError
    assert all_effects() == (0 if fails else 1)
