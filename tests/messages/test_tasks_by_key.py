"""Celery's tasks by a key of their arguments: however often one is enqueued, it is one
task.
"""

from __future__ import annotations

import re
from collections import Counter

import pytest

from django_idempotency.models import IdempotencyRecord
from testproject.models import LedgerEntry
from tests.messages import tasks
from tests.messages.test_celery_messages import effects, ends
from tests.support.callers import references
from tests.support.waiting import eventually

pytestmark = [
    pytest.mark.rabbitmq,
    pytest.mark.slow,
    pytest.mark.usefixtures("transactional_db"),
]
KEYS, TIMES, KILLS = 60, 3, 10
# With Redis, what a killed worker had in hand is looked for every hundred seconds by
# default, and not for five minutes if the worker died while it looked itself. A busy
# machine must do within the timeout what a worker has fetched, or it gets it again.
RESTORED_SOON = {
    "visibility_timeout": 20,
    "unacked_restore_interval": 1,
    "unacked_restore_throttle": 1,
    "unacked_mutex_expire": 5,
}


def test_tasks_with_one_key_are_one_task_and_each_gets_its_result(worker, send):
    linked, another = (
        tasks.child.si(reference).set(queue=worker.queue)
        for reference in ("linked", "another")
    )
    first, second, third = (
        send(worker, tasks.charge_once, "r", link=link)
        for link in (linked, linked, another)
    )
    assert ends(worker, first) == ends(worker, second) == ends(worker, third)
    other = send(worker, tasks.charge_once, "r", 6)
    assert "other arguments" in ends(worker, other)[0]
    for reference in ("linked", "another"):
        eventually(lambda: (reference, 5) in effects())  # noqa: B023
    for _time in range(2):
        send(worker, tasks.ticks)
    eventually(lambda: effects().count(("tick", 5)) == 2)
    ticks = [("tick", 5)] * 2
    assert effects() == [("another", 5), ("linked", 5), ("r", 5), *ticks]
    scope = "consumer:celery:tests.messages.tasks.charge_once"
    assert IdempotencyRecord.objects.filter(scope=scope, key="charge-r").exists()


def test_crashes_are_counted_for_each_enqueued_task_and_failures_are_not(
    start_worker, send, tmp_path
):
    worker, word = start_worker(), tmp_path / "word"

    def told(what):
        word.write_text(what)
        return send(worker, tasks.does_as_told, str(tmp_path))

    for _time in range(5):
        assert "LookupError" in ends(worker, told("fail"))[0]
    for _time in range(2):
        dies = told("die")
        rejected = rf"{dies}.*attempts failed"
        eventually(lambda: re.search(rejected, worker.log()), within=120)  # noqa: B023
        assert worker.log().count(f"die {dies}") == 2
    assert ends(worker, told("well")) == ["'well'"]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "broker", ["rabbitmq_url", pytest.param("redis_url", marks=pytest.mark.redis)]
)
def test_each_of_sixty_keys_has_one_effect_and_one_result_however_often_workers_die(
    start_worker, send, request, broker
):
    """Each key is enqueued three times. A worker's child is killed ten times, and once
    a whole worker, which may lose a message on Redis: Celery takes each from its list
    before it writes down that it has it. So there each key is enqueued once more.
    """
    options = {
        "CELERY_BROKER_URL": request.getfixturevalue(broker),
        "settings": {"CELERY_BROKER_TRANSPORT_OPTIONS": RESTORED_SOON},
    }
    workers = [start_worker(**options)]
    workers.append(start_worker(workers[0].queue, **options))

    def enqueued(times):
        return {
            send(workers[0], tasks.charge_once, f"k-{number}"): number
            for _time in range(times)
            for number in range(KEYS)
        }

    wanted = ids = enqueued(TIMES)
    for kill in range(1, KILLS + 1):
        least = kill * (KEYS - 10) // KILLS
        eventually(lambda: LedgerEntry.objects.count() >= least, within=300)  # noqa: B023
        workers[kill % 2].kill_child()
    workers[0].kill()
    workers.append(start_worker(workers[0].queue, **options))
    if broker == "redis_url":
        wanted = enqueued(1)
        ids = ids | wanted

    def results():
        found = [
            (ids[id], result)
            for worker in workers
            for id, result in re.findall(
                r"\[([0-9a-f-]{36})\] succeeded in \S+: (.*)", worker.log()
            )
            if id in ids
        ]
        logs = "".join(worker.log() for worker in workers)
        return all(f"{id}] succeeded" in logs for id in wanted) and found

    found = eventually(results, within=600)
    assert Counter(references()) == {f"k-{number}": 1 for number in range(KEYS)}
    assert len(set(found)) == KEYS
