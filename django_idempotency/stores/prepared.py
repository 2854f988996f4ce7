"""Send the statements of every request to PostgreSQL, prepared if that is safe.

psycopg's cursors cost the application more than a short statement does. So these statements are prepared under names
of our own and called by libpq's blocking functions, without cursors. Other threads run meanwhile.
https://www.postgresql.org/docs/current/libpq-exec.html
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import count
from typing import Any
from weakref import WeakKeyDictionary

import psycopg
from django.db import ProgrammingError
from django.db.backends.postgresql.base import DatabaseWrapper
from psycopg import pq
from psycopg.adapt import PyFormat, Transformer
from psycopg.errors import error_from_result

from django_idempotency.stores import cursors
from django_idempotency.stores.cursors import Result


def execute(statement: str, values: Sequence[Any], connection: Any) -> Result:
    """Execute ``statement``, whose placeholders are all ``%s``, as a cursor of Django's ``connection`` would.

    A prepared statement costs the server half as much. Behind a pooler in transaction mode none must be prepared: the
    next transaction may have another process. With a ``prepare_threshold`` in the database's ``OPTIONS``, psycopg
    decides instead.
    """
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
    return cursors.execute(statement, values, connection)


def send(statements: Sequence[str], connection: Any) -> None:
    """Execute ``statements`` of a transaction, which have neither values nor results, in one message.

    If statements are watched, each is sent by a cursor.
    """
    connection.ensure_connection()
    if not isinstance(connection, DatabaseWrapper) or _needs_cursor(connection):
        return cursors.send(statements, connection)
    connection.validate_thread_sharing()
    connection.validate_no_broken_transaction()
    inner = connection.connection
    with connection.wrap_database_errors, inner.lock:
        _check(inner.pgconn.exec_("; ".join(statements).encode()), inner)
    return None


# --- May it be prepared? ---------------------------------------------------------------------------------------------

THRESHOLD = 2  # a connection that serves a single request does not reach it
MOST = 100  # statements prepared on one connection, as psycopg's own limit
GONE = "26000"  # invalid_sql_statement_name


@dataclass(slots=True)
class _Session:
    """What is known about a connection.

    ``direct``: how many claims in a row were answered by the very process that the connection was opened to, with no
    pooler in between. ``forgetful``: the prepared statements were discarded, as by a pool that sends DISCARD ALL.
    ``numbers``: for names that were never used, not even for a statement whose preparation was interrupted.
    """

    direct: int = 0
    forgetful: bool = False
    numbers: Iterator[int] = field(default_factory=count)
    names: dict[tuple[str, tuple[int, ...]], bytes] = field(default_factory=dict)


_sessions: WeakKeyDictionary[psycopg.Connection[Any], _Session] = WeakKeyDictionary()


def _session(connection: psycopg.Connection[Any]) -> _Session:
    session = _sessions.get(connection)
    return _sessions.setdefault(connection, _Session()) if session is None else session


def learn(process: int, connection: Any) -> None:
    """Note that the server's ``process`` answered just now."""
    inner = connection.connection
    session = _session(inner)
    session.direct = min(session.direct + 1, THRESHOLD) if inner.pgconn.backend_pid == process else 0


def _may_prepare(connection: Any) -> bool:
    if "prepare_threshold" in connection.settings_dict["OPTIONS"]:
        return False
    session = _session(connection.connection)
    return session.direct == THRESHOLD and not session.forgetful and len(session.names) < MOST


CURSORS = ("cursor", "_cursor", "create_cursor")


def _needs_cursor(connection: Any) -> bool:
    """Whether statements are watched or changed on their way, or libpq's blocking call would do harm.

    - A tool or a backend changes every cursor. That is how django-tenants sets the ``search_path``: without it, a claim
      would be made among another tenant's records.
    - Transactions begin in another way than by ``BEGIN``.
    - An exception from a signal's handler interrupted a statement: libpq would discard its result.
    - All of gevent's greenlets would be blocked, including the one that has the row locked.
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
    with connection.wrap_database_errors, inner.lock:
        transformer = _transformer(connection)
        parameters = transformer.dump_sequence(values, [PyFormat.AUTO] * len(values))
        name = _prepare(inner, statement, tuple(transformer.types or ()))
        if _is_to_begin(inner):
            result = inner.pgconn.exec_(_beginning(name, map(transformer.as_literal, values)))
        else:
            result = inner.pgconn.exec_prepared(name, parameters, transformer.formats)
        transformer.set_pgresult(_check(result, inner))
        row = transformer.load_row(0, tuple) if result.ntuples else None
        transformer.set_pgresult(None)
    return Result(row, result.command_tuples or 0)


_transformers: WeakKeyDictionary[Any, tuple[bytes | None, Any]] = WeakKeyDictionary()


def _transformer(connection: Any) -> Any:
    """Return the transformer for all statements of a connection. It looks up once how each type is sent and read.

    It is kept by Django's connection, not by psycopg's, to which it holds a reference: neither would ever be freed.
    """
    inner = connection.connection
    encoding = inner.pgconn.parameter_status(b"client_encoding")
    known, transformer = _transformers.get(connection, (None, None))
    if transformer is None or transformer.connection is not inner or known != encoding:
        transformer = Transformer(inner)
        _transformers[connection] = encoding, transformer
    return transformer


def _is_to_begin(connection: psycopg.Connection[Any]) -> bool:
    """Whether a transaction is to begin, which psycopg leaves to the first statement."""
    return not connection.autocommit and connection.pgconn.transaction_status == pq.TransactionStatus.IDLE


def _beginning(name: bytes, literals: Iterable[bytes]) -> bytes:
    """Return BEGIN and the transaction's first statement as one message, which saves a round trip."""
    arguments = b", ".join(literals)
    return b"BEGIN; EXECUTE %s%s" % (name, b"(%s)" % arguments if arguments else b"")


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
