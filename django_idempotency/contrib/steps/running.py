"""Run the steps of an operation, each once."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from contextvars import ContextVar
from functools import partial
from inspect import isawaitable
from threading import Lock, get_ident
from typing import TYPE_CHECKING, Any, Literal

from asgiref.sync import sync_to_async
from django.apps import apps
from django.core.exceptions import ImproperlyConfigured
from django.db import DatabaseError, router, transaction

from django_idempotency import ClaimLost, Hold, StoreUnavailable, current
from django_idempotency.contrib.steps.memos import Memos, is_fit, meaning
from django_idempotency.contrib.steps.models import Step
from django_idempotency.contrib.steps.signals import step_completed, step_held
from django_idempotency.contrib.steps.values import (
    DRIFT,
    ENDED,
    UNKNOWN,
    UNREADABLE,
    StepError,
    check_name,
    declared,
    dumped,
)
from django_idempotency.extending import cause, log, send_several
from django_idempotency.extending.stores import (
    Fail,
    InDoubt,
    Keep,
    Release,
    Transaction,
    TransactionEnded,
    Verdict,
    store_errors,
)

if TYPE_CHECKING:
    from django_idempotency.messages import Context

NOTES = "steps"
OnDrift = Literal["hold", "run"]

# the operation and the name of the step that is running
_inside: ContextVar[tuple[_Steps, str] | None] = ContextVar(
    "django_idempotency_step", default=None
)
_noting = Lock()


def atomic(
    name: str, function: Callable[[], Any], *, on_drift: OnDrift = "hold"
) -> Any:
    """Call ``function`` in a transaction, which commits its effects together with its
    result, and return the result. A later attempt gets the result without a call.

    ``name``: used once in an operation; code may change what follows a colon, as in
    ``line:7``. ``function``: returns what JSON can hold, at most 1 MiB; its effects go
    to the record's database. ``on_drift``: ``"run"`` runs a new step even if steps that
    are done were not asked for. In atomic mode, and without a claim, ``function`` is
    called, in the transaction that is open or in one of its own.

    Raises ``StepError``, ``Hold``, ``ClaimLost``, ``StoreUnavailable``, and what
    ``function`` raises: then nothing is committed or remembered.
    """
    _refuse_loop(name, "aatomic")
    return _atomic(name, function, on_drift)


def call(
    name: str,
    function: Callable[..., Any],
    *,
    key: str | None = None,
    at_most_once: bool = False,
    on_drift: OnDrift = "hold",
) -> Any:
    """Call ``function`` with a key for its provider, and return its result. A later
    attempt gets the result without a call.

    After a crash, it is called again with the same key. ``key``: the former name of a
    step that was renamed. ``at_most_once``: for a provider that takes no key:
    ``function`` is called without one, and never twice. If it crashes or raises, an
    operator has to decide: the key is put on hold. The other arguments and errors are
    those of ``atomic``. Without a claim, the key is a new one.
    """
    _refuse_loop(name, "acall")
    step = _Call(name, function, key, at_most_once, on_drift)
    if step.is_done:
        return step.result
    with step.running():
        return step.finish(step.function())


async def aatomic(
    name: str, function: Callable[[], Any], *, on_drift: OnDrift = "hold"
) -> Any:
    """``atomic`` in async code. ``function`` is sync, and runs in a thread, because a
    transaction belongs to one.

    If the code has changed, that is logged at the end: the order of steps is free.
    """
    return await sync_to_async(_atomic)(name, function, on_drift, in_order=False)


async def acall(
    name: str,
    function: Callable[..., Any],
    *,
    key: str | None = None,
    at_most_once: bool = False,
    on_drift: OnDrift = "hold",
) -> Any:
    """``call`` in async code. ``function`` may have to be awaited. As for ``aatomic``,
    the order of steps is free.
    """
    begin = sync_to_async(partial(_Call, in_order=False))
    step = await begin(name, function, key, at_most_once, on_drift)
    if step.is_done:
        return step.result
    with step.running():
        result = step.function()
        result = await result if isawaitable(result) else result
    return await sync_to_async(step.finish)(result)


def _atomic(
    name: str, function: Callable[[], Any], on_drift: OnDrift, *, in_order: bool = True
) -> Any:
    context = current()
    if not context or context.policy.is_atomic:
        own = transaction.atomic(using=router.db_for_write(Step))
        with nullcontext() if context else own:
            return json.loads(dumped(name, function()))
    steps = _Steps.of(context)
    found = steps.ask(name, name, on_drift=on_drift, in_order=in_order)
    return steps.commit(name, function) if found is None else json.loads(found)


class _Call:
    """A call of a provider, before and after it."""

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        key: str | None,
        at_most_once: bool,
        on_drift: OnDrift,
        *,
        in_order: bool = True,
    ) -> None:
        context = current()
        self.name, self.at_most_once, self.began = name, at_most_once, time.monotonic()
        self.steps: _Steps | None = None
        self.is_done, self.result = False, None
        if context and context.policy.is_atomic and at_most_once:
            raise StepError(
                f"The step {name!r} may run at most once, so a note of it must be"
                ' committed before it runs: set mode="lease" for this entry point.'
            )
        child_key = context.child_key(key or name)
        self.function = function if at_most_once else partial(function, child_key)
        if not context or context.policy.is_atomic:
            return
        self.steps = _Steps.of(context)
        found = self.steps.ask(name, key or name, on_drift=on_drift, in_order=in_order)
        if found is not None:
            self.is_done, self.result = True, json.loads(found)
        elif at_most_once:
            self.steps.memos.write(name, None)

    @contextmanager
    def running(self) -> Iterator[None]:
        try:
            with self.steps.inside(self.name) if self.steps else nullcontext():
                yield
        except Exception as error:
            if self.steps is None or not self.at_most_once:
                raise
            raise self.steps.held(self.name, UNKNOWN.format(name=self.name)) from error

    def finish(self, result: Any) -> Any:
        """Keep the result, and return it as a retry would get it."""
        text = dumped(self.name, result)
        if self.steps is not None:
            seconds = time.monotonic() - self.began
            self.steps.memos.write(self.name, text, seconds=seconds)
            self.steps.done(self.name, seconds)
        return json.loads(text)


class _Steps:
    """The steps of the operation that ``context`` runs."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.memos = Memos(context)
        self.found = self.memos.load()
        self.asked: set[str] = set()

    @classmethod
    def of(cls, context: Context) -> _Steps:
        if not apps.is_installed("django_idempotency.contrib.steps"):
            raise ImproperlyConfigured(
                "Add 'django_idempotency.contrib.steps' to INSTALLED_APPS and run"
                " migrate."
            )
        with _noting:  # threads of one operation share it
            if NOTES not in context.notes:
                context.notes[NOTES] = cls(context)
            found: _Steps = context.notes[NOTES]
            return found

    def ask(
        self, name: str, former: str, *, on_drift: OnDrift, in_order: bool
    ) -> bytes | None:
        """Return the result of a step that is done; ``None`` if it is to run now."""
        self._refuse(name, former)
        memo = self.found.get(name) or self.found.get(former)
        if memo is None:
            in_order = in_order and get_ident() == self.context.thread
            if in_order and on_drift == "hold" and (others := self.unasked):
                reason = DRIFT.format(name=name, others=", ".join(others))
                raise self.held(name, reason)
            return None
        if not memo.is_done:
            raise self.held(name, UNKNOWN.format(name=name))
        if memo.result is None:
            raise self.held(name, UNREADABLE.format(name=name))
        return memo.result

    def _refuse(self, name: str, former: str) -> None:
        outer = _inside.get()
        if outer is not None and outer[0] is self:  # not of another operation
            raise StepError(
                f"The step {name!r} is inside the step {outer[1]!r}. Call its function"
                " there, or make it a step of its own before or after."
            )
        if self.memos.store.in_foreign_transaction():
            raise StepError(
                f"The step {name!r} is in a transaction that is open already, so it"
                " could be undone. Call it outside transaction.atomic()."
            )
        check_name(name)
        with _noting:
            if not self.asked.isdisjoint((name, former)):
                raise StepError(
                    f"The operation has a step {name!r} already. Give each its own"
                    " name, in a loop for example 'line:7'."
                )
            self.asked.update((name, former))

    @contextmanager
    def inside(self, name: str) -> Iterator[None]:
        token = _inside.set((self, name))
        try:
            yield
        finally:
            _inside.reset(token)

    @property
    def unasked(self) -> list[str]:
        """The names of steps that are done, but were not asked for."""
        return [
            name
            for name, memo in self.found.items()
            if name not in self.asked and not memo.optional
        ]

    def commit(self, name: str, function: Callable[[], Any]) -> Any:
        """Call ``function``, and commit its effects with the memo of its result."""
        began, memos = time.monotonic(), self.memos
        business = Transaction(memos.store.name, durable=True)
        business.owner = self.context
        business.begin()
        try:
            number = memos.number()
            with self.inside(name):
                text = dumped(name, function())
            run_hooks = business.defer_hooks(partial(self._report, name))
            seconds = time.monotonic() - began
            memo = memos.memo(name, text, seconds=seconds, transaction=number)
        except BaseException as error:
            business.abort(error).expect()
        outcome = business.commit_after(lambda send: send(*memo))
        if lost := self._lost_reply(outcome, name):
            self._report(name, lost)
            run_hooks()
        else:
            try:
                with meaning(), store_errors():
                    outcome.expect()
            except TransactionEnded as error:
                with suppress(StoreUnavailable):  # so that it can be resolved
                    memos.write(name, None)
                raise self.held(name, ENDED.format(name=name)) from error
        memos.is_kept = True
        self.done(name, seconds)
        return json.loads(text)

    def _lost_reply(self, outcome: object, name: str) -> Exception | None:
        """Return the error that was the reply to a COMMIT which has taken place."""
        if isinstance(outcome, InDoubt) and isinstance(outcome.error, Exception):
            return outcome.error if self.memos.is_written(name) else None
        return None

    def _report(self, name: str, error: Exception) -> None:
        log(
            logging.ERROR,
            "committed_with_error",
            "idempotency record %s: its step %s is committed, but: %s",
            self.memos.claim.id,
            name,
            cause(error),
            operation=self.memos.claim.operation,
            error=error,
        )

    def done(self, name: str, seconds: float) -> None:
        self._send(step_completed, name, seconds=seconds)

    def held(self, name: str, reason: str) -> Hold:
        """Return the exception that puts the key on hold."""
        self._send(step_held, name, reason=reason)
        return Hold(reason)

    def _send(self, signal: Any, name: str, **named: Any) -> None:
        of = {"operation": self.memos.claim.operation, "step": name}
        attempt = self.memos.claim.attempt
        send_several(
            signal,
            declared(name),
            1,
            self.memos.store.name,
            attempt=attempt,
            **of,
            **named,
        )

    def warn_of_unasked(self) -> None:
        if self.unasked:
            log(
                logging.WARNING,
                "steps_changed",
                "idempotency record %s: the code has changed: it ended without asking"
                " for these steps, which are done: %s",
                self.memos.claim.id,
                ", ".join(self.unasked),
                operation=self.memos.claim.operation,
            )


def final_verdict(context: Context, verdict: Verdict) -> Verdict:
    """Return what stands of the verdict: a key with a step that is done is not
    released, because its next life would do that again.
    """
    if isinstance(verdict, Keep | Release) and _may_have_steps(context):
        try:
            found = _Steps.of(context)
        except (ClaimLost, StoreUnavailable, DatabaseError):  # nobody can tell
            is_kept = True
        else:
            is_kept = found.memos.is_kept
            if isinstance(verdict, Keep):
                found.warn_of_unasked()
        if is_kept and isinstance(verdict, Release):
            return Fail("its steps are done in part")
    return verdict


def _may_have_steps(context: Context) -> bool:
    """Whether a step may be done. This attempt may have asked for none."""
    return NOTES in context.notes or (context.attempt > 1 and is_fit(context.store))


def _refuse_loop(name: str, twin: str) -> None:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise StepError(f"The step {name!r} is in async code: await steps.{twin}() there.")
