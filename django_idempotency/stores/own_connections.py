"""Connections that background threads have to themselves: from no pool, and with a
limit to every wait.
"""

from __future__ import annotations

import math
import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from django.db import connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper


@contextmanager
def own_connection(
    name: str, *, seconds: float, schemas: Sequence[str] = ()
) -> Iterator[None]:
    """Have this thread use a connection of its own to the database ``name`` inside the
    block.

    Connecting, a statement, a lock and the block as a whole may each take ``seconds``.
    After that, they fail as if the database were unavailable. ``schemas``: where
    PostgreSQL looks for the tables first.
    """
    connection = _own(name, seconds)
    timer = threading.Timer(seconds, _cut_off, [connection])
    timer.daemon = True
    with suppress(RuntimeError):  # no thread can be started: TCP's own timeouts remain
        timer.start()
    try:
        connection.close_if_unusable_or_obsolete()
        with connection.execute_wrapper(_limiting(connection, seconds, schemas)):
            yield
    finally:
        timer.cancel()


def _own(name: str, seconds: float) -> Any:
    current: Any = connections[name]
    if getattr(current, "gives_up_after", math.inf) <= seconds:
        return current
    current.close()
    own: Any = connections.create_connection(name)
    own.settings_dict = _settings(own, seconds)
    own.gives_up_after = seconds
    connections[name] = own
    return own


def _settings(connection: BaseDatabaseWrapper, seconds: float) -> dict[str, Any]:
    """Return the settings of ``connection``, without a pool and with limits; libpq
    takes 2 seconds at least.

    https://www.postgresql.org/docs/current/libpq-connect.html#LIBPQ-PARAMKEYWORDS
    """
    options = {
        name: value
        for name, value in connection.settings_dict["OPTIONS"].items()
        if name != "pool"
    }
    match connection.vendor:
        case "postgresql":
            from django.db.backends.postgresql.psycopg_any import IsolationLevel

            options |= {
                "connect_timeout": max(2, math.floor(seconds)),
                "tcp_user_timeout": math.ceil(seconds * 1000),
            }
            options["isolation_level"] = IsolationLevel.READ_COMMITTED
        case "mysql":
            limits = ("connect_timeout", "read_timeout", "write_timeout")
            options |= {
                **dict.fromkeys(limits, max(1, math.floor(seconds))),
                "isolation_level": "read committed",
            }
        case "sqlite":
            options["timeout"] = seconds
    return {
        **connection.settings_dict,
        "OPTIONS": options,
        "CONN_MAX_AGE": None,
        "CONN_HEALTH_CHECKS": False,
    }


# --- What each statement is sent with, on PostgreSQL ----------------------------------

# For one transaction only: behind a pooler, the session belongs to another client in
# the next one. The last limit is for a process that is frozen between two statements:
# its timer does not run, and its locks would keep others from taking over.
LIMITS = (
    "SELECT set_config('statement_timeout', %s, true), set_config('lock_timeout', %s,"
    " true), set_config('idle_in_transaction_session_timeout', %s, true)"
)
SCHEMAS = "SELECT set_config('search_path', %s || current_setting('search_path'), true)"


def _limiting(
    connection: BaseDatabaseWrapper, seconds: float, schemas: Sequence[str]
) -> Callable[..., Any]:
    milliseconds = str(math.ceil(seconds * 1000))
    path = "".join('"' + schema.replace('"', '""') + '", ' for schema in schemas)

    def limited(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        if connection.vendor != "postgresql":
            return execute(sql, params, many, context)
        if not connection.in_atomic_block:
            with transaction.atomic(using=connection.alias):
                return limited(execute, sql, params, many, context)
        raw = context["cursor"].cursor  # what is executed on it is not wrapped again
        raw.execute(LIMITS, (milliseconds,) * 3)
        if path:
            raw.execute(SCHEMAS, (path,))
        return execute(sql, params, many, context)

    return limited


def _cut_off(connection: BaseDatabaseWrapper) -> None:
    # A frozen server, or a proxy that has lost it, confirms each packet, so that no TCP
    # timeout expires.
    with suppress(Exception):
        inner: Any = connection.connection
        with socket.socket(fileno=os.dup(inner.fileno())) as wire:
            wire.shutdown(socket.SHUT_RDWR)
