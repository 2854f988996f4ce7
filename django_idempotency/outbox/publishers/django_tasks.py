"""Tasks of Django's own framework (Django 6.0 and later): an event enqueues a task."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

from django.utils.module_loading import import_string

from django_idempotency.outbox.publishers.base import (
    Confirmed,
    Event,
    NotSent,
    Outcome,
    Publisher,
    Refused,
    task_arguments,
)


class DjangoTasksPublisher(Publisher):
    """Enqueues the task whose dotted path is the topic.

    The payload, in JSON, is the task's arguments: a list by position, or an object by name. An ``@idempotent_task``
    gets the event's id as its ``message_id``, and so runs once. Any other task runs again when its event is sent again.

    Options are those of the task's ``using``, such as ``queue_name`` and ``backend``.
    """

    def __init__(self, **options: Any) -> None:
        self.options = options

    def connect(self) -> None:
        """The task's backend connects."""

    def send(self, events: Sequence[Event], timeout: float) -> Iterator[Outcome]:
        deadline = time.monotonic() + timeout
        for event in events:
            yield NotSent(event) if time.monotonic() > deadline else self._send(event)

    def _send(self, event: Event) -> Outcome:
        try:
            task = import_string(event.topic).using(**self.options)
            args, kwargs = task_arguments(event)
        except (ImportError, AttributeError, ValueError) as error:
            return Refused(event, str(error), permanent=True)
        except Exception as error:  # from the task's module or backend: the event's fault, not the relay's
            return Refused(event, f"{type(error).__name__}: {error}")
        if getattr(task.func, "idempotent", False):
            kwargs = {**kwargs, "message_id": str(event.id)}
        try:
            task.enqueue(*args, **kwargs)
        except Exception as error:  # from any backend
            return Refused(event, f"{type(error).__name__}: {error}")
        return Confirmed(event)

    def close(self) -> None:
        """The task's backend keeps its own connections."""
