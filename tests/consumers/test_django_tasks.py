"""Tasks of Django's own framework: run once, however often they are run or enqueued, also by the outbox."""

from __future__ import annotations

from contextlib import suppress

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.db import transaction

from django_idempotency.consumers.django_tasks import TaskRejected, idempotent_task
from django_idempotency.outbox.models import OutboxEvent
from django_idempotency.outbox.publishers.base import Confirmed, Refused
from django_idempotency.outbox.publishers.django_tasks import DjangoTasksPublisher
from django_idempotency.outbox.publishing import publish
from django_idempotency.outbox.relay import EventRelay
from tests.outbox.events import event, sent
from tests.support.callers import all_effects

pytestmark = [pytest.mark.django_tasks, pytest.mark.usefixtures("transactional_db")]
HERE = "tests.consumers.tasks_of_django"


@pytest.fixture
def tasks():
    from tests.consumers import tasks_of_django

    return tasks_of_django


def run_again(result):
    """What a worker does with a task whose first worker died before it could say how it ended."""
    from django.tasks import TaskContext

    return result.task.call(TaskContext(task_result=result), *result.args, **result.kwargs)


def test_a_task_that_is_run_again_returns_its_first_result(tasks):
    result = tasks.paying.enqueue("r-1")
    assert result.return_value == run_again(result) == {"paid": 5, "reference": "r-1"}
    assert all_effects() == 1


def test_the_decorator_above_task_is_refused(tasks):
    with pytest.raises(ImproperlyConfigured, match="Put it below @task"):
        idempotent_task(tasks.paying)


def test_a_task_without_a_context_is_told_to_take_one():
    from django.tasks import task

    failed = task(unprotected).enqueue("r-1")
    assert failed.errors[0].exception_class is ImproperlyConfigured
    assert "write @task(takes_context=True)" in failed.errors[0].traceback


@idempotent_task
def unprotected(reference):
    raise AssertionError("it ran")


def test_tasks_with_one_message_id_are_one(tasks):
    results = [tasks.paying.enqueue("r-1", message_id="m-1") for _time in range(3)]
    assert [result.return_value["paid"] for result in results] == [5] * 3
    assert all_effects() == 1
    tasks.paying.enqueue("r-1")
    assert all_effects() == 2


def test_a_task_that_fails_leaves_nothing_and_can_be_run_again(tasks):
    failed = tasks.paying.enqueue("r-1", fails=True)
    assert failed.errors[0].exception_class is LookupError
    assert all_effects() == 0
    with pytest.raises(LookupError):
        run_again(failed)


def test_another_task_under_the_same_id_is_rejected(tasks):
    tasks.paying.enqueue("r-1", message_id="m-1")
    other = tasks.paying.enqueue("r-2", message_id="m-1")
    assert other.errors[0].exception_class is TaskRejected
    assert all_effects() == 1


def test_an_event_that_is_sent_again_runs_its_task_once(tasks):
    one = event(f"{HERE}.paying", b'["r-1"]')
    assert [*sent(DjangoTasksPublisher(), one), *sent(DjangoTasksPublisher(), one)] == [Confirmed(one)] * 2
    assert all_effects() == 1


def test_the_relay_enqueues_a_task(tasks, settings):
    publisher = {"BACKEND": "django_idempotency.outbox.publishers.django_tasks.DjangoTasksPublisher"}
    settings.IDEMPOTENCY = {"OUTBOX": {"PUBLISHERS": {"default": publisher}}}
    with transaction.atomic():
        publish(f"{HERE}.plain", {"reference": "r-1"})
        publish(f"{HERE}.paying", {"reference": "r-2"})
    assert EventRelay("default").run_once() == 2
    assert (all_effects(), OutboxEvent.objects.count()) == (2, 0)


def test_a_task_whose_backend_is_not_there_is_refused(tasks):
    lost, other = event(f"{HERE}.plain", b'["r-1"]'), event(f"{HERE}.paying", b'["r-2"]')
    outcomes = sent(DjangoTasksPublisher(backend="gone"), lost, other)
    assert [type(outcome) for outcome in outcomes] == [Refused, Refused]
    assert "gone" in outcomes[0].reason


@pytest.mark.parametrize("fails", [True, False])
def test_a_task_that_runs_inside_a_transaction_is_a_part_of_it(tasks, fails):
    """Django's default backend runs a task at once, wherever it is enqueued."""
    with suppress(LookupError), transaction.atomic():
        result = tasks.paying.enqueue("r-1")
        assert result.return_value == {"paid": 5, "reference": "r-1"}
        if fails:
            raise LookupError
    assert all_effects() == (0 if fails else 1)


@pytest.mark.parametrize(
    ("topic", "payload"), [(f"{HERE}.nothing", b"[]"), ("json.loads", b"[]"), (f"{HERE}.plain", b"1")]
)
def test_what_is_no_task_is_refused_for_good(tasks, topic, payload):
    one = event(topic, payload)
    (outcome,) = sent(DjangoTasksPublisher(), one)
    assert isinstance(outcome, Refused)
    assert outcome.permanent
