"""Tasks of Django's own framework (Django 6.0 and later): an event enqueues a task."""

from __future__ import annotations

from typing import Any

from django.utils.module_loading import import_string

from django_idempotency.contrib.outbox.publishers import OneByOne
from django_idempotency.messages.publisher import Event, Refused, task_arguments


class DjangoTasksPublisher(OneByOne):
    """Enqueues the task whose dotted path is the topic.

    The payload, in JSON, is the task's arguments: a list by position, or an object by name. An ``@idempotent_task``
    gets the event's id as its ``message_id``, and so runs once. Any other task runs again when its event is sent again.

    Options are those of the task's ``using``, such as ``queue_name`` and ``backend``.
    """

    def __init__(self, **options: Any) -> None:
        self.options = options

    def hand_over(self, event: Event) -> Refused | None:
        try:
            task = import_string(event.topic).using(**self.options)
            args, kwargs = task_arguments(event)
        except (ImportError, AttributeError, ValueError) as error:
            return Refused(event, str(error), permanent=True)
        if getattr(task.func, "idempotent", False):
            kwargs = {**kwargs, "message_id": str(event.id)}
        task.enqueue(*args, **kwargs)
        return None
