"""Celery: a task that is delivered again returns its first result."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial, wraps
from typing import Any, ParamSpec, TypeVar, overload

from celery import current_task
from celery.exceptions import Ignore
from celery.exceptions import Reject as RejectTask
from django.core.serializers.json import DjangoJSONEncoder

from django_idempotency import celery_exit  # noqa: F401 (listens)
from django_idempotency.consumers.base import Ack, Message, Reject, RetryLater, consume
from django_idempotency.outcomes import Door
from django_idempotency.policy import Policy

P = ParamSpec("P")
R = TypeVar("R")


@overload
def idempotent_task(function: Callable[P, R], /) -> Callable[P, R]: ...
@overload
def idempotent_task(*, policy: Policy) -> Callable[[Callable[P, R]], Callable[P, R]]: ...
def idempotent_task(function: Any = None, /, *, policy: Policy | None = None) -> Any:
    """Run a task's function once for each task id: ``@shared_task(acks_late=True)`` above ``@idempotent_task``.

    Have Celery redeliver what a dead worker held (``acks_late=True, reject_on_worker_lost=True``). A redelivery while
    the first delivery still runs is put back, which costs it none of the task's retries. Called directly, outside a
    worker, the function just runs.
    """
    if function is None:
        return partial(idempotent_task, policy=policy)

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        task = current_task
        if not task or task.request.called_directly:
            return function(*args, **kwargs)
        delivery = consume(
            _message(task),
            lambda _message, _context: function(*args, **kwargs),
            policy=policy,
            sender=function,
            door=Door.CELERY,
        )
        match delivery:
            case Ack(result):
                return result
            case RetryLater(delay):
                _put_back(task, delay)
                raise Ignore
            case Reject(reason):
                raise RejectTask(reason, requeue=False)

    return run


def _put_back(task: Any, delay: float) -> None:
    task.signature_from_request(countdown=delay, retries=task.request.retries).apply_async()


class _Encoder(DjangoJSONEncoder):
    def default(self, value: Any) -> Any:
        try:
            return super().default(value)
        except TypeError:
            return repr(value)


def _message(task: Any) -> Message:
    arguments = json.dumps([task.request.args, task.request.kwargs], cls=_Encoder)
    return Message(source=task.name, id=task.request.id, body=arguments.encode())
