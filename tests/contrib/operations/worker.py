"""A worker of its own, for operations that pause where the test says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tests.support.pausing_process import PausingProcess, pause, pausing

# In the order in which a run comes by them.
OF_REQUESTS = ("deferred",)
POINTS = ("before", "after the effect", "after the function", "after COMMIT")
MARKS_AS_ENDED = 'UPDATE "django_idempotency_deferred_operation" SET "due_at" = NULL'
KINDS = ("paused.atomic", "paused.steps")
at: Callable[[str], object] = lambda point: None  # noqa: E731


def declare() -> dict[str, Any]:
    """The operations of these tests, one of each mode, by name."""
    from django_idempotency import Lease
    from django_idempotency.contrib import steps
    from django_idempotency.contrib.operations import operation
    from tests.support.callers import pay

    def effect(reference: str) -> str:
        paid = pay(reference).id.hex
        at("after the effect")
        return paid

    @operation("paused.atomic", status=201)
    def run_atomic(*, reference: str) -> str:
        at("before")
        paid = effect(reference)
        at("after the function")
        return paid

    @operation("paused.steps", mode=Lease(seconds=30), status=201)
    def run_steps(*, reference: str) -> Any:
        at("before")
        paid = steps.atomic("pay", lambda: effect(reference))
        at("after the function")
        return paid

    return {each.name: each for each in (run_atomic, run_steps)}


def request(kind: str) -> Any:
    """A request that defers one; the response."""
    from django_idempotency.contrib.operations import defer
    from tests.support.callers import entry_point

    def view(request: Any) -> Any:
        response = defer(request, declare()[kind], reference="r")
        at("deferred")
        return response

    return entry_point(view)()


def run_due() -> list[Any]:
    """Run what is due, as a worker does."""
    from django_idempotency.contrib.operations import run_operation
    from django_idempotency.contrib.operations.running import take

    declare()
    return [run_operation(each.pk, using="default") for each in take("default", 10)]


@contextmanager
def working(point: str, kind: str, claim: str = "record") -> Iterator[PausingProcess]:
    """A process that stands at ``point`` of the request or of its operation. ``claim``:
    of those in atomic mode.
    """
    with pausing(_stand, point, kind, claim) as process:
        assert process.says() == point
        yield process


def _stand(point: str, kind: str, claim: str) -> Any:
    global at
    from django.conf import settings
    from django.db import connection
    from django.test import override_settings

    from django_idempotency import Atomic

    def reach(reached: str) -> None:
        if reached == point:
            pause(point)

    def committed(execute: Any, sql: str, *details: Any) -> Any:
        if sql.startswith(MARKS_AS_ENDED) and not connection.in_atomic_block:
            at("after COMMIT")
        return execute(sql, *details)

    at = reach
    own = {**settings.IDEMPOTENCY, "ATOMIC": Atomic(claim=claim)}
    connection.ensure_connection()
    try:
        with (
            override_settings(IDEMPOTENCY=own),
            connection.execute_wrapper(committed),
        ):
            if point in OF_REQUESTS:
                return request(kind).status_code
            return [type(each).__name__ for each in run_due()]
    except Exception as error:
        return type(error).__name__
