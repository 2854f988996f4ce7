"""Send the statements of every request: with psycopg 3, those that follow each other in
one round trip, by a pipeline.

psycopg's cursors cost the application more than a short statement does. So libpq is
called without them, with prepared statements where that is safe. The wait is psycopg's
own: other threads, and gevent's greenlets, run meanwhile.
https://www.postgresql.org/docs/current/libpq-pipeline-mode.html

Of psycopg's private names, ``_get_tx_start_command`` is used, as in 3.2 and 3.3.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import count
from typing import Any, NamedTuple

from django.db import Error

from django_idempotency.conf import debug
from django_idempotency.stores.django_state import (
    ACTIVE,
    IDLE,
    LOST,
    break_off,
    expect_usable,
)

try:
    import psycopg
    from django.db.backends.postgresql.base import DatabaseWrapper
    from psycopg import generators, pq
    from psycopg.abc import PQGen
    from psycopg.adapt import AdaptersMap, PyFormat, Transformer
    from psycopg.errors import error_from_result
except ImportError:  # psycopg 3, which Django prefers to psycopg2, is not installed
    HAS_PSYCOPG = False
else:
    HAS_PSYCOPG = True
    DONE = (pq.ExecStatus.TUPLES_OK, pq.ExecStatus.COMMAND_OK)
    TIME_LOADER: Any = psycopg.adapters.get_loader(
        psycopg.adapters.types["timestamptz"].oid, pq.Format.TEXT
    )

# A prepared statement is gone, or a migration has changed the type of a column that it
# returns.
GONE = ("26000", "0A000")

Statement = tuple[str, Sequence[Any]]


class Result(NamedTuple):
    """The first row, if there is one, and how many rows were found or changed."""

    row: tuple[Any, ...] | None
    rows: int


class Sent(NamedTuple):
    """What became of statements: their results, or the error of the first that failed,
    and whether COMMIT took place, which was to follow them; ``None`` if that is
    unknown.
    """

    results: list[Result]
    error: BaseException | None = None
    committed: bool | None = False

    def expect(self) -> list[Result]:
        """Return the results, or raise the error."""
        if self.error is not None:
            raise self.error
        return self.results


def execute(statement: str, values: Sequence[Any], connection: Any) -> Result:
    sent = together([(statement, values)], connection)
    if sent.error is not None:
        raise sent.error
    return sent.results[0]


def together(
    statements: Sequence[Statement], connection: Any, *, commit: bool = False
) -> Sent:
    """Execute ``statements``, whose placeholders are all ``%s``, in order and until one
    fails. BEGIN goes with them if a transaction is due.

    ``commit``: COMMIT goes with them, too, unless another tool or a pooler's settings
    forbid pipelines. Raises an error if nothing was sent.
    """
    expect_usable(connection)
    if _needs_cursor(connection):
        return _by_cursors(statements, connection)
    # The application has opened a pipeline, or an exception from a signal's handler has
    # interrupted a statement: a cursor says so.
    pgconn = connection.connection.pgconn
    status = pgconn.transaction_status
    if pgconn.pipeline_status or status in (ACTIVE, LOST):
        return _by_cursors(statements, connection)
    session = _session(connection)
    if session.prepares_itself:
        return _by_cursors(statements, connection)
    begins = status == IDLE and not session.inner.autocommit
    sent = _by_pipeline(statements, connection, session, begins=begins, commit=commit)
    if sent.error is None or sent.committed is None:
        return sent
    if begins and isinstance(sent.error, Error):
        with suppress(psycopg.Error):  # nothing else was done in it
            session.inner.rollback()
    if getattr(sent.error.__cause__, "sqlstate", None) not in GONE:
        return sent
    session.prepared.discarded = True
    # earlier statements of the transaction are lost
    if status != IDLE:
        return sent
    return _by_pipeline(statements, connection, session, begins=begins, commit=commit)


def _by_cursors(statements: Sequence[Statement], connection: Any) -> Sent:
    results = []
    try:
        for statement, values in statements:
            with connection.cursor() as cursor:
                cursor.execute(statement, values)
                row = cursor.fetchone() if cursor.description else None
                results.append(Result(row, cursor.rowcount))
    except BaseException as error:
        return Sent(results, error)
    return Sent(results)


# --- May it be prepared? --------------------------------------------------------------

THRESHOLD = 2  # a connection that serves a single request does not reach it
MOST = 100  # statements prepared on one connection, as psycopg's own limit


@dataclass(slots=True)
class _Prepared:
    """What is known about the statements that are prepared on a connection of psycopg.

    ``direct_claims``: how many claims in a row were answered by the very process that
    the connection was opened to, with no pooler in between. ``discarded``: they
    were, as by a pool that sends DISCARD ALL. ``numbers``: for names that were never
    used, not even for a statement whose preparation was interrupted.
    """

    direct_claims: int = 0
    discarded: bool = False
    numbers: Iterator[int] = field(default_factory=count)
    names: dict[tuple[str, tuple[int, ...]], bytes | None] = field(default_factory=dict)


class _Session:
    """How the statements of a connection are sent and read.

    It is kept by Django's connection, not by psycopg's, to which it holds a reference.
    What is prepared is kept by psycopg's, which may go back to a pool.
    """

    __slots__ = (
        "encoding",
        "inner",
        "may_prepare",
        "prepared",
        "prepares_itself",
        "transformer",
    )

    def __init__(self, connection: Any, encoding: bytes | None) -> None:
        self.inner = inner = connection.connection
        self.encoding = encoding
        adapters = AdaptersMap(inner.adapters)
        # Django's is not in C, and takes ten times as long
        adapters.register_loader("timestamptz", TIME_LOADER)
        # it looks up once how each type is sent and read
        self.transformer: Any = Transformer(_Context(adapters, inner))
        # psycopg is to do it, or nobody: with a threshold in the database's OPTIONS
        self.prepares_itself = inner.prepare_threshold is not None
        options = connection.settings_dict["OPTIONS"]
        self.may_prepare = "prepare_threshold" not in options
        self.prepared: _Prepared = vars(inner).setdefault(ON_CONNECTION, _Prepared())


class _Context(NamedTuple):
    adapters: AdaptersMap
    connection: psycopg.Connection[Any]


ON_CONNECTION = "_django_idempotency_pipeline"


def _session(connection: Any) -> _Session:
    session: _Session | None = vars(connection).get(ON_CONNECTION)
    inner = connection.connection
    encoding = inner.pgconn.parameter_status(b"client_encoding")
    if session is None or session.inner is not inner or session.encoding != encoding:
        session = vars(connection)[ON_CONNECTION] = _Session(connection, encoding)
    return session


def note_process(process: int, connection: Any) -> None:
    """Note that the server's ``process`` answered just now."""
    if not HAS_PSYCOPG:
        return
    session = _session(connection)
    prepared, pgconn = session.prepared, session.inner.pgconn
    prepared.direct_claims = (
        min(prepared.direct_claims + 1, THRESHOLD)
        if pgconn.backend_pid == process
        else 0
    )


