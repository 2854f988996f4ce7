"""Celery: a task that is delivered again returns its first result."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial, wraps
from typing import Any, cast

from celery import Task, current_task
from celery.exceptions import Ignore, Retry
from celery.exceptions import Reject as RejectTask
from celery.local import Proxy
from celery.signals import worker_init, worker_process_shutdown
from celery.utils.imports import symbol_by_name
from celery.worker.request import Request
from celery.worker.state import task_ready
from django.core.exceptions import ImproperlyConfigured
from kombu import serialization

from django_idempotency import engine
from django_idempotency.conf import resolve
from django_idempotency.engine.background import background
from django_idempotency.messages import (
    NOT_KEPT,
    Ack,
    Delivery,
    InFlightElsewhere,
    MarkedFailed,
    Message,
    Reject,
    RetryLater,
)
from django_idempotency.messages.consumer import Caller
from django_idempotency.messages.handling import MAX_CRASHES
from django_idempotency.messages.once import TASK_ID, TaskOptions, in_tenant
from django_idempotency.reporting.logs import log
from django_idempotency.values.calls import KeyBy, Keying, arguments_of
from django_idempotency.values.fingerprints import canonical_json
from django_idempotency.values.keys import child_key, record_id
from django_idempotency.values.outcomes import EntryPoint, Release, Verdict
from django_idempotency.values.policy import Decorator, Policy

LONGEST_DELAY = 60.0
_workers: list[Any] = []


class TaskMarkedFailed(Exception):
    """An operator has decided that the task failed. The task's state is FAILURE."""


class ResultNotKept(Exception):
    """The task is done, but its result was too large to be kept (``Body.limit``), and
    something waits for it.
    """


def _protected(
    function: Callable[..., Any],
    *,
    policy: Policy,
    max_crashes: int = MAX_CRASHES,
    key: KeyBy | None = None,
) -> Callable[..., Any]:
    if isinstance(function, Task | Proxy):
        raise ImproperlyConfigured(
            "@idempotent_task got a task, which is not protected. Put @idempotent_task"
            " below @shared_task or @app.task."
        )
    keying = None if key is None else Keying(key, function, policy, also=[TASK_ID])

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        task = _delivered(run)
        message = task and _message(task, function, args, policy, keying)
        # What an eager task does inside a transaction is committed or rolled back with
        # it.
        is_part_of_a_run = (
            message and task.request.is_eager and engine.in_transaction(resolve(policy))
        )
        if message is None or is_part_of_a_run:
            return function(*args, **kwargs)
        consumer = _TaskConsumer(
            "celery",
            partial(_call, function, args, kwargs),
            policy=policy,
            max_attempts=max_crashes,
            codec=_Codec(task),
            sender=function,
            entry_point=EntryPoint.CELERY,
            counted_by=_id(task),
            task=task,
        )
        return _concluded(task, message, consumer.consume(message))

    run.idempotent = True  # type: ignore[attr-defined]
    return run


idempotent_task = Decorator(
    TaskOptions, _protected, "idempotent_task", "max_crashes", "key"
)
"""Run a task's function once for each task id: ``@shared_task(acks_late=True)`` above
``@idempotent_task``, or ``@idempotent_task(…)`` with ``policy=`` or any options of
``Policy``.

``key``: instead of the task id, a template over the arguments, such as
``"charge-{order_id}"``, or a callable that takes them, as for ``once``. A template may
also use ``{task_id}``. All tasks with one key are one task, and each gets its result.
With ``key``, ``retention`` has to be set.

Have Celery redeliver the messages of a dead worker (``acks_late=True,
reject_on_worker_lost=True``). A redelivery that comes while the first delivery still
runs stays with the broker and is tried again later. This uses up none of the task's
retries. A task whose worker has died ``max_crashes`` times is rejected. If the function
is called directly, outside a worker, it just runs.

The task raises ``TaskMarkedFailed`` and ``ResultNotKept``. Raises
``ImproperlyConfigured`` above ``@shared_task``.
"""


# --- Which task this is ---------------------------------------------------------------


def _delivered(run: Callable[..., Any]) -> Any:
    """Return the task that a worker runs ``run`` for, or ``None`` if other code calls
    it, such as another task.
    """
    task = current_task
    if not task or task.request.called_directly:
        return None
    if run in layers(task):
        return task
    # An opaque decorator may hide the function. It belongs to another task only if that
    # task shows it.
    hidden = not any(run in layers(other) for other in task.app.tasks.values())
    return task if hidden else None


def _id(task: Any) -> str:
    """Return the task's id. A task that replaced another one has the same id, and a
    greater depth.
    """
    depth = task.request.replaced_task_nesting
    return f"{task.request.id}/{depth}" if depth else str(task.request.id)


def _message(
    task: Any,
    function: Callable[..., Any],
    given: tuple[Any, ...],
    policy: Policy,
    keying: Keying | None,
) -> Message:
    """Return the task as a message. ``given``: what the function is called with."""
    request, id = task.request, _id(task)
    bound = [each for each in given[:1] if isinstance(each, Task)]
    args, kwargs = [*bound, *(request.args or ())], request.kwargs or {}
    redelivered = bool((request.delivery_info or {}).get("redelivered"))
    return Message(
        source=in_tenant(task.name, policy) if keying else task.name,
        id=keying.of(args, kwargs, **{TASK_ID: id}) if keying else id,
        body=arguments_of(function, args, kwargs, but=len(bound)),
        redelivered=redelivered,
    )


