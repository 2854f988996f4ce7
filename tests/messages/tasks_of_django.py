"""Tasks of Django's own framework, which exists from Django 6.0 on."""

from __future__ import annotations

import os
import signal
from typing import Any

from django.tasks import TaskContext, TaskResult, TaskResultStatus, task

from django_idempotency.messages import Message
from django_idempotency.messages.django_tasks import idempotent_task
from tests.messages.handlers import pay

DIES = "TASK_DIES"  # in the environment: each run ends its process


def charge(reference: str, *, fails: bool = False) -> dict[str, Any]:
    paid = pay(Message("task", reference), _First())
    if DIES in os.environ:
        os.kill(os.getpid(), signal.SIGKILL)
    if fails:
        raise LookupError("not yet")
    return {"paid": paid["paid"], "reference": reference}


@task(takes_context=True)
@idempotent_task
def paying(context: Any, reference: str, *, fails: bool = False) -> dict[str, Any]:
    return charge(reference, fails=fails)


@task(takes_context=True)
@idempotent_task(key="charge-{reference}", retention=None, max_crashes=2)
def paying_once(context: Any, reference: str, *, fails: bool = False) -> dict[str, Any]:
    return charge(reference, fails=fails)


class _First:
    attempt = 1


def run(id: str, *args: Any, attempt: int = 1) -> Any:
    """Run ``paying_once`` as the worker of a backend does that keeps its tasks."""
    result = TaskResult(
        task=paying_once,
        id=id,
        status=TaskResultStatus.RUNNING,
        enqueued_at=None,
        started_at=None,
        last_attempted_at=None,
        finished_at=None,
        args=list(args),
        kwargs={},
        backend="default",
        errors=[],
        worker_ids=["worker"] * attempt,
    )
    return paying_once.call(TaskContext(task_result=result), *args)
