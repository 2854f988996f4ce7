"""Celery: an event is a task with the event's id."""

from __future__ import annotations

from typing import Any

from celery import Celery, current_app
from celery.app.task import Context
from django.utils.module_loading import import_string
from kombu.exceptions import KombuError

from django_idempotency.contrib.outbox.publishers import OneByOne
from django_idempotency.messages.publisher import ConnectionLost, Event, PublisherUnavailable, Refused, task_arguments

# In a worker, a message's headers become attributes of the task's request.
CELERYS_OWN = frozenset({*dir(Context), "lang", "task", "argsrepr", "kwargsrepr"})


class CeleryPublisher(OneByOne):
    """Sends the task that the topic names, with the event's id as the task's id.

    The payload, in JSON, is the task's arguments: a list by position, or an object by name. RabbitMQ confirms messages,
    whatever the application's own settings. The event's headers are sent with the task, except those with a name that
    Celery uses, such as ``id`` or ``retries``.

    ``app``: the application or its dotted path. The default is the current application. Further options are those of
    ``send_task``, such as ``queue``.
    """

    def __init__(self, app: Celery | str | None = None, **options: Any) -> None:
        self.app: Any = import_string(app) if isinstance(app, str) else app or current_app
        self.options = options
        self._connection: Any = None
        self._producer: Any = None

    def connect(self) -> None:
        if self._connection is not None:
            return
        connection = self.app.connection_for_write()
        if connection.transport_cls in ("amqp", "amqps", "pyamqp"):
            connection.transport_options = {**(connection.transport_options or {}), "confirm_publish": True}
        try:
            connection.ensure_connection(max_retries=1, timeout=5)
            self._producer = self.app.amqp.Producer(connection)
        except (OSError, KombuError, *connection.connection_errors) as error:
            connection.collect()
            raise PublisherUnavailable(f"Celery’s broker: {error}") from error
        self._connection = connection

    def hand_over(self, event: Event) -> Refused | None:
        try:
            args, kwargs = task_arguments(event)
        except ValueError as error:
            return Refused(event, str(error), permanent=True)
        headers = {name: value for name, value in event.headers.items() if name not in CELERYS_OWN}
        sent = {"task_id": str(event.id), "headers": headers, "producer": self._producer, "retry": False}
        try:
            self.app.send_task(event.topic, args, kwargs, **sent, **self.options)
        except (OSError, KombuError, *self._connection.connection_errors, *self._connection.channel_errors) as error:
            raise ConnectionLost(str(error) or type(error).__name__) from error
        return None

    def close(self) -> None:
        connection, self._connection, self._producer = self._connection, None, None
        if connection is not None:
            connection.collect()
