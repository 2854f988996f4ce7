"""Send the statements of every request: with psycopg 3, those that follow each other in one round trip, by a pipeline.

psycopg's cursors cost the application more than a short statement does. So libpq is called without them, with prepared
statements where that is safe. The wait is psycopg's own: other threads, and gevent's greenlets, run meanwhile.
https://www.postgresql.org/docs/current/libpq-pipeline-mode.html
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import count
from threading import Lock
from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary

from django.db import Error

from django_idempotency.stores.handled_errors import ACTIVE, libpq_status

try:
    import psycopg
    from django.db.backends.postgresql.base import DatabaseWrapper
    from psycopg import pq
    from psycopg.abc import PQGen
    from psycopg.adapt import AdaptersMap, PyFormat, Transformer
    from psycopg.errors import error_from_result
    from psycopg.generators import fetch, send
except ImportError:  # psycopg 3, which Django prefers to psycopg2, is not installed
    HAS_PSYCOPG = False
else:
    HAS_PSYCOPG = True
    DONE = (pq.ExecStatus.TUPLES_OK, pq.ExecStatus.COMMAND_OK)
    TIME_LOADER: Any = psycopg.adapters.get_loader(
        psycopg.adapters.types["timestamptz"].oid, pq.Format.TEXT
    )

# A prepared statement is gone, or a migration has changed the type of a column that it returns.
GONE = ("26000", "0A000")

Statement = tuple[str, Sequence[Any]]


class Result(NamedTuple):
    """The first row, if there is one, and how many rows were found or changed."""

    row: tuple[Any, ...] | None
    rows: int


class Ending(Protocol):
    """A transaction that ends with a statement: whether COMMIT was sent with it, and the error instead of a reply."""

    committing: bool
    error: BaseException | None


def execute(
    statement: str, values: Sequence[Any], connection: Any, ends: Ending | None = None
) -> Result:
    return together([(statement, values)], connection, ends)[0]


def together(
    statements: Sequence[Statement], connection: Any, ends: Ending | None = None
) -> list[Result]:
    """Execute ``statements``, whose placeholders are all ``%s``, in order and until one fails.

    BEGIN goes with them if a transaction is due.

    ``ends``: a transaction that ends with them: COMMIT goes with them, too, and ``ends.commit()`` raises what came of
    it. If another tool or a pooler's settings forbid pipelines, ``ends.commit()`` sends it.
    """
    connection.close_if_health_check_failed()
    connection.ensure_connection()
    if _needs_cursor(connection):
        return [_by_cursor(*statement, connection) for statement in statements]
    connection.validate_thread_sharing()
    connection.validate_no_broken_transaction()
    inner = connection.connection
    begins = (
        not inner.autocommit
        and inner.pgconn.transaction_status == pq.TransactionStatus.IDLE
    )
    try:
        return _by_pipeline(statements, connection, begins, ends)
    except BaseException as error:
        struck = not isinstance(error, Error | psycopg.Error)
        if struck:  # by a signal's handler: psycopg's lock may still be held, and whoever rolls back would wait for it
            connection.errors_occurred = True
            inner.pgconn.finish()
            inner.lock = Lock()
        if ends is not None and ends.committing:
            ends.error = error
            return [Result(None, 0)] * len(statements)
        if begins and not struck:  # nothing else was done in it
            with suppress(psycopg.Error):
                inner.rollback()
        if getattr(error.__cause__, "sqlstate", None) not in GONE:
            raise
        _session(inner).forgetful = True
        if not (
            begins or inner.autocommit
        ):  # earlier statements of the transaction are lost
            raise
    return _by_pipeline(statements, connection, begins, ends)


def _by_cursor(statement: str, values: Sequence[Any], connection: Any) -> Result:
    with connection.cursor() as cursor:
        cursor.execute(statement, values)
        return Result(
            cursor.fetchone() if cursor.description else None, cursor.rowcount
        )


# --- May it be prepared? ---------------------------------------------------------------------------------------------

THRESHOLD = 2  # a connection that serves a single request does not reach it
MOST = 100  # statements prepared on one connection, as psycopg's own limit


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
    if not HAS_PSYCOPG:
        return
    inner = connection.connection
    session = _session(inner)
    session.direct = (
        min(session.direct + 1, THRESHOLD) if inner.pgconn.backend_pid == process else 0
    )


def _keeps_statements(connection: Any) -> bool:
    """Whether a prepared statement, which costs the server half as much, will be there when it is called.

    Behind a pooler in transaction mode it may not, or its name means another one: the next transaction may have another
    process. With a ``prepare_threshold`` in the database's ``OPTIONS``, psycopg decides instead.
    """
    session = _session(connection.connection)
    stated = "prepare_threshold" in connection.settings_dict["OPTIONS"]
    return session.direct == THRESHOLD and not stated and not session.forgetful


REPLACED = ("cursor", "_cursor", "create_cursor", "_commit")


def _needs_cursor(connection: Any) -> bool:
    """Whether statements are watched or changed on their way.

    - psycopg is not the driver, or is to prepare statements itself.
    - A tool or a backend changes every cursor, or COMMIT. That is how django-tenants sets the ``search_path``: without
      it, a claim would be made among another tenant's records.
    - Transactions begin in another way than by ``BEGIN``.
    - The application has opened a pipeline, or an exception from a signal's handler has interrupted a statement.
    """
    if not HAS_PSYCOPG or not _has_djangos_cursors(connection.__class__):
        return True
    inner = connection.connection
    replaced = any(map(vars(connection).__contains__, REPLACED))
    watched = connection.queries_logged or connection.execute_wrappers
    plain = (
        inner.isolation_level
        is inner.read_only
        is inner.deferrable
        is inner.prepare_threshold
        is None
    )
    return bool(replaced or watched or not plain or libpq_status(connection) == ACTIVE)


@lru_cache
def _has_djangos_cursors(backend: type) -> bool:
    ours = issubclass(backend, DatabaseWrapper)
    return ours and all(
        getattr(backend, name) is getattr(DatabaseWrapper, name) for name in REPLACED
    )


# --- The pipeline ----------------------------------------------------------------------------------------------------


def _by_pipeline(
    statements: Sequence[Statement], connection: Any, begins: bool, ends: Ending | None
) -> list[Result]:
    inner = connection.connection
    with connection.wrap_database_errors, inner.lock:
        transformer, session, named = (
            _transformer(connection),
            _session(inner),
            _keeps_statements(connection),
        )
        to_send: list[Callable[[], None]] = []
        made: dict[int, tuple[tuple[str, tuple[int, ...]], bytes]] = {}
        if begins:
            to_send.append(partial(inner.pgconn.send_query_params, b"BEGIN", None))
        asked = []
        for statement, values in statements:
            parameters = transformer.dump_sequence(
                values, [PyFormat.AUTO] * len(values)
            )
            types, formats = tuple(transformer.types or ()), transformer.formats
            name = session.names.get((statement, types)) if named else None
            if name is None and named and len(session.names) < MOST:
                name = f"django_idempotency_{next(session.numbers)}".encode()
                made[len(to_send)] = (statement, types), name
                to_send.append(
                    partial(
                        inner.pgconn.send_prepare, name, _numbered(statement), types
                    )
                )
            asked.append(len(to_send))
            to_send.append(
                partial(
                    inner.pgconn.send_query_params,
                    _numbered(statement),
                    parameters,
                    types,
                    formats,
                )
                if name is None
                else partial(
                    inner.pgconn.send_query_prepared, name, parameters, formats
                )
            )
        if ends is not None:
            to_send.append(partial(inner.pgconn.send_query_params, b"COMMIT", None))
            ends.committing = True
        results = _exchange(connection, to_send)
        session.names.update(
            known for number, known in made.items() if results[number].status in DONE
        )
        if results[-1].status == pq.ExecStatus.PIPELINE_ABORTED and ends is not None:
            ends.committing = False
        if (error := _first_error(results, inner, psycopg.Error)) is not None:
            raise error
        return [_read(results[number], transformer) for number in asked]


def _exchange(
    connection: Any, to_send: Sequence[Callable[[], None]]
) -> list[pq.abc.PGresult]:
    inner = connection.connection
    try:
        inner.pgconn.enter_pipeline_mode()
        for send in to_send:
            send()
        inner.pgconn.pipeline_sync()
        results: list[pq.abc.PGresult] = inner.wait(_receive(inner))
        inner.pgconn.exit_pipeline_mode()
    except (
        BaseException
    ):  # in the middle of the results, of which nobody could tell what they belong to
        connection.errors_occurred = True
        inner.pgconn.finish()
        raise
    return results


def _receive(connection: psycopg.Connection[Any]) -> PQGen[list[pq.abc.PGresult]]:
    """Return a result for each statement, up to that of Sync."""
    pgconn, results = connection.pgconn, list[pq.abc.PGresult]()
    yield from send(pgconn)
    while True:
        try:
            result = yield from fetch(pgconn)
        except psycopg.OperationalError as lost:
            raise (
                _first_error(results, connection, psycopg.OperationalError) or lost
            ) from None
        if result is None:
            if pgconn.status != pq.ConnStatus.OK:
                raise psycopg.OperationalError("the connection is lost")
        elif result.status == pq.ExecStatus.PIPELINE_SYNC:
            return results
        else:
            results.append(result)


def _read(result: pq.abc.PGresult, transformer: Any) -> Result:
    transformer.set_pgresult(result)
    row = transformer.load_row(0, tuple) if result.ntuples else None
    transformer.set_pgresult(None)
    return Result(row, result.command_tuples or 0)


def _first_error(
    results: Sequence[pq.abc.PGresult],
    connection: psycopg.Connection[Any],
    kind: type[psycopg.Error],
) -> psycopg.Error | None:
    """Return the first error among ``results``: ``OperationalError`` if it is not of this ``kind``."""
    for result in results:
        if result.status not in DONE:
            error = error_from_result(result, connection.info.encoding)
            if error.sqlstate is None or not isinstance(error, kind):
                return psycopg.OperationalError(*error.args)
            return error
    return None


class _Context(NamedTuple):
    adapters: AdaptersMap
    connection: psycopg.Connection[Any]


_transformers: WeakKeyDictionary[Any, tuple[bytes | None, Any]] = WeakKeyDictionary()


def _transformer(connection: Any) -> Any:
    """Return the transformer for all statements of a connection. It looks up once how each type is sent and read.

    It is kept by Django's connection, not by psycopg's, to which it holds a reference: neither would ever be freed.
    """
    inner = connection.connection
    encoding = inner.pgconn.parameter_status(b"client_encoding")
    known, transformer = _transformers.get(connection, (None, None))
    if transformer is None or transformer.connection is not inner or known != encoding:
        adapters = AdaptersMap(inner.adapters)
        adapters.register_loader(
            "timestamptz", TIME_LOADER
        )  # Django's is not in C, and takes ten times as long
        transformer = Transformer(_Context(adapters, inner))
        _transformers[connection] = encoding, transformer
    return transformer


@lru_cache(maxsize=1024)
def _numbered(statement: str) -> bytes:
    first, *others = statement.split("%s")
    return (
        first + "".join(f"${number}{text}" for number, text in enumerate(others, 1))
    ).encode()
