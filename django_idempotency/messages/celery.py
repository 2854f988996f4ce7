"""Celery: a task that is delivered again returns its first result."""

from __future__ import annotations

import inspect
import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, NoReturn, cast

from celery import Task, current_task
from celery.exceptions import Ignore, Retry
from celery.exceptions import Reject as RejectTask
from celery.local import Proxy
from celery.signals import worker_init, worker_process_shutdown
from celery.utils.imports import symbol_by_name
from celery.worker.request import Request
from celery.worker.state import task_ready
from django.core.exceptions import ImproperlyConfigured
from django.core.serializers.json import DjangoJSONEncoder
from kombu import serialization

from django_idempotency import engine
from django_idempotency.conf import resolve
from django_idempotency.engine.background import background
from django_idempotency.messages import (
    NOT_KEPT,
    Ack,
    Consumer,
    Delivery,
    InFlightElsewhere,
    MarkedFailed,
    Message,
    Reject,
    RetryLater,
)
from django_idempotency.reporting.logs import log
from django_idempotency.values.keys import child_key, record_id
from django_idempotency.values.outcomes import Claimed, EntryPoint, Release, Verdict
from django_idempotency.values.policy import Decorator, Policy

MAX_CRASHES = 10
LONGEST_DELAY = 60.0
_workers: list[Any] = []


class TaskMarkedFailed(Exception):
    """An operator has decided that the task failed. The task's state is FAILURE."""


class ResultNotKept(Exception):
    """The task is done, but its result was too large to be kept (``Body.limit``), and something waits for it."""


def _protected(
    function: Callable[..., Any], *, policy: Policy, max_crashes: int = MAX_CRASHES
) -> Callable[..., Any]:
    if isinstance(function, Task | Proxy):
        raise ImproperlyConfigured(
            "@idempotent_task got a task, which is not protected. Put @idempotent_task below @shared_task or @app.task."
        )

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        task = _delivered(run)
        message = task and _message(task, function, args)
        # What an eager task does inside a transaction is committed or rolled back with it.
        is_part_of_a_run = (
            message and task.request.is_eager and engine.in_transaction(resolve(policy))
        )
        if message is None or is_part_of_a_run:
            return function(*args, **kwargs)
        consumer = _TaskConsumer(
            "celery",
            partial(_call, function, args, kwargs),
            policy=policy,
            max_attempts=max_crashes + task.request.retries,
            codec=_Codec(task),
            sender=function,
            entry_point=EntryPoint.CELERY,
            task=task,
        )
        return _concluded(task, consumer.consume(message))

    run.idempotent = True  # type: ignore[attr-defined]
    return run


if TYPE_CHECKING:

    @dataclass(frozen=True, kw_only=True, eq=False)
    class _Options(Policy):
        max_crashes: int = MAX_CRASHES
else:
    _Options = Policy

idempotent_task = Decorator(_Options, _protected, "idempotent_task", "max_crashes")
"""Run a task's function once for each task id: ``@shared_task(acks_late=True)`` above ``@idempotent_task``, or
``@idempotent_task(…)`` with ``policy=`` or any options of ``Policy``.

Have Celery redeliver the messages of a dead worker (``acks_late=True, reject_on_worker_lost=True``). A redelivery
that comes while the first delivery still runs stays with the broker and is looked at again. This uses up none of
the task's retries. A task whose worker has died ``max_crashes`` times is rejected. If the function is called
directly, outside a worker, it just runs.

The task raises ``TaskMarkedFailed`` and ``ResultNotKept``. Raises ``ImproperlyConfigured`` above ``@shared_task``.
"""


# --- Which task this is ----------------------------------------------------------------------------------------------


def _delivered(run: Callable[..., Any]) -> Any:
    """Return the task that a worker runs ``run`` for, or ``None`` if other code calls it, such as another task."""
    task = current_task
    if not task or task.request.called_directly:
        return None
    if run in layers(task):
        return task
    # An opaque decorator may hide the function. It belongs to another task only if that task shows it.
    hidden = not any(run in layers(other) for other in task.app.tasks.values())
    return task if hidden else None


def _message(task: Any, function: Callable[..., Any], args: tuple[Any, ...]) -> Message:
    """Return the task as a message. A task that replaced another one has the same id, and a greater depth."""
    request = task.request
    depth = request.replaced_task_nesting
    id = f"{request.id}/{depth}" if depth else request.id
    bound = isinstance(next(iter(args), None), Task)
    body = _body(
        _arguments(function, request.args or (), request.kwargs or {}, bound=bound)
    )
    redelivered = bool((request.delivery_info or {}).get("redelivered"))
    return Message(source=task.name, id=id, body=body, redelivered=redelivered)


def _arguments(
    function: Callable[..., Any], args: Any, kwargs: Any, *, bound: bool
) -> Any:
    """Return the arguments by name, whichever way they were passed."""
    try:
        named = inspect.signature(function).bind(*([None] * bound), *args, **kwargs)
    except (TypeError, ValueError):
        return [args, kwargs]
    return dict(list(named.arguments.items())[bound:])


def _body(arguments: Any) -> bytes:
    try:
        return json.dumps(arguments, cls=_Encoder).encode()
    except (
        TypeError,
        ValueError,
    ):  # a dictionary's keys, or a value that contains itself
        return repr(arguments).encode()


class _Encoder(DjangoJSONEncoder):
    def default(self, value: Any) -> Any:
        try:
            return super().default(value)
        except TypeError:
            return value.hex() if isinstance(value, bytes) else repr(value)


