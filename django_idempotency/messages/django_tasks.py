"""Tasks of Django's own framework (Django 6.0 and later): a task that is run again
returns its first result.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from django.core.exceptions import ImproperlyConfigured

from django_idempotency import engine
from django_idempotency.conf import resolve
from django_idempotency.messages.consumer import Caller
from django_idempotency.messages.handling import MAX_CRASHES
from django_idempotency.messages.message import Message
from django_idempotency.messages.once import (
    TASK_ID,
    TaskOptions,
    in_tenant,
    returned,
)
from django_idempotency.messages.results import NOT_KEPT
from django_idempotency.values.calls import KeyBy, Keying, arguments_of
from django_idempotency.values.outcomes import dotted_name
from django_idempotency.values.policy import Decorator, Policy


def _protected(
    function: Callable[..., Any],
    *,
    policy: Policy,
    max_crashes: int = MAX_CRASHES,
    key: KeyBy | None = None,
) -> Callable[..., Any]:
    if hasattr(function, "enqueue"):
        raise ImproperlyConfigured(
            "@idempotent_task got a task, which is not protected. Put it below @task."
        )
    name = dotted_name(function)
    keying = None if key is None else Keying(key, function, policy, also=[TASK_ID])

    @wraps(function)
    def run(context: Any, *args: Any, **kwargs: Any) -> Any:
        if not hasattr(context, "task_result"):
            raise ImproperlyConfigured(
                f"{name} got no context: write @task(takes_context=True) above"
                " @idempotent_task."
            )
        if engine.in_transaction(resolve(policy)) and _runs_at_once(context):
            return function(context, *args, **kwargs)
        id, given = context.task_result.id, (context, *args)
        consumer = Caller(
            "django_tasks",
            lambda _message, _context: function(*given, **kwargs),
            policy=policy,
            max_attempts=max_crashes,
            sender=function,
            counted_by=id,
        )
        message = Message(
            source=in_tenant(name, policy) if keying else name,
            id=keying.of(given, kwargs, **{TASK_ID: id}) if keying else id,
            body=arguments_of(function, given, kwargs, but=1),
            redelivered=context.attempt > 1,
        )
        result = returned(consumer.consume(message))
        return None if result is NOT_KEPT else result

    run.idempotent = True  # type: ignore[attr-defined]
    return run


idempotent_task = Decorator(
    TaskOptions, _protected, "idempotent_task", "max_crashes", "key"
)
"""Run a task's function once for each task: ``@task(takes_context=True)`` above
``@idempotent_task``, or ``@idempotent_task(…)`` with ``policy=`` or any options of
``Policy``.

The function's first argument is ``context``, as Django requires for such a task. A task
is identified by the id of its result. ``key``: instead of the id, a template over the
arguments, such as ``"charge-{order_id}"``, or a callable that takes them, as for
``once``. A template may also use ``{task_id}``. However often tasks with one key are
enqueued, one runs, and the others return its result. With ``key``, ``retention`` has to
be set. A task whose worker has died ``max_crashes`` times is rejected.

The function's own exceptions are raised as they are. Raises ``NotRun``, ``Rejected``
and ``StoreUnavailable``.
"""


def _runs_at_once(context: Any) -> bool:
    """Whether the task runs where it is enqueued. What it writes is then committed or
    rolled back with its caller.
    """
    from django.tasks.backends.immediate import ImmediateBackend

    return isinstance(context.task_result.task.get_backend(), ImmediateBackend)