REPLACED = ("cursor", "_cursor", "create_cursor", "_commit")


def _needs_cursor(connection: Any) -> bool:
    """Whether statements are watched or changed on their way.

    - psycopg is not the driver.
    - A tool or a backend changes every cursor, or COMMIT. That is how django-tenants
      sets the ``search_path``: without it, a claim would be made among another tenant's
      records.
    """
    if not HAS_PSYCOPG or not _has_djangos_cursors(connection.__class__):
        return True
    replaced = any(map(vars(connection).__contains__, REPLACED))
    watched = connection.force_debug_cursor or debug() or connection.execute_wrappers
    return bool(replaced or watched)


@lru_cache
def _has_djangos_cursors(backend: type) -> bool:
    ours = issubclass(backend, DatabaseWrapper)
    return ours and all(
        getattr(backend, name) is getattr(DatabaseWrapper, name) for name in REPLACED
    )


# --- The pipeline ---------------------------------------------------------------------


@dataclass(slots=True)
class _Call:
    """A statement with its values, encoded.

    ``key``: the statement, and the types of its parameters. ``name``: under which it is
    prepared, or will be now if ``is_new``. ``place``: that of its result.
    """

    key: tuple[str, tuple[int, ...]]
    parameters: Sequence[Any]
    formats: Any
    name: bytes | None = None
    is_new: bool = False
    place: int = 0


def _by_pipeline(
    statements: Sequence[Statement],
    connection: Any,
    session: _Session,
    *,
    begins: bool,
    commit: bool,
) -> Sent:
    committed: bool | None = False
    try:
        with session.inner.lock:
            calls = _encode(statements, session.transformer)
            _name(calls, session)
            committed = None if commit else False
            results = _send(calls, session.inner, begins=begins, commit=commit)
            if commit:
                committed = _has_committed(results[-1])
            return Sent(_read(calls, results, session), None, committed)
    except BaseException as error:
        # in the middle of the results, or by a signal's handler
        in_between = session.inner.pgconn.pipeline_status
        if in_between or not isinstance(error, psycopg.Error):
            break_off(connection)
        return Sent([], _as_djangos(error, connection), committed)