# --- The run ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _TaskConsumer(Consumer):
    """Leaves exceptions to Celery."""

    task: Any = field(kw_only=True)

    def verdict_on(self, error: Exception) -> Verdict | None:
        """Release the key for a retry with other arguments: it is a message with another body under the same id.

        Release it for a message that the task sends back, too: its return is no crash.
        """
        sent_back = isinstance(error, RejectTask) and bool(
            getattr(error, "requeue", False)
        )
        changed = isinstance(error, Retry) and _changed(self.task.request, error)
        return Release(rollback=True) if sent_back or changed else None

    def after_mismatch(self, *, running: bool) -> Delivery:
        """Have a retry with other arguments wait for the attempt that sent it, which only then releases the key."""
        if running and self.task.request.retries:
            return InFlightElsewhere(
                1, "the attempt that asked for this retry has not ended"
            )
        return super().after_mismatch(running=running)

    def is_exhausted(self, claim: Claimed, message: Message, limit: int) -> bool:
        """Give up what has ended its worker too often. A task that failed and is sent again has not."""
        return (claim.taken_over or message.redelivered) and super().is_exhausted(
            claim, message, limit
        )

    def after(self, error: Exception, attempt: int, limit: int) -> NoReturn:
        raise error


def _changed(request: Any, retry: Retry) -> bool:
    signature: Any = getattr(retry, "sig", None)
    if signature is None:
        return False
    return [list(signature.args), dict(signature.kwargs)] != [
        list(request.args or ()),
        dict(request.kwargs or {}),
    ]


def _call(function: Callable[..., Any], args: Any, kwargs: Any, *_given: Any) -> Any:
    try:
        return function(*args, **kwargs)
    except RejectTask:
        raise
    except (
        Ignore
    ):  # the task has ended itself, or sent its replacement: what it wrote stands
        return ENDED


def _concluded(task: Any, delivery: Delivery) -> Any:
    match delivery:
        case Ack(result):
            return _returned(task, result)
        case RetryLater(delay=delay, reason=reason):
            raise NotNow(reason, delay)
        case MarkedFailed(reason):
            raise TaskMarkedFailed(reason)
        case Reject(reason=reason):
            raise Rejected(reason)


def _returned(task: Any, result: Any) -> Any:
    if result is ENDED:
        raise Ignore("the task had ended itself")
    _name_callbacks(task)
    if result is not NOT_KEPT:
        return result
    request, ignored = task.request, task.request.ignore_result or task.ignore_result
    if request.callbacks or request.chain or request.chord or not ignored:
        raise ResultNotKept(request.id)
    return None


def _name_callbacks(task: Any) -> None:
    """Give each ``link`` an id that is the same on every replay. Celery gives groups, chains and chords their ids."""
    parent = record_id(task.name, task.request.id)
    for number, signature in enumerate(task.request.callbacks or []):
        if not signature.get("subtask_type"):
            signature["options"].setdefault(
                "task_id", child_key(parent, f"link {number}")
            )


# --- Results ---------------------------------------------------------------------------------------------------------


class _Ended:
    """Stands for the result of a task that raised ``Ignore``."""


ENDED = _Ended()
_ENDED_BODY = b"\0ended"  # not the output of any serializer


class _Codec:
    """Keeps a result as Celery would send it, so that a replay returns what the first run returned."""

    def __init__(self, task: Any) -> None:
        self.serializer = task.app.conf.result_serializer
        self.content_type, self.encoding, _nothing = serialization.dumps(
            None, serializer=self.serializer
        )

    def encode(self, result: Any) -> bytes:
        if result is ENDED:
            return _ENDED_BODY
        _type, _encoding, payload = serialization.dumps(
            result, serializer=self.serializer
        )
        return payload.encode(self.encoding) if isinstance(payload, str) else payload

    def decode(self, body: bytes) -> Any:
        if body == _ENDED_BODY:
            return ENDED
        return serialization.loads(body, self.content_type, self.encoding, force=True)


# --- A message that can't be handled yet -----------------------------------------------------------------------------
#
# The worker keeps it and gives it back later. It sends no delayed copy: if the broker took the first message for lost,
# the copy would be a second message, and each of the two would make two more.


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
        task_ready(
            self
        )  # without prefetching, the worker takes no other message before
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
        properties = {
            name: message.properties.get(name)
            for name in ("correlation_id", "reply_to", "priority")
        }
        with app.producer_or_acquire() as producer:
            producer.publish(
                message.body,
                **{
                    "exchange": self.delivery_info["exchange"],
                    "routing_key": self.delivery_info["routing_key"],
                },
                **{
                    "content_type": message.content_type,
                    "content_encoding": message.content_encoding,
                },
                headers={**message.headers, "eta": eta},
                compression=message.headers.get(
                    "compression"
                ),  # kombu has decompressed the body
                **{"retry": True, "retry_policy": app.conf.task_publish_retry_policy},
                **{
                    name: value
                    for name, value in properties.items()
                    if value is not None
                },
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
        if not task.acks_late and any(
            hasattr(layer, "idempotent") for layer in layers(task)
        ):
            message = "%s has @idempotent_task, but not acks_late=True: if its worker dies, nothing runs it again"
            log(logging.WARNING, "task_acknowledged_early", message, task.name)
        own = symbol_by_name(task.Request)
        if not issubclass(own, PatientRequest):
            task.Request = type(PatientRequest.__name__, (PatientRequest, own), {})


@worker_process_shutdown.connect(
    dispatch_uid="django_idempotency"
)  # once, if both modules are imported
def end_background(**_named: Any) -> None:
    """Write the counts that are still in memory: Python calls no exit handlers in a child of the prefork pool."""
    background.end()
