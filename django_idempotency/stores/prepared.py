"""How PostgreSQL is given the statements of every request: prepared where that is safe.

psycopg's cursors cost the application more than a short statement does. So these statements are prepared under names
of our own and called by libpq's blocking functions, past the cursors; other threads run meanwhile.
https://www.postgresql.org/docs/current/libpq-exec.html
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import count
from typing import Any
from weakref import WeakKeyDictionary

import psycopg
from django.db import ProgrammingError, connections
from django.db.backends.postgresql.base import DatabaseWrapper
from psycopg import pq
from psycopg.adapt import PyFormat, Transformer
from psycopg.errors import error_from_result

from django_idempotency.stores import cursors
from django_idempotency.stores.cursors import Result


def execute(statement: str, values: Sequence[Any], using: str) -> Result:
    """Execute ``statement``, whose placeholders are all ``%s``, as a cursor of Django's would.

    Prepared, it costs the server half. Behind a pooler in transaction mode it must not be: the next transaction may
    have another process. With a ``prepare_threshold`` in the database's ``OPTIONS``, psycopg decides instead.
    """
    connection: Any = connections[using]
    connection.close_if_health_check_failed()
    connection.ensure_connection()
    if _may_prepare(connection) and not _needs_cursor(connection):
        try:
            return _by_libpq(connection, statement, values)
        except ProgrammingError as error:
            if getattr(error.__cause__, "sqlstate", None) != GONE:
                raise
            _session(connection.connection).forgetful = True
            if not connection.connection.autocommit:  # the transaction has failed
                raise
    return cursors.execute(statement, values, using)


# --- May it be prepared? ---------------------------------------------------------------------------------------------

THRESHOLD = 2  # a connection that serves a single request does not reach it
MOST = 100  # statements prepared on one connection, as psycopg's own limit
GONE = "26000"  # invalid_sql_statement_name


@dataclass(slots=True)
class _Session:
    """What is known of a connection.

    ``direct``: how many claims were answered by the very process that it was opened to: no pooler stands between.
    ``forgetful``: the prepared statements were thrown away, as by a pool that sends DISCARD ALL. ``numbers``: for
    names that were never given, not even to a statement whose preparation was interrupted.
    """

    direct: int = 0
    forgetful: bool = False
    numbers: Iterator[int] = field(default_factory=count)
    names: dict[tuple[str, tuple[int, ...]], bytes] = field(default_factory=dict)


_sessions: WeakKeyDictionary[psycopg.Connection[Any], _Session] = WeakKeyDictionary()


def _session(connection: psycopg.Connection[Any]) -> _Session:
    session = _sessions.get(connection)
    return _sessions.setdefault(connection, _Session()) if session is None else session


def learn(process: int, using: str) -> None:
    """Note that the server's ``process`` answered just now."""
    connection = connections[using].connection
    session = _session(connection)
    session.direct = min(session.direct + 1, THRESHOLD) if connection.pgconn.backend_pid == process else 0


def _may_prepare(connection: Any) -> bool:
    if "prepare_threshold" in connection.settings_dict["OPTIONS"]:
        return False
    session = _session(connection.connection)
    return session.direct == THRESHOLD and not session.forgetful and len(session.names) < MOST


CURSORS = ("cursor", "_cursor", "create_cursor")


def _needs_cursor(connection: Any) -> bool:
    """Whether statements are watched or changed on their way, or libpq's blocking call would do harm.

    - A tool or a backend has a hand in every cursor. So django-tenants sets the ``search_path``: without it a claim
      would be made among another tenant's records.
    - Transactions begin in another way than by ``BEGIN``.
    - A statement was left in the middle, by an exception of a signal's: libpq would throw its result away.
    - All greenlets of gevent's would stand still, and with them the one that has the row locked.
    """
    inner, gevent = connection.connection, sys.modules.get("gevent.monkey")
    replaced = any(map(vars(connection).__contains__, CURSORS)) or not _has_djangos_cursors(connection.__class__)
    watched = connection.queries_logged or connection.execute_wrappers
    plain = inner.isolation_level is inner.read_only is inner.deferrable is None
    unfinished = inner.pgconn.transaction_status == pq.TransactionStatus.ACTIVE
    greenlets = gevent and gevent.is_module_patched("select")
    return bool(replaced or watched or not plain or unfinished or greenlets)


@lru_cache
def _has_djangos_cursors(backend: type) -> bool:
    return all(getattr(backend, name) is getattr(DatabaseWrapper, name) for name in CURSORS)


# --- By libpq --------------------------------------------------------------------------------------------------------


def _by_libpq(connection: Any, statement: str, values: Sequence[Any]) -> Result:
    connection.validate_thread_sharing()
    connection.validate_no_broken_transaction()
    inner = connection.connection
    with connection.wrap_database_errors:
        transformer = Transformer(inner)
        parameters = transformer.dump_sequence(values, [PyFormat.AUTO] * len(values))
        with inner.lock:
            _begin(inner)
            name = _prepare(inner, statement, tuple(transformer.types or ()))
            result = _check(inner.pgconn.exec_prepared(name, parameters, transformer.formats), inner)
        transformer.set_pgresult(result)
        row = transformer.load_row(0, tuple) if result.ntuples else None
    return Result(row, result.command_tuples or 0)


def _begin(connection: psycopg.Connection[Any]) -> None:
    """Begin the transaction, which psycopg leaves to the first statement."""
    if not connection.autocommit and connection.pgconn.transaction_status == pq.TransactionStatus.IDLE:
        _check(connection.pgconn.exec_(b"BEGIN"), connection)


def _prepare(connection: psycopg.Connection[Any], statement: str, types: tuple[int, ...]) -> bytes:
    session = _session(connection)
    if (statement, types) not in session.names:
        name = f"django_idempotency_{next(session.numbers)}".encode()
        _check(connection.pgconn.prepare(name, _numbered(statement), types), connection)
        session.names[statement, types] = name
    return session.names[statement, types]


@lru_cache(maxsize=1024)
def _numbered(statement: str) -> bytes:
    first, *others = statement.split("%s")
    return (first + "".join(f"${number}{text}" for number, text in enumerate(others, 1))).encode()


def _check(result: pq.abc.PGresult, connection: psycopg.Connection[Any]) -> pq.abc.PGresult:
    if result.status in (pq.ExecStatus.TUPLES_OK, pq.ExecStatus.COMMAND_OK):
        return result
    error = error_from_result(result, connection.info.encoding)
    raise error if error.sqlstate else psycopg.OperationalError(*error.args)  # the connection broke
