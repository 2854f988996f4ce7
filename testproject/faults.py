"""Faults at named points of the protocol, in the server's own process, if ``SIMULATE``
and ``FAULTS_LOG`` are set.

``X-Fault: [{"at": "lock.after", "do": "kill"}]`` arms one request: the fault happens
the first time that the request reaches that point. ``renew`` is a point of the
heartbeat, not of a request, so its fault hits the first one to pass. Each hit is a line
in ``FAULTS_LOG``, and so is each error of the database.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache, wraps
from typing import Any

from django.conf import settings
from django.db import OperationalError, connection
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models.signals import post_save, pre_save
from django.db.utils import DatabaseErrorWrapper
from django.http import HttpRequest
from django.http.response import HttpResponseBase

from django_idempotency.stores.database import DatabaseStore
from django_idempotency.stores.errors import store_errors
from django_idempotency.stores.lock_claims import LockClaimStore
from django_idempotency.stores.postgresql import PostgreSQLStore
from django_idempotency.values.exceptions import StoreUnavailable
from testproject.models import LedgerEntry

STORE_STEPS = ("claim", "reassign", "lock", "complete", "fail", "release", "renew")
STEPS = (*STORE_STEPS, "effect", "commit")
POINTS = (
    *(f"{step}.{when}" for step in STEPS for when in ("before", "after")),
    "respond",
)


class InjectedFault(Exception):
    """What ``{"do": "raise"}`` raises in the project's own code."""


@dataclass
class Fault:
    """``ms`` is for faults that take time, ``locks`` for those that take locks."""

    at: str
    do: str
    ms: int = 0
    locks: list[int] = field(default_factory=list)


def _kill(fault: Fault) -> None:
    _log(fault)
    os.kill(os.getpid(), signal.SIGKILL)


def _stop(fault: Fault) -> None:
    """Stop all threads of the worker until it gets a SIGCONT."""
    _log(fault)
    os.kill(os.getpid(), signal.SIGSTOP)


def _raise(fault: Fault) -> None:
    """Raise an exception of a kind that occurs at that point."""
    _log(fault)
    kinds = {
        "commit": OperationalError,
        "effect": InjectedFault,
        "respond": InjectedFault,
    }
    raise kinds.get(fault.at.partition(".")[0], StoreUnavailable)(
        f"injected at {fault.at}"
    )


def _terminate(fault: Fault) -> None:
    if connection.connection is None:
        return
    other = connection.copy()
    try:
        with other.cursor() as cursor:
            cursor.execute(
                "SELECT pg_terminate_backend(%s, 5000)",
                [connection.connection.info.backend_pid],
            )
    finally:
        other.close()
    _log(fault)


def _cut(fault: Fault) -> None:
    """Cut the connection from this end. What was sent is not taken back."""
    if connection.connection is None or connection.connection.closed:
        return
    with socket.socket(fileno=os.dup(connection.connection.pgconn.socket)) as wire:
        wire.shutdown(socket.SHUT_RDWR)
    _log(fault)


def _sleep(fault: Fault) -> None:
    _log(fault)
    time.sleep(fault.ms / 1000)


def _query(fault: Fault) -> None:
    """Run a statement that takes long."""
    _log(fault)
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_sleep(%s)", [fault.ms / 1000])


def _lock(fault: Fault) -> None:
    """Take locks that others want as well, one after another, until the end of the
    transaction.
    """
    _log(fault)
    with connection.cursor() as cursor:
        for lock in fault.locks:
            cursor.execute(
                "SELECT pg_advisory_xact_lock(%s), pg_sleep(%s)",
                [lock, fault.ms / 1000],
            )


def _survey(fault: Fault) -> None:
    """Read what others are about to write. Under SERIALIZABLE, not all of them can
    commit.
    """
    _log(fault)
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT sum(amount), pg_sleep(%s) FROM testproject_ledgerentry",
            [fault.ms / 1000],
        )


def _update(fault: Fault) -> None:
    """Write what others write. Under REPEATABLE READ, only the first can commit."""
    _log(fault)
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_sleep(%s)", [fault.ms / 1000])
        cursor.execute(
            "UPDATE auth_user SET last_login = statement_timestamp() WHERE username ="
            " 'bob'"
        )


