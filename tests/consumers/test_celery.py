"""Tasks over a real RabbitMQ: a worker that dies, and messages that come twice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import pytest
from celery import Celery
from django.contrib.auth import get_user_model

from django_idempotency.models import IdempotencyCounter, IdempotencyRecord
from testproject import tasks
from testproject.models import LedgerEntry
from tests.consumers.workers import Worker
from tests.support.callers import all_effects as effects
from tests.support.proxy import running_proxy
from tests.support.waiting import eventually

pytestmark = [pytest.mark.rabbitmq, pytest.mark.usefixtures("transactional_db")]


@pytest.fixture
def send(rabbitmq_url) -> Iterator[Callable[..., str]]:
    """Send a task to a worker, under an id of its own or ``task_id``, which is returned."""
    get_user_model().objects.create_user("carol")
    with Celery(broker=rabbitmq_url, set_as_current=False) as producer:

        def send(worker: Worker, task: Any, *, amount: int = 5, task_id: str | None = None, **options: Any) -> str:
            arguments = {"username": "carol", "amount": amount, "reference": "r", **options}
            task_id = task_id or str(uuid4())
            producer.send_task(task.name, kwargs=arguments, queue=worker.queue, task_id=task_id, ignore_result=True)
            return task_id

        yield send


def results(task_id: str, *workers: Worker, count: int = 1) -> list[Any]:
    """What so many deliveries of the task came to."""
    found: list[Any] = []

    def enough() -> bool:
        found[:] = [result for worker in workers for result in worker.returned(task_id)]
        return len(found) >= count

    eventually(enough)
    return found


def test_a_child_that_ends_writes_what_it_has_counted(start_worker, send):
    """Comes before there are workers of other tests, and ends before ten seconds are over: then they write anyway."""
    worker = start_worker()
    task_id = send(worker, tasks.charge)
    results(task_id, worker)
    send(worker, tasks.charge, task_id=task_id)
    results(task_id, worker, count=2)
    worker.stop()
    counts = dict(IdempotencyCounter.objects.values_list("event", "count"))
    assert counts == {"key_claimed": 1, "key_completed": 1, "response_replayed": 1}
    assert IdempotencyRecord.objects.get().replays == 1


@pytest.mark.parametrize("killed", [Worker.kill, Worker.kill_child])
def test_a_task_whose_worker_is_killed_takes_effect_once(start_worker, send, killed):
    worker = start_worker()
    task_id = send(worker, tasks.charge, delay_ms=700)
    eventually(lambda: "charged r" in worker.log())
    killed(worker)
    worker = start_worker(worker.queue) if killed is Worker.kill else worker
    (paid,) = results(task_id, worker)
    assert effects() == 1
    assert str(LedgerEntry.objects.get().pk) == paid["id"]
    send(worker, tasks.charge, delay_ms=700, task_id=task_id)
    assert results(task_id, worker, count=2) == [paid, paid]


def test_a_task_whose_broker_goes_away_meanwhile_takes_effect_once(start_worker, send, rabbitmq_url):
    address = urlsplit(rabbitmq_url)
    with running_proxy({"HOST": address.hostname, "PORT": address.port or 5672}) as proxy:
        login = address.netloc.rpartition("@")[0]
        near = address._replace(netloc=f"{login}@127.0.0.1:{proxy.port}").geturl()
        worker = start_worker(CELERY_BROKER_URL=near)
        task_id = send(worker, tasks.charge, delay_ms=700)
        eventually(lambda: "charged r" in worker.log())
        proxy.go_away()
        eventually(lambda: "onnection to broker lost" in worker.log())
        (paid,) = results(task_id, worker)  # nobody hears of it
        proxy.come_back()
        assert results(task_id, worker, count=2) == [paid, paid]
    assert effects() == 1


def test_a_task_that_is_delivered_again_returns_its_first_result(worker, send):
    task_id = send(worker, tasks.charge)
    (paid,) = results(task_id, worker)
    send(worker, tasks.charge, task_id=task_id)
    assert results(task_id, worker, count=2) == [paid, paid]
    assert effects() == 1


def test_another_task_with_the_same_arguments_is_another_operation(worker, send):
    (first,) = results(send(worker, tasks.charge), worker)
    (second,) = results(send(worker, tasks.charge), worker)
    assert first != second
    assert effects() == 2


def test_a_delivery_while_the_first_one_runs_waits_for_its_result(start_worker, send):
    worker = start_worker()
    second_worker = start_worker(worker.queue)
    task_id = send(worker, tasks.charge, delay_ms=700)
    send(worker, tasks.charge, delay_ms=700, task_id=task_id)
    first, second = results(task_id, worker, second_worker, count=2)
    assert first == second
    assert effects() == 1


@pytest.mark.parametrize("task", [tasks.charge_when_open, tasks.charge_and_autoretry])
def test_a_task_that_retries_leaves_nothing_until_it_succeeds(worker, send, task):
    task_id = send(worker, task, closed=2)
    (paid,) = results(task_id, worker)
    assert IdempotencyRecord.objects.get().attempts == 3
    send(worker, task, closed=2, task_id=task_id)
    assert results(task_id, worker, count=2) == [paid, paid]
    assert effects() == 1


def test_a_task_id_with_other_arguments_is_rejected(worker, send):
    task_id = send(worker, tasks.charge)
    results(task_id, worker)
    send(worker, tasks.charge, amount=6, task_id=task_id)
    eventually(lambda: "first used for a message with a different body" in worker.log())
    assert effects() == 1


def test_a_task_that_is_called_directly_just_runs():
    get_user_model().objects.create_user("carol")
    assert tasks.charge("carol", 5, "r") != tasks.charge("carol", 5, "r")
    assert effects() == 2
