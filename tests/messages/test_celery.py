"""Tasks over a real RabbitMQ: a worker that dies, and messages that come twice."""

from __future__ import annotations

from typing import Any

import pytest
from django.contrib.auth import get_user_model
from django.db import connection

from django_idempotency.models import IdempotencyRecord
from testproject import tasks
from testproject.models import LedgerEntry
from tests.messages.conftest import Worker
from tests.messages.tasks import charges_and_waits
from tests.support.callers import all_effects as effects
from tests.support.databases import database_url
from tests.support.proxy import running_proxy
from tests.support.waiting import eventually

pytestmark = [pytest.mark.rabbitmq, pytest.mark.usefixtures("transactional_db")]


def charge(
    send,
    worker: Worker,
    task: Any = tasks.charge,
    *,
    task_id: str | None = None,
    **options: Any,
) -> str:
    """Send the task to a worker, under an id of its own or ``task_id``, which is
    returned.
    """
    return send(
        worker,
        task,
        task_id=task_id,
        kwargs={"username": "carol", "amount": 5, "reference": "r", **options},
    )


def results(task_id: str, *workers: Worker, count: int = 1) -> list[Any]:
    """What so many deliveries of the task came to."""
    found: list[Any] = []

    def enough() -> bool:
        found[:] = [result for worker in workers for result in worker.returned(task_id)]
        return len(found) >= count

    eventually(enough, within=120)
    return found


def test_a_child_that_ends_writes_what_it_has_counted(start_worker, send):
    """Comes before there are workers of other tests, and ends before ten seconds are
    over: then they write anyway.
    """
    worker = start_worker()
    task_id = charge(send, worker)
    results(task_id, worker)
    charge(send, worker, task_id=task_id)
    results(task_id, worker, count=2)
    worker.stop()
    assert IdempotencyRecord.objects.get().replays == 1


@pytest.mark.parametrize("killed", [Worker.kill, Worker.kill_child])
def test_a_task_whose_worker_is_killed_takes_effect_once(
    start_worker, send, killed, tmp_path
):
    worker, task = start_worker(), (charges_and_waits, "r", str(tmp_path))
    task_id = send(worker, *task)
    eventually(lambda: "charged r" in worker.log())
    killed(worker)
    (tmp_path / "end").touch()
    worker = start_worker(worker.queue) if killed is Worker.kill else worker
    (paid,) = results(task_id, worker)
    assert effects() == 1
    assert str(LedgerEntry.objects.get().pk) == paid["entry"]
    send(worker, *task, task_id=task_id)
    assert results(task_id, worker, count=2) == [paid, paid]


@pytest.mark.postgresql
def test_a_task_whose_database_goes_away_before_its_result_is_written_does_not_fail(
    start_worker, send, tmp_path
):
    settings = connection.settings_dict
    with running_proxy(settings) as proxy:
        near = database_url(
            settings, settings["NAME"], HOST="127.0.0.1", PORT=proxy.port
        )
        worker = start_worker(DATABASE_URL=f"{near}?sslmode=disable&gssencmode=disable")
        task_id = send(worker, charges_and_waits, "r", str(tmp_path))
        eventually(lambda: "charged r" in worker.log())
        proxy.go_away()
        (tmp_path / "end").touch()
        eventually(lambda: proxy.refused)
        proxy.come_back()
        (paid,) = results(task_id, worker)
    assert str(LedgerEntry.objects.get().pk) == paid["entry"]
    assert effects() == 1


def test_a_delivery_while_the_first_one_runs_waits_for_its_result(start_worker, send):
    worker = start_worker()
    second_worker = start_worker(worker.queue)
    task_id = charge(send, worker, delay_ms=700)
    charge(send, worker, delay_ms=700, task_id=task_id)
    first, second = results(task_id, worker, second_worker, count=2)
    assert first == second
    assert effects() == 1


@pytest.mark.parametrize("task", [tasks.charge_when_open, tasks.charge_and_autoretry])
def test_a_task_that_retries_leaves_nothing_until_it_succeeds(worker, send, task):
    task_id = charge(send, worker, task, closed=2)
    (paid,) = results(task_id, worker)
    assert IdempotencyRecord.objects.get().attempts == 3
    charge(send, worker, task, closed=2, task_id=task_id)
    assert results(task_id, worker, count=2) == [paid, paid]
    assert effects() == 1


def test_a_task_id_with_other_arguments_is_rejected(worker, send):
    task_id = charge(send, worker)
    results(task_id, worker)
    charge(send, worker, amount=6, task_id=task_id)
    rejected = f"the task {task_id} was rejected: the first one had other arguments"
    logged = f"{rejected} [{tasks.charge.name}]"
    eventually(lambda: logged in worker.log())
    assert effects() == 1


def test_a_task_that_is_called_directly_just_runs():
    get_user_model().objects.create_user("carol")
    assert tasks.charge("carol", 5, "r") != tasks.charge("carol", 5, "r")
    assert effects() == 2