def _as_djangos(error: BaseException, connection: Any) -> BaseException:
    """Return the error of Django's that stands for one of psycopg's."""
    try:
        with connection.wrap_database_errors:
            raise error
    except BaseException as wrapped:
        return wrapped


def _encode(statements: Sequence[Statement], transformer: Any) -> list[_Call]:
    calls = []
    for statement, values in statements:
        parameters = transformer.dump_sequence(values, [PyFormat.AUTO] * len(values))
        key = statement, tuple(transformer.types or ())
        calls.append(_Call(key, parameters, transformer.formats))
    return calls


def _name(calls: Sequence[_Call], session: _Session) -> None:
    """Give each call the name of a prepared statement, which costs the server half as
    much, if that will be there when it is called.

    Behind a pooler in transaction mode it may not, or its name means another one: the
    next transaction may have another process.
    """
    prepared = session.prepared
    if (
        not session.may_prepare
        or prepared.discarded
        or prepared.direct_claims != THRESHOLD
    ):
        return
    for call in calls:
        call.name = prepared.names.get(call.key)
        if call.name is None and len(prepared.names) < MOST:
            call.name = f"django_idempotency_{next(prepared.numbers)}".encode()
            call.is_new = True


def _send(
    calls: Sequence[_Call], inner: Any, *, begins: bool, commit: bool
) -> list[pq.abc.PGresult]:
    """Send all ``calls``, and return a result for each message: BEGIN, preparations,
    calls, COMMIT.
    """
    pgconn, sent = inner.pgconn, 0
    pgconn.enter_pipeline_mode()
    if begins:
        # BEGIN, with the connection's isolation level
        pgconn.send_query_params(inner._get_tx_start_command(), None)
        sent += 1
    for call in calls:
        statement, types = call.key
        if call.is_new:
            pgconn.send_prepare(call.name, _numbered(statement), types)
            sent += 1
        call.place = sent
        if call.name is None:
            numbered = _numbered(statement)
            pgconn.send_query_params(numbered, call.parameters, types, call.formats)
        else:
            pgconn.send_query_prepared(call.name, call.parameters, call.formats)
        sent += 1
    if commit:
        pgconn.send_query_params(b"COMMIT", None)
    pgconn.pipeline_sync()
    results: list[pq.abc.PGresult] = inner.wait(_receive(inner))
    pgconn.exit_pipeline_mode()
    return results


def _receive(connection: psycopg.Connection[Any]) -> PQGen[list[pq.abc.PGresult]]:
    """Return a result for each statement, up to that of Sync."""
    pgconn, results = connection.pgconn, list[pq.abc.PGresult]()
    yield from generators.send(pgconn)
    while True:
        try:
            result = yield from generators.fetch(pgconn)
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


def _has_committed(result: pq.abc.PGresult) -> bool | None:
    """Return what the result of COMMIT tells; ``None`` for an error: a pooler may have
    sent it, which did not wait for the server.
    """
    if result.status == pq.ExecStatus.PIPELINE_ABORTED:
        return False
    return True if result.status in DONE else None


def _read(
    calls: Sequence[_Call], results: Sequence[pq.abc.PGresult], session: _Session
) -> list[Result]:
    """Return what the ``calls`` have found. Raises the first error."""
    for call in calls:
        if call.is_new and results[call.place - 1].status in DONE:
            session.prepared.names[call.key] = call.name
    # what follows an error is aborted
    if results[-1].status not in DONE:
        raise _first_error(results, session.inner, psycopg.Error) or AssertionError
    rows, transformer = [], session.transformer
    for call in calls:
        result = results[call.place]
        transformer.set_pgresult(result)
        row = transformer.load_row(0, tuple) if result.ntuples else None
        rows.append(Result(row, result.command_tuples or 0))
    transformer.set_pgresult(None)
    return rows


def _first_error(
    results: Sequence[pq.abc.PGresult],
    connection: psycopg.Connection[Any],
    kind: type[psycopg.Error],
) -> psycopg.Error | None:
    """Return the first error among ``results``: ``OperationalError`` if it is not of
    this ``kind``.
    """
    for result in results:
        if result.status not in DONE:
            error = error_from_result(result, connection.info.encoding)
            if error.sqlstate is None or not isinstance(error, kind):
                return psycopg.OperationalError(*error.args)
            return error
    return None


@lru_cache(maxsize=1024)
def _numbered(statement: str) -> bytes:
    first, *others = statement.split("%s")
    return (
        first + "".join(f"${number}{text}" for number, text in enumerate(others, 1))
    ).encode()
