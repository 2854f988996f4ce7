"""Begin the run of an operation, unless it is a duplicate.

``begin()`` returns a ``Run``, or the outcome for a duplicate. The entry point runs the
view, and then calls ``end()`` with its verdict, once, in the thread that began the run.
In atomic mode the run owns the business transaction. If an exception from a signal's
handler keeps ``end()`` from being called, the next claim on the connection rolls the
transaction back; a lease is no longer renewed then, and lapses.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import closing, nullcontext, suppress
from functools import partial
from typing import Any, TypeVar

from asgiref.sync import sync_to_async

from django_idempotency import signals
from django_idempotency.engine.atomic_runs import AtomicRun, LockRun
from django_idempotency.engine.claims import duplicate
from django_idempotency.engine.lease_runs import LeaseRun
from django_idempotency.engine.run import Run
from django_idempotency.engine.waiting import Pending, begin_claim, claim
from django_idempotency.reporting.events import send
from django_idempotency.stores import store_for
from django_idempotency.values.exceptions import ClaimLost, StoreUnavailable
from django_idempotency.values.outcomes import Claimed, Duplicate, Operation, Outcome
from django_idempotency.values.policy import Policy

T = TypeVar("T")


def _begun(
    operation: Operation, policy: Policy, claims: Callable[[], Claimed | T]
) -> Run | Duplicate | T:
    try:
        outcome = claims()
    except StoreUnavailable as error:
        send(signals.store_failed, operation, error=error)
        raise
    return begin_claimed(outcome, policy) if isinstance(outcome, Claimed) else outcome


def begin(
    operation: Operation,
    policy: Policy,
    *,
    claims: Callable[[Operation, Policy], Outcome] = claim,
) -> Run | Duplicate:
    """Claim ``operation`` and begin its run, or return the outcome for a duplicate.
    Wait first if the policy says so.

    ``claims``: claims it. Raises what that raises. Nothing was run then.
    """
    return _begun(operation, policy, partial(claims, operation, policy))


def begin_or_wait(operation: Operation, policy: Policy) -> Run | Duplicate | Pending:
    """Do as much of ``begin`` as is possible without waiting. Go on with
    ``begin_again`` once it is due.
    """
    return _begun(operation, policy, partial(begin_claim, operation, policy))


def begin_again(pending: Pending) -> Run | Duplicate | Pending:
    return _begun(pending.operation, pending.policy, pending.ask)


def begin_claimed(claimed: Claimed, policy: Policy) -> Run | Duplicate:
    """Begin the run of a claim. Return the outcome for a duplicate if the claim is lost
    by now.
    """
    run = execution(claimed, policy)
    try:
        run.begin()
    except ClaimLost:
        return duplicate(claimed.operation, policy)
    except StoreUnavailable as error:
        error.fails_open = False
        run.report(error)
        raise
    return run


def execution(claimed: Claimed, policy: Policy) -> Run:
    """Return the run of a claim, which is not begun yet."""
    # in atomic mode, that of a database
    store: Any = store_for(policy, claimed.operation)
    if not policy.is_atomic:
        return LeaseRun(claimed, policy, store.at(claimed.receipt))
    if claimed.by_lock:
        return LockRun(claimed, policy, store, store.transaction(claimed))
    return AtomicRun(claimed, policy, store, store.transaction())


# --- Async callers --------------------------------------------------------------------


async def shielded(
    work: Callable[[], T], *, undo: Callable[[T], object] | None = None
) -> T:
    """Await ``work`` in its thread to the end, even if the caller is cancelled
    meanwhile.

    In that case, raise ``CancelledError`` afterwards. Before that, call ``undo`` with
    the result, which no caller is left to take.
    """
    task = asyncio.ensure_future(sync_to_async(work)())
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            cancelled = error
        except (
            Exception
        ):  # the task's own: it is done now, and its result is examined below
            pass
    if cancelled is None:
        return task.result()
    failed = task.cancelled() or task.exception() is not None
    if undo is not None and not failed:
        with suppress(asyncio.CancelledError):
            await shielded(partial(undo, task.result()))
    raise cancelled


async def awaited(
    begin: Callable[[], T | Pending], again: Callable[[Pending], T | Pending]
) -> T:
    """Await ``begin``, and ``again`` as long as that returns a claim that waits. No
    thread is blocked meanwhile.
    """
    begun = await shielded(begin, undo=undo_begin)
    with closing(begun) if isinstance(begun, Pending) else nullcontext():
        while isinstance(begun, Pending):
            await asyncio.sleep(begun.pause)
            begun = await shielded(partial(again, begun), undo=undo_begin)
    return begun


def undo_begin(outcome: object) -> None:
    """Undo a run that has begun, or a claim that waits, whose caller is gone."""
    if isinstance(outcome, LeaseRun):
        outcome.free("CancelledError")
    elif isinstance(outcome, Pending):
        outcome.close()
