"""Respond to a request: run the view once inside the engine, or return what came of it before."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Collection, Iterator
from contextlib import closing, contextmanager, nullcontext
from functools import partial
from typing import Any, TypeVar

from asgiref.sync import sync_to_async
from django.core.exceptions import ImproperlyConfigured
from django.http import HttpRequest, HttpResponse
from django.http.response import HttpResponseBase

from django_idempotency import engine, signals
from django_idempotency.exceptions import (
    ClaimLost,
    IdempotencyError,
    ReplayForbidden,
    StoreUnavailable,
    TerminalFailure,
)
from django_idempotency.http.observing import keep_body, observe
from django_idempotency.http.problems import mark_refusal, problem, problem_response
from django_idempotency.http.requests import expect_request, identify
from django_idempotency.http.responses import replay
from django_idempotency.http.transactions import atomic_requests, is_atomic_request
from django_idempotency.http.verdicts import settle, verdict_on
from django_idempotency.logs import log
from django_idempotency.outcomes import Claimed, Duplicate, EntryPoint, Operation, Outcome, Replay, dotted_name
from django_idempotency.policy import Mode, Policy

View = Callable[..., Any]
T = TypeVar("T", bound=Outcome | engine.Pending)
OnError = Callable[[Exception], HttpResponseBase]


def perform(
    request: HttpRequest,
    policy: Policy,
    run: Callable[[], HttpResponseBase],
    *,
    sender: object,
    entry_point: EntryPoint,
    non_atomic: Collection[str] = (),
    on_error: OnError | None = None,
) -> HttpResponseBase:
    """Respond to a request: run the view once, or return what came of it before.

    ``non_atomic``: databases in which the view wants no transaction. ``on_error``: makes the framework's response to an
    exception of the view, or raises it again.
    """
    expect_request(request)
    outcome = claim(request, policy, sender=sender, entry_point=entry_point)
    if outcome is None:
        watched = keep_body(request, policy)
        response = _run_unclaimed(request, partial(_handled, run, on_error), non_atomic)
        if watched:
            observe(request, policy, response, sender=sender, entry_point=entry_point)
        return response
    if isinstance(outcome, Claimed):
        try:
            with engine.execution(outcome, policy) as execution, seen_by(request, execution):
                return _run(execution, partial(_handled, run, on_error), non_atomic)
        except (ClaimLost, StoreUnavailable) as error:
            outcome = after_losing(error, outcome.operation, policy)
    return respond(outcome, policy)


def _run_unclaimed(
    request: HttpRequest, run: Callable[[], HttpResponseBase], non_atomic: Collection[str]
) -> HttpResponseBase:
    """Run the view without a claim of its own. A ``TerminalFailure`` is the response then, too."""
    if running(request):
        return run()
    try:
        with atomic_requests(non_atomic):
            return run()
    except TerminalFailure as failure:
        return failure.response


def _handled(run: Callable[[], HttpResponseBase], on_error: OnError | None) -> HttpResponseBase:
    """Run the view, and let its framework turn an exception into a response before a transaction sees it."""
    try:
        return run()
    except Exception as error:
        return _handled_error(error, on_error)


def _handled_error(error: Exception, on_error: OnError | None) -> HttpResponseBase:
    if on_error is None or isinstance(error, TerminalFailure):
        raise error
    return on_error(error)


def _run(
    execution: engine.Execution, run: Callable[[], HttpResponseBase], non_atomic: Collection[str]
) -> HttpResponseBase:
    raised: Exception | None = None
    try:
        with atomic_requests(non_atomic, but=execution.transactional_on):
            response = run()
    except Exception as error:  # the view's own
        raised, response = error, _response_of(error, execution, non_atomic)
    settle(execution, response, error=raised)
    return response


def _response_of(error: Exception, execution: engine.Execution, non_atomic: Collection[str] = ()) -> HttpResponseBase:
    """Return the response of a ``TerminalFailure``. Settle the verdict on any other exception, and raise it again."""
    if isinstance(error, TerminalFailure):
        return error.response
    using = execution.transactional_on
    undone = using is not None and is_atomic_request(using, non_atomic)
    execution.settle(verdict_on(error, execution.policy, rollback=undone), passing=error)
    raise error  # Django turns it into a response


async def aperform(
    request: HttpRequest,
    policy: Policy,
    run: Callable[[], Awaitable[HttpResponseBase]],
    *,
    sender: object,
    entry_point: EntryPoint,
    on_error: OnError | None = None,
) -> HttpResponseBase:
    """``perform`` for async views, in lease mode only, because a transaction belongs to a thread.

    Claims, verdicts and writes are shielded from cancellation, so that a caller that hangs up can't undo them.
    """
    expect_request(request)
    if policy.mode != Mode.LEASE:
        raise ImproperlyConfigured(f'{dotted_name(sender)} is an async view in atomic mode; set mode="lease" for it.')
    outcome = await _aclaim(request, policy, sender=sender, entry_point=entry_point)
    if outcome is None:
        watched = keep_body(request, policy)
        try:
            response = await run()
        except TerminalFailure as failure:
            if running(request):
                raise
            response = failure.response
        if watched:
            watch = partial(observe, request, policy, response, sender=sender, entry_point=entry_point)
            await sync_to_async(watch)()
        return response
    if isinstance(outcome, Claimed):
        try:
            async with engine.aexecution(outcome, policy) as execution:
                with seen_by(request, execution):
                    return await _arun(execution, partial(_ahandled, run, on_error))
        except (ClaimLost, StoreUnavailable) as error:
            outcome = await sync_to_async(after_losing)(error, outcome.operation, policy)
    return respond(outcome, policy)


async def _ahandled(run: Callable[[], Awaitable[HttpResponseBase]], on_error: OnError | None) -> HttpResponseBase:
    try:
        return await run()
    except Exception as error:
        return _handled_error(error, on_error)


async def _arun(execution: engine.Execution, run: Callable[[], Awaitable[HttpResponseBase]]) -> HttpResponseBase:
    raised: Exception | None = None
    try:
        response = await run()
    except Exception as error:  # the view's own
        raised, response = error, _response_of(error, execution)
    await engine.shielded(partial(settle, execution, response, error=raised))
    return response


# --- Entry points inside one another ---------------------------------------------------------------------------------


def running(request: HttpRequest) -> engine.Context | None:
    """Return the context in which ``request`` is running already, inside another entry point; ``None`` outside."""
    context: engine.Context | None = getattr(request, "idempotency", None)
    return context if context is not None and context.running else None


@contextmanager
def seen_by(request: HttpRequest, execution: engine.Execution) -> Iterator[None]:
    """Set the running view's ``request.idempotency``. An outer view sees its own again afterwards."""
    outer = running(request)
    request.idempotency = execution.context  # type: ignore[attr-defined]
    try:
        yield
    finally:
        stop_running(request, execution.context, outer)


