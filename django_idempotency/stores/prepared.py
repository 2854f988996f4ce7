"""How PostgreSQL is given the statements of every request: prepared where that is safe, and then by libpq itself.

psycopg prepares, names and forgets them. Its cursors take the application more than the rest of a short statement, so
what psycopg has prepared is called past them: by libpq's own function, which blocks until there is a result, and lets
other threads run meanwhile. https://www.postgresql.org/docs/current/libpq-exec.html
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple, Self
from weakref import WeakKeyDictionary, WeakSet

import psycopg
from django.db import ProgrammingError, connections
from django.db.backends.postgresql.base import DatabaseWrapper
from django.db.backends.utils import CursorWrapper
from psycopg import abc, pq
from psycopg.adapt import PyFormat, Transformer
from psycopg.errors import error_from_result


class Result(NamedTuple):
    """The first row, if there is one, and how many rows were found or changed."""

    row: tuple[Any, ...] | None
    rows: int


def execute(statement: str, values: Sequence[Any], using: str) -> Result:
    """Execute ``statement``, whose placeholders are all ``%s``, as a cursor of Django's would.

    Prepared, it costs the server half. Behind a pooler in transaction mode it must not be: the next transaction may
    have another process. A ``prepare_threshold`` in the database's ``OPTIONS`` decides, if stated.
    """
    connection: Any = connections[using]
    connection.close_if_health_check_failed()
    connection.ensure_connection()
    inner = connection.connection
    if _may_prepare(connection) and not _needs_djangos_cursor(connection):
        try:
            return _execute_prepared(connection, statement, values)
        except ProgrammingError as error:
            if getattr(error.__cause__, "sqlstate", None) != GONE:
                raise
            _forgetful.add(inner)
            if not inner.autocommit:  # the transaction has failed
                raise
    return _by_cursor(connection.cursor(), statement, values)


def _execute_prepared(connection: Any, statement: str, values: Sequence[Any]) -> Result:
    if not _needs_cursor(connection):
        with connection.wrap_database_errors:
            prepared = _prepared(connection.connection, statement, values)
        if prepared:
            return _by_libpq(connection, prepared)
    return _by_cursor(connection._prepare_cursor(_PreparingCursor(connection.connection)), statement, values)


# --- May it be prepared? ---------------------------------------------------------------------------------------------

# How many claims on a connection were answered by the very process that it was opened to: no pooler stands between.
# One that serves a single request does not reach the threshold.
_direct: WeakKeyDictionary[psycopg.Connection[Any], int] = WeakKeyDictionary()
THRESHOLD = 2

# Connections on which prepared statements were thrown away behind psycopg's back, as by a pool that says DISCARD ALL
# whenever it gets one back.
_forgetful: WeakSet[psycopg.Connection[Any]] = WeakSet()
GONE = "26000"


def learn(process: int, using: str) -> None:
    """Note that the server's ``process`` answered just now."""
    connection = connections[using].connection
    if connection.pgconn.backend_pid != process:
        _direct.pop(connection, None)
    elif (claims := _direct.get(connection, 0)) < THRESHOLD:
        _direct[connection] = claims + 1


def _may_prepare(connection: Any) -> bool:
    if connection.connection in _forgetful:
        return False
    if "prepare_threshold" in connection.settings_dict["OPTIONS"]:
        return connection.connection.prepare_threshold is not None
    return _direct.get(connection.connection) == THRESHOLD


CURSORS = ("cursor", "_cursor", "create_cursor")


def _needs_djangos_cursor(connection: Any) -> bool:
    """Whether statements are logged, or a backend or a tool has a hand in every cursor.

    So django-tenants sets the ``search_path``: without it a claim would be made among another tenant's records.
    """
    replaced = any(map(vars(connection).__contains__, CURSORS))
    return bool(connection.queries_logged or replaced or not _has_djangos_cursors(connection.__class__))


@lru_cache
def _has_djangos_cursors(backend: type) -> bool:
    return all(getattr(backend, name) is getattr(DatabaseWrapper, name) for name in CURSORS)


# --- By a cursor -----------------------------------------------------------------------------------------------------


class _PreparingCursor(psycopg.Cursor[Any]):
    """Its statements are prepared at their first execution, whatever the connection's threshold."""

    def execute(self, query: Any, params: Any = None, **options: Any) -> Self:
        threshold = self.connection.prepare_threshold
        self.connection.prepare_threshold = 0
        try:
            return super().execute(query, params, **options)
        finally:
            self.connection.prepare_threshold = threshold


def _by_cursor(cursor: CursorWrapper, statement: str, values: Sequence[Any]) -> Result:
    with cursor:
        cursor.execute(statement, values)
        return Result(cursor.fetchone() if cursor.description else None, cursor.rowcount)


# --- By libpq --------------------------------------------------------------------------------------------------------


class _Prepared(NamedTuple):
    name: bytes
    parameters: Sequence[Any]
    transformer: abc.Transformer


def _needs_cursor(connection: Any) -> bool:
    """Whether somebody wraps each statement, or transactions begin in another way than by ``BEGIN``.

    Or a call that blocks would stop all greenlets of gevent's, and with them whoever has the row locked. Or a statement
    was left in the middle, by an exception of a signal's: libpq would wait for it and throw its result away.
    """
    inner, gevent = connection.connection, sys.modules.get("gevent.monkey")
    plain = inner.isolation_level is inner.read_only is inner.deferrable is None
    unfinished = inner.pgconn.transaction_status == pq.TransactionStatus.ACTIVE
    greenlets = gevent and gevent.is_module_patched("select")
    return bool(connection.execute_wrappers or not plain or unfinished or greenlets)


def _prepared(connection: psycopg.Connection[Any], statement: str, values: Sequence[Any]) -> _Prepared | None:
    """By psycopg's books, which are private: where a release keeps them elsewhere, its cursor does."""
    transformer: abc.Transformer = Transformer(connection)
    parameters = transformer.dump_sequence(values, [PyFormat.AUTO] * len(values))
    names = getattr(getattr(connection, "_prepared", None), "_names", {})
    name = names.get((_numbered(statement), transformer.types))
    return _Prepared(name, parameters, transformer) if name else None


@lru_cache(maxsize=1024)
def _numbered(statement: str) -> bytes:
    first, *others = statement.split("%s")
    return (first + "".join(f"${number}{text}" for number, text in enumerate(others, 1))).encode()


def _by_libpq(connection: Any, prepared: _Prepared) -> Result:
    connection.validate_thread_sharing()
    connection.validate_no_broken_transaction()
    with connection.wrap_database_errors:
        with connection.connection.lock:
            result = _call(connection.connection, prepared)
        prepared.transformer.set_pgresult(result)
        row = prepared.transformer.load_row(0, tuple) if result.ntuples else None
    return Result(row, result.command_tuples or 0)


def _call(connection: psycopg.Connection[Any], prepared: _Prepared) -> pq.abc.PGresult:
    pgconn = connection.pgconn
    if not connection.autocommit and pgconn.transaction_status == pq.TransactionStatus.IDLE:
        _check(pgconn.exec_(b"BEGIN"), connection)  # which psycopg leaves to the first statement
    result = pgconn.exec_prepared(prepared.name, prepared.parameters, prepared.transformer.formats)
    _check(result, connection)
    return result


def _check(result: pq.abc.PGresult, connection: psycopg.Connection[Any]) -> None:
    if result.status in (pq.ExecStatus.TUPLES_OK, pq.ExecStatus.COMMAND_OK):
        return
    error = error_from_result(result, connection.info.encoding)
    raise error if error.sqlstate else psycopg.OperationalError(*error.args)  # the connection broke
