"""Faults from outside: what the ``X-Simulate`` header asks for happens to the
operation, if ``SIMULATE`` is set.

They happen inside the idempotency entry point, where an operation's own faults would.
They are asked for in a header so that a retry without it is the same request.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial, wraps
from inspect import iscoroutinefunction
from typing import Any, TypeVar, cast

from django.conf import settings
from django.core.handlers.asgi import ASGIRequest
from django.db import connection
from django.db.models.signals import post_save
from django.dispatch import receiver
from django.http import HttpResponse, JsonResponse, StreamingHttpResponse
from django.http.response import HttpResponseBase
from rest_framework.renderers import JSONRenderer

from testproject.models import LedgerEntry

Operation = TypeVar("Operation", bound=Callable[..., Any])
Faults = dict[str, Any]

FAULTS: dict[str, Callable[[Any], bool]] = {
    "delay_ms": lambda value: type(value) is int and value >= 0,
    "kill": lambda value: value in ("before", "call", "bank", "after"),
    "gateway": lambda value: value in ("slow", "500", "503", "cut", "nokeys"),
    "fail_commit": lambda value: type(value) is bool,
    "raise": lambda value: type(value) is bool,
    "status": lambda value: type(value) is int and 200 <= value < 600,
    "stream": lambda value: type(value) is bool,
    "bytes": lambda value: type(value) is int and value >= 0,
}
BODILESS = (204, 304)
NOBODY = 0
CHUNK = 65536

_commit_fails: ContextVar[bool] = ContextVar("commit_fails", default=False)
_killed: ContextVar[str] = ContextVar("killed", default="")
gateway_fault: ContextVar[str] = ContextVar("gateway_fault", default="")


class SimulatedFailure(Exception):
    """What ``{"raise": true}`` raises."""


def simulated(operation: Operation) -> Operation:
    """Return ``operation``, sync or async, with the faults that each request asks for.
    The delay comes first.
    """

    def faulty(request: Any, *args: Any, **kwargs: Any) -> HttpResponseBase:
        faults = _asked_for(request)
        if isinstance(faults, HttpResponse):
            return faults
        time.sleep(faults.get("delay_ms", 0) / 1000)
        with _happening(faults):
            response = operation(request, *args, **kwargs)
        return _reshaped(request, response, faults)

    async def faulty_async(request: Any, *args: Any, **kwargs: Any) -> HttpResponseBase:
        faults = _asked_for(request)
        if isinstance(faults, HttpResponse):
            return faults
        await asyncio.sleep(faults.get("delay_ms", 0) / 1000)
        with _happening(faults):
            response = await operation(request, *args, **kwargs)
        return _reshaped(request, response, faults)

    return cast(
        "Operation",
        wraps(operation)(faulty_async if iscoroutinefunction(operation) else faulty),
    )


def simulated_handler(handler: Operation) -> Operation:
    """Return the handler of a class with the faults that each request asks for.

    It hides ``handler``: an entry point would go inside this decorator, too, and the
    faults are to happen inside the entry point.
    """

    @wraps(handler)
    def faulty(view: Any, request: Any, *args: Any, **kwargs: Any) -> HttpResponseBase:
        faulty_handler = simulated(partial(handler, view))
        return faulty_handler(request, *args, **kwargs)  # type: ignore[no-any-return]

    del faulty.__wrapped__
    return cast("Operation", faulty)


def _asked_for(request: Any) -> Faults | HttpResponse:
    if not settings.SIMULATE:
        return {}
    try:
        faults = json.loads(request.headers.get("X-Simulate", "{}"))
        wrong = [name for name, value in faults.items() if not FAULTS[name](value)]
    except (ValueError, AttributeError, KeyError) as error:
        return _refused(
            f"X-Simulate must be a JSON object with some of {', '.join(FAULTS)}:"
            f" {error!r}"
        )
    if wrong:
        return _refused(f"X-Simulate can't do this with {', '.join(wrong)}.")
    if (
        faults.get("fail_commit")
        and not connection.features.can_defer_constraint_checks
    ):
        return _refused(
            f"X-Simulate: nothing fails at COMMIT on {connection.vendor}, which defers"
            " no constraints."
        )
    return dict(faults)


def _refused(detail: str) -> HttpResponse:
    return JsonResponse({"detail": detail}, status=400)


@contextmanager
def _happening(faults: Faults) -> Iterator[None]:
    commits = _commit_fails.set(faults.get("fail_commit", False))
    killed = _killed.set(faults.get("kill", ""))
    gateway = gateway_fault.set(faults.get("gateway", ""))
    die_if("before")
    try:
        yield
        die_if("after")
    finally:
        _commit_fails.reset(commits)
        _killed.reset(killed)
        gateway_fault.reset(gateway)
    if faults.get("raise"):
        raise SimulatedFailure("asked for by X-Simulate")


def die_if(where: str) -> None:
    """End this process, if the request asked for that ``where``."""
    if _killed.get() == where:
        os.kill(os.getpid(), signal.SIGKILL)


@receiver(post_save, sender=LedgerEntry)
def _spoil_commit(instance: LedgerEntry, **_named: Any) -> None:
    """Write an entry of no existing user. Django defers its foreign keys, so that fails
    only at COMMIT.
    """
    if _commit_fails.get():
        LedgerEntry.objects.bulk_create(
            [LedgerEntry(user_id=NOBODY, amount=0, reference=instance.reference)]
        )


def _reshaped(request: Any, response: Any, faults: Faults) -> HttpResponseBase:
    if response.status_code >= 400:  # the operation refused by itself
        return response  # type: ignore[no-any-return]
    response.status_code = faults.get("status", response.status_code)
    if response.status_code in BODILESS:
        return HttpResponse(status=response.status_code)
    if "bytes" not in faults and not faults.get("stream"):
        return response  # type: ignore[no-any-return]
    body = b"x" * faults["bytes"] if "bytes" in faults else _body(response)
    kind = "application/octet-stream" if "bytes" in faults else "application/json"
    if not faults.get("stream"):
        return HttpResponse(body, status=response.status_code, content_type=kind)
    served_by_asgi = isinstance(getattr(request, "_request", request), ASGIRequest)
    chunks = _async_chunks(body) if served_by_asgi else _chunks(body)
    return StreamingHttpResponse(chunks, status=response.status_code, content_type=kind)


def _body(response: Any) -> bytes:
    return (
        JSONRenderer().render(response.data)
        if hasattr(response, "data")
        else response.content
    )


def _chunks(body: bytes) -> Iterator[bytes]:
    return (body[start : start + CHUNK] for start in range(0, len(body), CHUNK))


async def _async_chunks(body: bytes) -> AsyncIterator[bytes]:
    for chunk in _chunks(body):
        yield chunk
