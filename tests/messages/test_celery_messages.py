"""What tasks do to their messages: retries, replacements, callbacks, results, exits."""

from __future__ import annotations

import re
from uuid import uuid4

import pytest
from celery import Celery

from django_idempotency.maintenance import decisions
from django_idempotency.models import IdempotencyRecord
from testproject.models import LedgerEntry
from tests.messages import tasks
from tests.support.waiting import eventually

pytestmark = [pytest.mark.rabbitmq, pytest.mark.usefixtures("transactional_db")]


def ends(worker, task_id, count=1):
    """How so many deliveries of the task ended."""

    def ended():
        told = [
            line
            for line in worker.told(task_id)
            if not line.startswith(("received", "retry:"))
        ]
        return told if len(told) >= count else None

    return eventually(ended, within=120)


def effects():
    return sorted(LedgerEntry.objects.values_list("reference", "amount"))


@pytest.mark.parametrize(
    ("task", "args", "result"),
    [
        # as Celery logs bytes
        (tasks.typed, ["r"], "{'amount': Decimal('1.10'), 'raw': b'ff00'}"),
        (tasks.ends_itself, ["r"], None),
    ],
    ids=["types", "Ignore"],
)
def test_a_replay_returns_what_the_first_run_did(worker, send, task, args, result):
    task_id = send(worker, task, *args)
    ends(worker, task_id)
    send(worker, task, *args, task_id=task_id)
    first, second = ends(worker, task_id, 2)
    assert first == second
    assert result in (None, first)
    assert effects() == [("r", 5)]


def test_a_replay_whose_result_was_too_large_fails_if_it_is_awaited(worker, send):
    task_id = send(worker, tasks.large, "r")
    ends(worker, task_id)
    send(worker, tasks.large, "r", task_id=task_id)
    assert ends(worker, task_id, 2)[1] == "None"
    send(
        worker,
        tasks.large,
        "r",
        task_id=task_id,
        link=tasks.child.si("next").set(queue=worker.queue),
    )
    assert "ResultNotKept" in ends(worker, task_id, 3)[2]
    assert effects() == [("r", 5)]


def test_a_task_that_an_operator_failed_does_not_succeed(worker, send):
    task_id = send(worker, tasks.refuses, "r")
    ends(worker, task_id)
    outcome = decisions.fail(IdempotencyRecord.objects.get().pk, detail="lost")
    assert not isinstance(outcome, decisions.Refusal)
    send(worker, tasks.refuses, "r", task_id=task_id)
    assert "TaskMarkedFailed('lost')" in ends(worker, task_id, 2)[1]


def test_a_retry_with_other_arguments_runs_although_the_first_attempt_has_not_ended(
    start_worker, send, tmp_path
):
    first = start_worker()
    second = start_worker(first.queue)
    task_id = send(
        first, tasks.retries_with_other_arguments, "r", 5, str(tmp_path / "end")
    )
    eventually(lambda: "rejected: key_reused" in first.log() + second.log())
    (tmp_path / "end").touch()
    eventually(lambda: "{'amount': 6}" in first.told(task_id) + second.told(task_id))
    assert effects() == [("r", 6)]


def test_a_task_that_sends_its_message_back_is_not_taken_for_one_that_crashes(
    worker, send, tmp_path
):
    task_id = send(worker, tasks.asks_its_broker_to_come_again, "r", str(tmp_path))
    eventually(lambda: "'r'" in worker.told(task_id))
    assert effects() == [("r", 5)]


def test_a_task_that_has_failed_can_be_sent_again_however_often(worker, send):
    task_id = str(uuid4())
    for count in range(1, 13):
        send(worker, tasks.refuses, "r", task_id=task_id)
        assert all("LookupError" in told for told in ends(worker, task_id, count))


def test_a_task_that_replaces_itself_keeps_its_effects(worker, send):
    task_id = send(worker, tasks.replaces_itself, "r", 2)
    eventually(lambda: "'replaced'" in worker.told(task_id))
    assert effects() == [("r-0", 5), ("r-1", 5), ("r-2", 5)]


@pytest.mark.parametrize("parent", [tasks.runs_children, tasks.plain_runs_children])
def test_a_task_that_calls_another_ones_run_runs_it(worker, send, parent):
    task_id = send(worker, parent, "r")
    assert ends(worker, task_id) == ["['r-0', 'r-1']"]
    assert effects() == [("r-0", 5), ("r-1", 5)]


def test_callbacks_of_a_replay_have_the_ids_of_the_first(worker, send):
    began = len(worker.log())
    task_id = send(
        worker, tasks.child, "r", link=tasks.child.si("linked").set(queue=worker.queue)
    )
    eventually(lambda: ("linked", 5) in effects())
    send(
        worker,
        tasks.child,
        "r",
        task_id=task_id,
        link=tasks.child.si("linked").set(queue=worker.queue),
    )
    ends(worker, task_id, 2)
    first, second = eventually(lambda: _ids_of_linked(worker, began))
    assert first == second
    assert effects() == [("linked", 5), ("r", 5)]


def _ids_of_linked(worker, began):
    ids = re.findall(
        r"\[([0-9a-f-]+)\] succeeded in \S+: 'linked'", worker.log()[began:]
    )
    return ids if len(ids) == 2 else None