def stop_running(request: HttpRequest, context: engine.Context, outer: engine.Context | None) -> None:
    context.running = False
    request.idempotency = outer or context  # type: ignore[attr-defined]


# --- The claim -------------------------------------------------------------------------------------------------------


def claim(
    request: HttpRequest,
    policy: Policy,
    *,
    sender: object,
    entry_point: EntryPoint,
    caller: HttpRequest | None = None,
) -> Outcome | IdempotencyError | None:
    """Return the engine's outcome for a request's key; ``None`` if the request is to run without a claim of its own.

    That is the case without a key, without a store if the policy sets ``fail_open``, and inside another entry point
    that has claimed the same record.
    """
    operation = _operation(request, policy, sender, entry_point, caller)
    if not isinstance(operation, Operation):
        return operation
    return _told(operation, policy, partial(engine.claim, operation, policy))


def _operation(
    request: HttpRequest, policy: Policy, sender: object, entry_point: EntryPoint, caller: HttpRequest | None = None
) -> Operation | IdempotencyError | None:
    outer = running(request)
    if outer is None:
        request.idempotency = None  # type: ignore[attr-defined]
    try:
        operation = identify(request, policy, sender=sender, entry_point=entry_point, caller=caller)
    except IdempotencyError as error:
        return error
    return None if outer is not None and operation is not None and outer.claim.id == operation.id else operation


def _told(operation: Operation, policy: Policy, ask: Callable[[], T]) -> T | IdempotencyError | None:
    try:
        return ask()
    except StoreUnavailable as error:
        signals.send(signals.store_failed, operation, error=error)
        if not policy.fail_open:
            return error
        log(
            logging.ERROR,
            "unprotected",
            "idempotency record %s: the store can't be reached, so it runs unprotected, as the policy says",
            operation.id,
            operation=operation,
        )
        return None
    except IdempotencyError as error:
        return error


async def _aclaim(
    request: HttpRequest, policy: Policy, *, sender: object, entry_point: EntryPoint
) -> Outcome | IdempotencyError | None:
    """``claim``, which waits in the event loop."""

    def begin() -> Outcome | engine.Pending | IdempotencyError | None:
        operation = _operation(request, policy, sender, entry_point)
        if not isinstance(operation, Operation):
            return operation
        return _told(operation, policy, partial(engine.begin_claim, operation, policy))

    give_back = partial(engine.give_back, policy=policy)
    outcome: Outcome | engine.Pending | IdempotencyError | None = await engine.shielded(begin, undo=give_back)
    with closing(outcome) if isinstance(outcome, engine.Pending) else nullcontext():
        while isinstance(outcome, engine.Pending):
            await engine.until_due(outcome)
            outcome = await engine.shielded(partial(_told, outcome.operation, policy, outcome.ask), undo=give_back)
    return outcome


def after_losing(
    error: ClaimLost | StoreUnavailable, operation: Operation, policy: Policy
) -> Duplicate | StoreUnavailable | ReplayForbidden:
    """Return what a caller is told if its run came to nothing."""
    if isinstance(error, StoreUnavailable):
        return error
    try:
        return engine.duplicate(operation, policy)
    except (StoreUnavailable, ReplayForbidden) as refusal:
        return refusal


def respond(outcome: Outcome | IdempotencyError, policy: Policy) -> HttpResponse:
    """Return the response to a caller that is not to run the view. Raises an error that stands for no response."""
    if isinstance(outcome, Replay):
        return replay(outcome.response, cacheable=policy.cacheable_replays)
    assert not isinstance(outcome, Claimed)
    response = problem_response(problem(outcome))
    mark_refusal(response)
    return response