def _crash(fault: Fault) -> None:
    """Send SIGKILL to the database's process behind this connection. The whole server
    then crashes and recovers.
    """
    if settings.FAULTS_MAY_CRASH_DATABASE and connection.connection is not None:
        # a process that answers is sure to have the pid that it tells
        with connection.connection.cursor() as cursor:
            (pid,) = cursor.execute("SELECT pg_backend_pid()").fetchone()
        _log(fault)
        os.kill(pid, signal.SIGKILL)


ACTIONS: dict[str, Callable[[Fault], None]] = {
    "kill": _kill,
    "stop": _stop,
    "raise": _raise,
    "terminate": _terminate,
    "cut": _cut,
    "sleep": _sleep,
    "query": _query,
    "lock": _lock,
    "survey": _survey,
    "update": _update,
    "crash": _crash,
}

# --- Arming, and reaching a point -----------------------------------------------------

_armed: ContextVar[list[Fault]] = ContextVar("armed")
_for_heartbeat: list[Fault] = []


def faults(
    get_response: Callable[[HttpRequest], HttpResponseBase],
) -> Callable[[HttpRequest], HttpResponseBase]:
    """Arm the faults that each request asks for. This has to be the outermost
    middleware.
    """
    install()

    def middleware(request: HttpRequest) -> HttpResponseBase:
        with armed(json.loads(request.headers.get("X-Fault", "[]"))):
            response = get_response(request)
            reach("respond")
            return response

    return middleware


@contextmanager
def armed(given: Iterable[dict[str, Any]]) -> Iterator[None]:
    """Arm the faults ``given``, in the format of the header, for the block."""
    faults = [Fault(**fault) for fault in given]
    for fault in faults:
        if fault.at not in POINTS or fault.do not in ACTIONS:
            raise ValueError(f"There is no {fault.do} at {fault.at}.")
    _for_heartbeat.extend(fault for fault in faults if fault.at.startswith("renew"))
    token = _armed.set(faults)
    try:
        yield
    finally:
        _armed.reset(token)


def reach(point: str) -> None:
    """Let the faults armed at ``point`` happen: the code calls this when it gets
    there.
    """
    waiting = _for_heartbeat if point.startswith("renew") else _armed.get([])
    for fault in list(waiting):
        if fault.at == point:
            waiting.remove(fault)
            ACTIONS[fault.do](fault)


@cache
def install() -> None:
    """Install the points in this process."""
    for step in STORE_STEPS:
        owner = PostgreSQLStore if step in vars(PostgreSQLStore) else DatabaseStore
        for store in (
            (owner, LockClaimStore) if step in vars(LockClaimStore) else (owner,)
        ):
            setattr(store, step, _between_points(step, getattr(store, step)))
    BaseDatabaseWrapper._commit = _between_points("commit", BaseDatabaseWrapper._commit)  # type: ignore[attr-defined]
    pre_save.connect(
        lambda **_named: reach("effect.before"), sender=LedgerEntry, weak=False
    )
    post_save.connect(
        lambda **_named: reach("effect.after"), sender=LedgerEntry, weak=False
    )
    DatabaseErrorWrapper.__exit__ = _logging(DatabaseErrorWrapper.__exit__)  # type: ignore[method-assign]


def _between_points(step: str, method: Callable[..., Any]) -> Callable[..., Any]:
    # A fault at a step of the store has to appear as a fault of the store.
    inside = store_errors if step in STORE_STEPS else nullcontext

    @wraps(method)
    def passing(*args: Any, **named: Any) -> Any:
        with inside():
            reach(f"{step}.before")
        result = method(*args, **named)
        with inside():
            reach(f"{step}.after")
        return result

    return passing


def _logging(leave: Callable[..., Any]) -> Callable[..., Any]:
    def leaving(self: Any, kind: Any, error: Any, traceback: Any) -> Any:
        if error is not None:
            _write({"error": str(error)[:200]})
        return leave(self, kind, error, traceback)

    return leaving


def _log(fault: Fault) -> None:
    _write({"at": fault.at, "do": fault.do})


def _write(line: dict[str, Any]) -> None:
    """Write in one call, and at once, because this process may be about to end."""
    log = os.open(settings.FAULTS_LOG, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.write(log, json.dumps({**line, "time": time.time()}).encode() + b"\n")
    os.close(log)