@pytest.mark.parametrize(
    "task",
    [tasks.exits, pytest.param(tasks.dies_by_lock, marks=pytest.mark.postgresql)],
    ids=["exits", "killed, lock"],
)
def test_a_task_that_ends_its_worker_is_tried_three_times_and_rejected(
    start_worker, send, task
):
    """What its broker delivers again after a claim by lock claims by a record, which
    counts.
    """
    worker = start_worker()
    send(worker, task, "r")
    eventually(lambda: "attempts failed or were cut short" in worker.log(), within=180)
    assert worker.log().count("ends r") == 3


def test_a_call_with_keywords_is_the_call_with_positions(worker, send):
    task_id = send(worker, tasks.child, "r")
    ends(worker, task_id)
    send(worker, tasks.child, kwargs={"reference": "r"}, task_id=task_id)
    assert ends(worker, task_id, 2) == ["'r'", "'r'"]
    assert effects() == [("r", 5)]


@pytest.mark.parametrize("compression", [None, "gzip"])
def test_a_message_in_flight_keeps_serializer_and_correlation(
    start_worker, send, compression, tmp_path
):
    """Without ``acks_late`` the broker has it no more, so it is published again: as it
    came.
    """
    options = {
        "settings": {"CELERY_ACCEPT_CONTENT": ["json", "pickle"]},
        "C_FORCE_ROOT": "1",
    }
    first = start_worker(**options)
    second = start_worker(first.queue, **options)
    task = tasks.dawdles_and_has_acknowledged
    task_id = send(first, task, "r", str(tmp_path), serializer="pickle")
    eventually(lambda: "dawdles r" in first.log() + second.log())
    send(
        first,
        task,
        "r",
        str(tmp_path),
        serializer="pickle",
        compression=compression,
        task_id=task_id,
    )
    eventually(lambda: "NotNow" in first.log() + second.log())
    (tmp_path / "end").touch()
    eventually(lambda: [*first.told(task_id), *second.told(task_id)].count("'r'") == 2)
    assert effects() == [("r", 5)]


@pytest.mark.parametrize("task", [tasks.refuses_and_has_acknowledged, tasks.hidden])
def test_a_message_on_hold_outlives_the_worker_that_has_acknowledged_it(
    start_worker, send, rabbitmq_url, task
):
    worker = start_worker()
    task_id = send(worker, task, "r")
    ends(worker, task_id)
    IdempotencyRecord.objects.update(on_hold=True)
    send(worker, task, "r", task_id=task_id)
    eventually(lambda: worker.log().count(f"[{task_id}] received") >= 3)
    worker.kill()
    with Celery(broker=rabbitmq_url, set_as_current=False).connection() as broker:
        eventually(
            lambda: (
                broker.default_channel.queue_declare(
                    worker.queue, passive=True
                ).message_count
                == 1
            )
        )


def test_a_task_keeps_the_request_class_that_its_project_gave_it(worker, send):
    task_id = send(worker, tasks.fails_by_a_request_of_its_own, "r")
    ends(worker, task_id)
    eventually(lambda: "a request of the project's failed" in worker.log())


@pytest.mark.redis
def test_a_message_on_hold_stays_one_message(start_worker, send, redis_url):
    """Beyond the visibility timeout each copy would become two."""
    from redis import Redis

    settings = {"CELERY_BROKER_TRANSPORT_OPTIONS": {"visibility_timeout": 2}}
    worker = start_worker(CELERY_BROKER_URL=redis_url, settings=settings)
    task_id = send(worker, tasks.refuses, "r")
    ends(worker, task_id)
    with Redis.from_url(redis_url) as redis:

        def messages():
            with redis.pipeline() as both:  # at one moment
                waiting, held = both.llen(worker.queue).hvals("unacked").execute()
            return waiting + sum(task_id.encode() in text for text in held)

        # also a copy of the first one, if that took longer than the timeout
        eventually(lambda: not messages())
        IdempotencyRecord.objects.update(on_hold=True)
        send(worker, tasks.refuses, "r", task_id=task_id)
        eventually(lambda: worker.log().count(f"[{task_id}] received") >= 6, within=180)
        assert messages() <= 1
        worker.kill()  # it would restore the messages of other workers, too
        redis.delete(worker.queue, "unacked", "unacked_index")


@pytest.mark.redis
@pytest.mark.parametrize("task", [tasks.refuses_and_has_acknowledged, tasks.refuses])
def test_a_message_on_hold_leaves_its_place_in_the_worker_to_others(
    start_worker, send, redis_url, task
):
    worker = start_worker(
        CELERY_BROKER_URL=redis_url, settings={"CELERY_WORKER_DISABLE_PREFETCH": True}
    )
    on_hold = send(worker, task, "r")
    ends(worker, on_hold)
    IdempotencyRecord.objects.update(on_hold=True)
    send(worker, task, "r", task_id=on_hold)
    eventually(lambda: "NotNow" in worker.log())
    other = send(worker, tasks.child, "r")
    # the one on hold comes again after a minute
    eventually(lambda: worker.told(other)[-1:] == ["'r'"], within=50)
    worker.kill()
    with Celery(broker=redis_url, set_as_current=False).connection() as broker:
        broker.default_channel.queue_purge(worker.queue)


def test_a_starting_worker_warns_of_protected_tasks_that_its_broker_forgets(worker):
    said = r"tasks\.(\w+) has @idempotent_task, but not acks_late=True"
    eventually(lambda: re.search(said, worker.log()))
    assert set(re.findall(said, worker.log())) == {
        "dawdles_and_has_acknowledged",
        "refuses_and_has_acknowledged",
        "fails_by_a_request_of_its_own",
    }
