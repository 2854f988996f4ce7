"""How Celery's worker treats a message that can't be handled yet: it keeps the message and gives it back later.

It sends no delayed copy. If the broker took the first message for lost, the copy would be a second message, and each
of the two would make two more.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, cast

from celery.exceptions import Ignore
from celery.exceptions import Reject as RejectTask
from celery.signals import worker_init
from celery.utils.imports import symbol_by_name
from celery.worker.request import Request
from celery.worker.state import task_ready

from django_idempotency.reporting.logs import log

LONGEST_DELAY = 60.0
_workers: list[Any] = []


class Rejected(RejectTask, Ignore):
    """The message goes to the dead letters. This is also an ``Ignore``, which ``autoretry_for`` lets pass."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason, False)
        self.args = (reason,)


class NotNow(RejectTask, Ignore):
    """The message has to be handled again in ``delay`` seconds."""

    def __init__(self, reason: str, delay: float) -> None:
        super().__init__(reason, True)
        self.args = (reason, delay)
        self.delay = delay


class PatientRequest(Request):
    """A request that gives its message back to the broker after a delay if it can't be handled yet."""

    def on_failure(self, exc_info: Any, *arguments: Any, **named: Any) -> Any:
        error = getattr(exc_info.exception, "exc", exc_info.exception)
        if not isinstance(error, NotNow):
            return super().on_failure(exc_info, *arguments, **named)
        task_ready(self)  # without prefetching, the worker takes no other message before
        delay = min(error.delay, _longest_delay(self.app))
        if not self.acknowledged:
            return _later(delay, lambda: Request.on_failure(self, exc_info))
        eta = cast("Any", self.app).now() + timedelta(seconds=delay)
        return self._publish_again(eta.isoformat())

    def _publish_again(self, eta: str) -> None:
        """Publish the message as it came. Without ``acks_late``, the broker no longer has it.

        Workers acknowledge a message with an ``eta`` only once the time has come. Until then, the broker has it.
        """
        message, app = self.message, cast("Any", self.app)
        properties = {name: message.properties.get(name) for name in ("correlation_id", "reply_to", "priority")}
        with app.producer_or_acquire() as producer:
            producer.publish(
                message.body,
                **{"exchange": self.delivery_info["exchange"], "routing_key": self.delivery_info["routing_key"]},
                **{"content_type": message.content_type, "content_encoding": message.content_encoding},
                headers={**message.headers, "eta": eta},
                compression=message.headers.get("compression"),  # kombu has decompressed the body
                **{"retry": True, "retry_policy": app.conf.task_publish_retry_policy},
                **{name: value for name, value in properties.items() if value is not None},
            )


def _longest_delay(app: Any) -> float:
    """Return seconds well below the time after which the broker gives an unacknowledged message to another worker."""
    options = app.conf.broker_transport_options or {}
    return float(min(LONGEST_DELAY, options.get("visibility_timeout", 3600) / 2))


def _later(delay: float, give_back: Callable[[], Any]) -> None:
    """Call ``give_back`` after ``delay`` seconds. Meanwhile the message does not count against the prefetch limit."""
    consumer = _workers[-1].consumer
    consumer.qos.increment_eventually()

    def act() -> None:
        consumer.qos.decrement_eventually()
        give_back()

    consumer.timer.call_after(delay, act)


def layers(task: Any) -> Iterator[Callable[..., Any]]:
    """Yield the functions that a task wraps, the outermost first."""
    layer = getattr(task, "_orig_run", task.run)
    while layer is not None:
        layer = getattr(layer, "__func__", layer)
        yield layer
        layer = getattr(layer, "__wrapped__", None)


@worker_init.connect
def prepare(sender: Any, **_named: Any) -> None:
    """Have tasks use ``PatientRequest``, above a class of the project's own.

    All tasks do, because a decorator may hide that one is idempotent.
    """
    _workers[:] = [sender]
    for task in sender.app.tasks.values():
        if not task.acks_late and any(hasattr(layer, "idempotent") for layer in layers(task)):
            message = "%s has @idempotent_task, but not acks_late=True: if its worker dies, nothing runs it again"
            log(logging.WARNING, "task_acknowledged_early", message, task.name)
        own = symbol_by_name(task.Request)
        if not issubclass(own, PatientRequest):
            task.Request = type(PatientRequest.__name__, (PatientRequest, own), {})