# --- The run --------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _TaskConsumer(Caller):
    """Leaves exceptions to Celery."""

    task: Any = field(kw_only=True)

    def verdict_on(self, error: Exception) -> Verdict | None:
        """Release the key for a retry with other arguments: it is a message with
        another body under the same id.

        Release it for a message that the task sends back, too: its return is no crash.
        """
        sent_back = isinstance(error, RejectTask) and bool(
            getattr(error, "requeue", False)
        )
        changed = isinstance(error, Retry) and _changed(self.task.request, error)
        return Release(rollback=True) if sent_back or changed else None

    def after_mismatch(self, *, running: bool) -> Delivery:
        """Have a retry with other arguments wait for the attempt that sent it, which
        only then releases the key.
        """
        request = self.task.request
        if running and request.retries:
            return InFlightElsewhere(
                1, "the attempt that asked for this retry has not ended"
            )
        # the caller's AsyncResult shows the state of the first one
        message = "the task %s was rejected: the first one had other arguments"
        log(logging.ERROR, "task_rejected", message, request.id, view=self.sender)
        return super().after_mismatch(running=running)


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


def _concluded(task: Any, message: Message, delivery: Delivery) -> Any:
    match delivery:
        case Ack(result):
            return _returned(task, message, result)
        case RetryLater(delay=delay, reason=reason):
            raise NotNow(reason, delay)
        case MarkedFailed(reason):
            raise TaskMarkedFailed(reason)
        case Reject(reason=reason):
            raise Rejected(reason)


def _returned(task: Any, message: Message, result: Any) -> Any:
    if result is ENDED:
        raise Ignore("the task had ended itself")
    _name_callbacks(task, message)
    if result is not NOT_KEPT:
        return result
    request, ignored = task.request, task.request.ignore_result or task.ignore_result
    if request.callbacks or request.chain or request.chord or not ignored:
        raise ResultNotKept(request.id)
    return None


def _name_callbacks(task: Any, message: Message) -> None:
    """Give each ``link`` an id that is the same on every replay, and that differs from
    those of other callbacks of tasks with the same key. Celery gives groups, chains and
    chords their ids.
    """
    parent = record_id(message.source, message.id)
    for number, signature in enumerate(task.request.callbacks or []):
        if not signature.get("subtask_type"):
            name = f"link {number} {_called(signature)}"
            signature["options"].setdefault("task_id", child_key(parent, name))


def _called(signature: Any) -> str:
    """Return the name of the task that a callback calls, and behind it the arguments
    if another process can recognise them.
    """
    name: str = signature["task"]
    with suppress(ValueError):
        given = arguments_of(_anything, signature["args"], signature["kwargs"])
        name += canonical_json(given).decode("utf-8", "surrogatepass")
    return name


def _anything(*args: Any, **kwargs: Any) -> None:
    """Has the signature that every call fits."""


# --- Results --------------------------------------------------------------------------


class _Ended:
    """Stands for the result of a task that raised ``Ignore``."""


ENDED = _Ended()
_ENDED_BODY = b"\0ended"  # not the output of any serializer


class _Codec:
    """Keeps a result as Celery would send it, so that a replay returns what the first
    run returned.
    """

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


# --- A message that can't be handled yet ----------------------------------------------
#
# The worker keeps it and gives it back later. It sends no delayed copy: if the broker
# took the first message for lost, the copy would be a second message, and each of the
# two would make two more.


class Rejected(RejectTask, Ignore):
    """The message goes to the dead letters. This is also an ``Ignore``, which
    ``autoretry_for`` lets pass.
    """

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
    """A request that gives its message back to the broker after a delay if it can't be
    handled yet.
    """

    def on_failure(self, exc_info: Any, *arguments: Any, **named: Any) -> Any:
        error = getattr(exc_info.exception, "exc", exc_info.exception)
        if not isinstance(error, NotNow):
            return super().on_failure(exc_info, *arguments, **named)
        # without prefetching, the worker takes no other message before
        task_ready(self)
        delay = min(error.delay, _longest_delay(self.app))
        if not self.acknowledged:
            return _later(delay, lambda: Request.on_failure(self, exc_info))
        eta = cast("Any", self.app).now() + timedelta(seconds=delay)
        return self._publish_again(eta.isoformat())

    def _publish_again(self, eta: str) -> None:
        """Publish the message as it came. Without ``acks_late``, the broker no longer
        has it.

        Workers acknowledge a message with an ``eta`` only once the time has come. Until
        then, the broker has it.
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
                # kombu has decompressed the body
                compression=message.headers.get("compression"),
                **{"retry": True, "retry_policy": app.conf.task_publish_retry_policy},
                **{
                    name: value
                    for name, value in properties.items()
                    if value is not None
                },
            )


def _longest_delay(app: Any) -> float:
    """Return seconds well below the time after which the broker gives an unacknowledged
    message to another worker.
    """
    options = app.conf.broker_transport_options or {}
    return float(min(LONGEST_DELAY, options.get("visibility_timeout", 3600) / 2))


def _later(delay: float, requeue: Callable[[], Any]) -> None:
    """Call ``requeue`` after ``delay`` seconds. Meanwhile the message does not count
    against the prefetch limit.
    """
    consumer = _workers[-1].consumer
    consumer.qos.increment_eventually()

    def act() -> None:
        consumer.qos.decrement_eventually()
        requeue()

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
            message = (
                "%s has @idempotent_task, but not acks_late=True: if its worker dies,"
                " nothing runs it again"
            )
            log(logging.WARNING, "task_acknowledged_early", message, task.name)
        own = symbol_by_name(task.Request)
        if not issubclass(own, PatientRequest):
            task.Request = type(PatientRequest.__name__, (PatientRequest, own), {})


# once, if both modules are imported
@worker_process_shutdown.connect(dispatch_uid="django_idempotency")
def stop_background(**_named: Any) -> None:
    """Write the counts that are still in memory: Python calls no exit handlers in a
    child of the prefork pool.
    """
    background.stop()
