"""Functions that run once for each key: jobs, commands, actions of the admin, and the
functions that queues call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, wraps
from inspect import isasyncgenfunction, isgeneratorfunction
from typing import TYPE_CHECKING, Any, TypeVar

from django.core.exceptions import ImproperlyConfigured

from django_idempotency import engine
from django_idempotency.conf import resolve
from django_idempotency.messages.consumer import Caller
from django_idempotency.messages.handling import MAX_CRASHES
from django_idempotency.messages.message import (
    Ack,
    AwaitsStore,
    Delivery,
    Message,
    RetryLater,
)
from django_idempotency.values.calls import KeyBy, Keying, arguments_of
from django_idempotency.values.exceptions import NotRun, Rejected, StoreUnavailable
from django_idempotency.values.outcomes import EntryPoint, dotted_name
from django_idempotency.values.policy import Decorator, Policy, is_async
from django_idempotency.values.scopes import tenant_schema

R = TypeVar("R")
LAMBDA = "<lambda>"
SCRIPT = "__main__."  # any script that is run; imported, it has another name
TASK_ID = "task_id"  # in the templates of tasks


class _Function(Caller):
    def scope_of(self, message: Message) -> str:
        return f"function:{message.source}"


def _protected(
    function: Callable[..., Any],
    *,
    policy: Policy,
    key: KeyBy | None = None,
    name: str | None = None,
) -> Callable[..., Any]:
    if key is None:
        raise TypeError('@once needs a key, such as @once(key="invoice-{invoice_id}").')
    if name is None:
        name = dotted_name(function)
        is_shared = name.endswith(LAMBDA) or name.startswith(SCRIPT)
        if is_shared or not hasattr(function, "__qualname__"):
            raise ImproperlyConfigured(
                f"{function!r} has no name to distinguish its keys by: set name=…."
            )
    if isgeneratorfunction(function) or isasyncgenfunction(function):
        raise ImproperlyConfigured(
            f"{dotted_name(function)} is a generator: calling it runs nothing. Decorate"
            " a function that consumes it."
        )
    keying = Keying(key, function, policy)

    def called(handler: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Return the consumer of a call, and the call as a message."""
        id, body = keying.of(args, kwargs), arguments_of(function, args, kwargs)
        consumer = _Function(
            "once",
            handler,
            policy=policy,
            sender=function,
            entry_point=EntryPoint.FUNCTION,
        )
        return consumer, Message(in_tenant(name, policy), id, body)

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        @wraps(function)
        def handle(_message: Message, _context: Any) -> Any:
            return function(*args, **kwargs)

        consumer, message = called(handle, args, kwargs)
        return returned(consumer.consume(message))

    @wraps(function)
    async def arun(*args: Any, **kwargs: Any) -> Any:
        @wraps(function)
        async def handle(_message: Message, _context: Any) -> Any:
            return await function(*args, **kwargs)

        consumer, message = called(handle, args, kwargs)
        return returned(await consumer.aconsume(message))

    return arun if is_async(function) else run


if TYPE_CHECKING:

    @dataclass(frozen=True, kw_only=True, eq=False)
    class _Options(Policy):
        key: KeyBy  # type: ignore[assignment]
        name: str | None = None

    @dataclass(frozen=True, kw_only=True, eq=False)
    class TaskOptions(Policy):
        max_crashes: int = MAX_CRASHES
        key: KeyBy | None = None  # type: ignore[assignment]

else:
    _Options = TaskOptions = Policy

once = Decorator(_Options, _protected, "once", "key", "name")
"""Run a function once for each key, however often it is called, and return the first
result to each later call: ``@once(key="invoice-{invoice_id}", retention=…)``.

``key``: a template over the arguments, or a callable that takes them and returns the
key. Its parts are text, integers, UUIDs, dates, or saved objects, whose primary key is
taken. ``retention`` has to be set; ``None`` remembers keys for good. ``name``: the
scope of the keys, by default the function's dotted name. A lambda needs one, and so
does a function of a script, whose module is ``__main__``. The other options are those
of ``Policy``, or ``policy=``.

What the function raises is raised, its effects are rolled back in atomic mode, and the
next call runs again. A coroutine function needs ``mode="lease"``. The call raises
``NotRun`` while the function runs elsewhere under the key (``wait=`` waits first), or
if the key is on hold; ``Rejected`` for other arguments under the same key, or after an
operator has marked it as failed; ``ValueError`` for arguments that make no key;
``StoreUnavailable``; and ``ClaimInsideTransaction`` inside ``transaction.atomic()``. A
result that was too large to keep is ``NOT_KEPT`` in later calls.

Raises ``ImproperlyConfigured`` and ``TypeError`` for a wrong template or option.
"""


def run_once(
    key: Any, function: Callable[[], R], *, name: str | None = None, **options: Any
) -> R:
    """Call ``function`` once for ``key``, and return the first result to each later
    call. See ``once`` for keys, options and errors.

    A ``functools.partial`` is called with its arguments, which are compared. The object
    of a bound method is not: name it in the key. A coroutine function returns a
    coroutine, as usual.
    """
    called = function if isinstance(function, partial) else partial(function)
    decorate: Any = once(key=lambda *_args, **_kwargs: key, name=name, **options)
    result: R = decorate(called.func)(*called.args, **called.keywords)
    return result


def in_tenant(name: str, policy: Policy) -> str:
    """Return the source of a call whose key is made from its arguments. It begins with
    the schema where tenants have a schema each: one's order 7 is not another's.

    Raises ``ImproperlyConfigured`` if the tenant can't be determined.
    """
    policy = resolve(policy)
    using = None if callable(policy.using) else engine.alias(policy)
    return tenant_schema(using) + name


def returned(delivery: Delivery) -> Any:
    """Return the result of a call. Raises ``NotRun``, ``Rejected`` and
    ``StoreUnavailable``.
    """
    match delivery:
        case Ack(result):
            return result
        case AwaitsStore(reason=reason):
            raise StoreUnavailable(reason)
        case RetryLater(delay=delay, reason=reason):
            raise NotRun(reason, delay)
    raise Rejected(delivery.reason)
