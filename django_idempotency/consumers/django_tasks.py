"""Tasks of Django's own framework (Django 6.0 and later): one that is run again returns its first result."""

from __future__ import annotations

import json
from functools import partial, wraps
from typing import Any

from django.core.serializers.json import DjangoJSONEncoder

from django_idempotency.consumers import NOT_KEPT, Ack, Consumer, Message, Reject, Retry, RetryLater
from django_idempotency.consumers.base import MAX_ATTEMPTS
from django_idempotency.policy import Policy


class TaskNotRun(Exception):
    """The task is at work elsewhere, on hold, or the store is away: nothing was done, and it can be run again."""


class TaskRejected(Exception):
    """The task will not be run: its handler rejected it, every attempt failed, or it came with other arguments."""


def idempotent_task(function: Any = None, /, *, policy: Policy | None = None, max_attempts: int = MAX_ATTEMPTS) -> Any:
    """Run a task's function once for each task: ``@task(takes_context=True)`` above ``@idempotent_task``.

    The function's first argument is ``context``, as Django demands of such a task. A task is known by the id of its
    result, or by ``message_id`` where that was given to ``enqueue``, as the outbox does: however often it is enqueued
    with the same one, it runs once, and the others return its result. The function does not get ``message_id``.

    The function's own exception comes through. Raises ``TaskNotRun`` and ``TaskRejected``.
    """
    if function is None:
        return partial(idempotent_task, policy=policy, max_attempts=max_attempts)
    name = f"{function.__module__}.{function.__qualname__}"

    @wraps(function)
    def run(context: Any, *args: Any, message_id: str | None = None, **kwargs: Any) -> Any:
        body = json.dumps([args, kwargs], cls=DjangoJSONEncoder).encode()
        consumer = Consumer(
            "django_tasks",
            lambda _message, _context: function(context, *args, **kwargs),
            policy=policy,
            max_attempts=max_attempts,
            sender=function,
        )
        return _result(consumer, Message(name, message_id or context.task_result.id, body))

    run.idempotent = True  # type: ignore[attr-defined]
    return run


def _result(consumer: Consumer, message: Message) -> Any:
    match consumer.consume(message):
        case Ack(result):
            return None if result is NOT_KEPT else result
        case Retry(error=error):
            raise error
        case RetryLater(reason=reason):
            raise TaskNotRun(reason)
        case Reject(reason=reason):
            raise TaskRejected(reason)
