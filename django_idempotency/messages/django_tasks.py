"""Tasks of Django's own framework (Django 6.0 and later): a task that is run again returns its first result."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any

from django.core.exceptions import ImproperlyConfigured
from django.core.serializers.json import DjangoJSONEncoder

from django_idempotency import engine
from django_idempotency.conf import resolve
from django_idempotency.messages import (
    NOT_KEPT,
    Ack,
    Consumer,
    Message,
    Reject,
    Retry,
    RetryLater,
)
from django_idempotency.messages.handling import MAX_ATTEMPTS
from django_idempotency.values.outcomes import dotted_name
from django_idempotency.values.policy import Decorator, Policy


class TaskNotRun(Exception):
    """Nothing was done: the task runs elsewhere, is on hold, or the store is unavailable. It can be run again."""


class TaskRejected(Exception):
    """The task will not be run: its function rejected it, every attempt failed, or it came with other arguments."""


def _protected(
    function: Callable[..., Any], *, policy: Policy, max_attempts: int = MAX_ATTEMPTS
) -> Callable[..., Any]:
    if hasattr(function, "enqueue"):
        raise ImproperlyConfigured(
            "@idempotent_task got a task, which is not protected. Put it below @task."
        )
    name = dotted_name(function)

    @wraps(function)
    def run(
        context: Any, *args: Any, message_id: str | None = None, **kwargs: Any
    ) -> Any:
        if not hasattr(context, "task_result"):
            raise ImproperlyConfigured(
                f"{name} got no context: write @task(takes_context=True) above @idempotent_task."
            )
        if engine.in_transaction(resolve(policy)) and _runs_at_once(context):
            return function(context, *args, **kwargs)
        body = json.dumps([args, kwargs], cls=DjangoJSONEncoder).encode()
        consumer = Consumer(
            "django_tasks",
            lambda _message, _context: function(context, *args, **kwargs),
            policy=policy,
            max_attempts=max_attempts,
            sender=function,
        )
        return _result(
            consumer, Message(name, message_id or context.task_result.id, body)
        )

    run.idempotent = True  # type: ignore[attr-defined]
    return run


if TYPE_CHECKING:

    @dataclass(frozen=True, kw_only=True, eq=False)
    class _Options(Policy):
        max_attempts: int = MAX_ATTEMPTS
else:
    _Options = Policy

idempotent_task = Decorator(_Options, _protected, "idempotent_task", "max_attempts")
"""Run a task's function once for each task: ``@task(takes_context=True)`` above ``@idempotent_task``, or
``@idempotent_task(…)`` with ``policy=`` or any options of ``Policy``.

The function's first argument is ``context``, as Django requires for such a task. A task is identified by the id of
its result, or by ``message_id`` if that was passed to ``enqueue``, as the outbox does. However often a task is
enqueued with the same ``message_id``, it runs once, and the others return its result. The function does not get
``message_id``.

The function's own exceptions are raised as they are. Raises ``TaskNotRun`` and ``TaskRejected``.
"""


def _runs_at_once(context: Any) -> bool:
    """Whether the task runs where it is enqueued. What it writes is then committed or rolled back with its caller."""
    from django.tasks.backends.immediate import ImmediateBackend

    return isinstance(context.task_result.task.get_backend(), ImmediateBackend)


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
