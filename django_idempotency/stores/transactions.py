"""Transactions of this package: each is ended once, by one verb that tells what came of
it, and leaves a sound connection, whatever interrupts it.

.. code-block:: python

    transaction = Transaction("default", durable=True)
    transaction.begin()
    ...
    match transaction.commit_after(lambda send: send(INSERT, values)):
        case Committed(): ...
        case Undone(error): ...
        case InDoubt(error): ...
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from enum import Enum
from threading import get_ident
from typing import Any, Generic, NamedTuple, NoReturn, TypeVar

from django.db import Error, InterfaceError, OperationalError, connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.transaction import TransactionManagementError

from django_idempotency.reporting.logs import log
from django_idempotency.stores import pipeline
from django_idempotency.stores.django_state import (
    IN_ERROR,
    HandledErrors,
    discard,
    hooks_of,
    is_inconsistent,
    is_innermost,
    is_out_of_step,
    is_outermost,
    leave_committed,
    libpq_status,
    may_be_inside,
    replace_hooks,
)
from django_idempotency.values.exceptions import StoreUnavailable

T = TypeVar("T")
# Executes a statement, and returns its first row and how many it found or changed.
Send = Callable[[str, Sequence[Any]], pipeline.Result]

NOTE = "_django_idempotency_transaction"
SAVEPOINT = "django_idempotency"


class State(Enum):
    """``IN_DOUBT``: COMMIT was, or may have been, sent, and nothing is known of it."""

    NEW = "new"
    OPEN = "open"
    IN_DOUBT = "in doubt"
    COMMITTED = "committed"
    ROLLED_BACK = "rolled back"


class Committed(NamedTuple, Generic[T]):
    """The transaction is committed. ``result``: what its last write returned."""

    result: T

    def expect(self) -> T:
        return self.result


class Undone(NamedTuple):
    """Nothing of the transaction is committed, because of ``error``."""

    error: BaseException

    def expect(self) -> NoReturn:
        raise self.error


class InDoubt(NamedTuple):
    """COMMIT was sent, but got ``error`` for a reply. It may have taken place."""

    error: BaseException

    def expect(self) -> NoReturn:
        raise self.error


class _CommitFailed(Exception):
    """Leaves the last write, whose own reply was no error. Its cause is what COMMIT got
    for a reply.
    """


class Transaction:
    """A transaction of this package: ``begin()``, then ``commit_after(write)`` or
    ``roll_back()``. ``abort(error)`` ends one whose code was left by an error.

    An exception that a signal's handler raises (Celery's soft time limit, a worker's
    timeout) can strike between any two lines, even inside Django's own ``Atomic``. So
    the transaction is noted on its connection before it begins, and until it has ended.
    ``close()`` rolls back what is left of it. Nobody may be left to call that, so the
    next claim on the connection does: see ``recover()``.

    ``using``: the alias of the database. ``durable``: raise ``RuntimeError`` inside
    another block. ``owner``: the context of the run to which it belongs, if it is a
    run's.
    """

    def __init__(self, using: str, *, durable: bool = False) -> None:
        self.connection = connections[using]
        self.block = transaction.atomic(using=using, durable=durable)
        self.outermost = not self.connection.in_atomic_block
        self.owner: Any = None
        self.handled_errors: HandledErrors | None = None
        self.thread = get_ident()
        self.state = State.NEW
        self.has_savepoint = False

    def __repr__(self) -> str:
        return f"<Transaction on {self.connection.alias!r}: {self.state.value}>"

    def begin(self) -> None:
        outer: Transaction | None = getattr(self.connection, NOTE, None)
        if outer is None or not outer.is_left:
            setattr(self.connection, NOTE, self)
        self.state = State.OPEN
        try:
            self.block.__enter__()
        except BaseException:  # what a signal's handler raises need not be an Exception
            self.close()
            raise

    def outlive_handled_errors(self) -> None:
        """Have errors that are handled from now on undo no more than they would outside
        of the transaction.
        """
        if is_innermost(self.block, self.connection):
            self.handled_errors = HandledErrors(self.connection)

    @property
    def must_roll_back(self) -> bool:
        """Whether this can no longer be committed."""
        return (
            self.connection.get_rollback() or libpq_status(self.connection) == IN_ERROR
        )

    @property
    def has_failed(self) -> bool:
        """Whether an error of the database has undone writes that were not part of what
        failed, and would stand outside of a transaction.
        """
        return self.handled_errors is not None and (
            libpq_status(self.connection) == IN_ERROR
            or (self.must_roll_back and self.handled_errors.has_failed)
        )

    def behind_savepoint(self, work: Callable[[], bool]) -> bool:
        """Call ``work`` behind a savepoint, which the next call releases, and return
        what it returns.

        If that is false, or if it raises, its writes are rolled back, and its
        ``on_commit`` hooks are dropped. Each savepoint costs one message to the server:
        ``transaction.atomic()`` would send two statements by Django's cursors.

        Raises ``TransactionManagementError`` if ``work`` returns true but has left the
        transaction failed or marked for rollback, because nothing of it could be
        committed.
        """
        connection, hooks = self.connection, len(hooks_of(self.connection))
        release = (
            [(connection.ops.savepoint_commit_sql(SAVEPOINT), ())]
            if self.has_savepoint
            else []
        )
        pipeline.together(
            [*release, (connection.ops.savepoint_create_sql(SAVEPOINT), ())], connection
        ).expect()
        self.has_savepoint = True
        try:
            with transaction.atomic(using=connection.alias, savepoint=False):
                kept = work()
                if kept and self.must_roll_back:
                    raise TransactionManagementError(
                        "The transaction is marked for rollback."
                    )
        except BaseException:
            self._undo(hooks)
            raise
        if not kept:
            self._undo(hooks)
        return kept

    def _undo(self, hooks: int) -> None:
        connection, using = self.connection, self.connection.alias
        del hooks_of(connection)[hooks:]
        # else Django lets no statement through
        transaction.set_rollback(False, using=using)
        try:
            pipeline.execute(
                connection.ops.savepoint_rollback_sql(SAVEPOINT), (), connection
            )
        except BaseException as error:
            transaction.set_rollback(True, using=using)
            # the exception that ``work`` raised says more than an ``Error`` does
            if not isinstance(error, Error):
                raise

    def defer_hooks(self, report: Callable[[Exception], None]) -> Callable[[], None]:
        """Have every ``on_commit`` hook run, even if others raise. Errors go to
        ``report``.

        Django runs them when COMMIT returns, and skips the rest once one raises. Call
        this last inside the transaction. Return a function that runs the hooks that
        have not run yet, in case COMMIT took place without a response.
        """
        hooks: list[Callable[[], object]] = []

        def run() -> None:
            while hooks:
                hook = hooks.pop(0)
                try:
                    hook()
                except Exception as error:
                    report(error)

        hooks += replace_hooks(self.connection, run)
        return run

    # --- The end

    def commit_after(
        self, write: Callable[[Send], T]
    ) -> Committed[T] | Undone | InDoubt:
        """Call ``write``, then commit. If ``write`` raises, roll back.

        ``write`` may execute its last statement by the function that it is given. Where
        pipelines are possible, COMMIT goes to the server together with that statement.
        So the statement has to fail, rather than change nothing, if its transaction
        must not be committed.
        """
        try:
            result = write(self._send_last)
            self._commit()
            return Committed(result)
        except _CommitFailed as failed:
            return self.abort(failed.__cause__ or failed)
        except BaseException as error:
            return self.abort(error)

    def _send_last(self, statement: str, values: Sequence[Any]) -> pipeline.Result:
        if not is_outermost(self.block, self.connection):
            return pipeline.execute(statement, values, self.connection)
        self.state = State.IN_DOUBT
        sent = pipeline.together([(statement, values)], self.connection, commit=True)
        if sent.committed is None:
            raise _CommitFailed from sent.error
        self.state = State.COMMITTED if sent.committed else State.OPEN
        if sent.error is not None:
            raise sent.error
        return sent.results[0]

    def _commit(self) -> None:
        if self.state is State.OPEN:
            inside = self.connection.in_atomic_block
            if inside and not is_innermost(self.block, self.connection):
                raise TransactionManagementError(
                    "A transaction.atomic() block was entered and never left."
                )
            if self.must_roll_back:
                raise TransactionManagementError(
                    "The transaction is marked for rollback."
                )
        self._leave(None)

    def roll_back(self) -> None:
        """Roll back because that is wanted. Raises what keeps Django from doing so."""
        # an inner block was never left, or other code has closed the connection
        if is_innermost(self.block, self.connection):
            self._leave(GeneratorExit())
        else:
            self.close()

    def abort(self, error: BaseException) -> Undone | InDoubt:
        """Roll back because of ``error``, unless the transaction has ended. Return what
        is known of it.

        The error that is returned is ``StoreUnavailable`` if the database is
        unavailable by now, or what has struck meanwhile.
        """
        committing = self.state in (State.IN_DOUBT, State.COMMITTED)
        try:
            if is_innermost(self.block, self.connection) and self._is_noted:
                self._leave(error)
            else:
                self.close()
        except BaseException as raised:
            self.close()
            error = raised
        return InDoubt(error) if committing else Undone(error)

    def close(self) -> None:
        """Roll back if this was not ended, or not to its end."""
        if not self._is_noted or self.thread != get_ident():
            return
        if self.is_left and self.outermost:
            discard(self.connection)
        elif is_innermost(self.block, self.connection):
            self.block.__exit__(GeneratorExit, GeneratorExit(), None)
        self._forget()

    @property
    def is_left(self) -> bool:
        """Whether the connection is still inside."""
        if self.connection.in_atomic_block:
            return may_be_inside(self.block, self.connection)
        is_connected = self.outermost and self.connection.connection is not None
        return is_connected and (
            not self.connection.autocommit or is_out_of_step(self.connection)
        )

    @property
    def is_attended(self) -> bool:
        """Whether the view of its run is running, or its response is made, so that
        somebody is there to end it.
        """
        return self.owner is not None and bool(
            self.owner.running or self.owner.responding
        )

    def __enter__(self) -> Transaction:
        self.begin()
        return self

    def __exit__(
        self, _kind: Any, error: BaseException | None, _traceback: Any
    ) -> None:
        # else the garbage collector leaves a generator in another thread
        if self.thread == get_ident():
            self._leave(error)

    @property
    def _is_noted(self) -> bool:
        return getattr(self.connection, NOTE, None) is self

    def _leave(self, error: BaseException | None) -> None:
        """Leave Django's block: with COMMIT, unless it was sent already, or because of
        ``error`` with ROLLBACK.
        """
        try:
            if error is not None:
                self.block.__exit__(type(error), error, None)
            elif self.state is State.COMMITTED:
                leave_committed(self.connection)
            else:
                self.state = State.IN_DOUBT
                self.block.__exit__(None, None, None)
        except BaseException as raised:
            self.close()
            if error is not None and isinstance(
                raised, OperationalError | InterfaceError
            ):
                # Django could not connect again after a rollback on a broken
                # connection.
                raise StoreUnavailable(str(raised).strip()) from raised
            raise
        if error is not None:
            self.close()
            return
        self.state = State.COMMITTED
        if self._is_noted:
            self._forget()

    def _forget(self) -> None:
        if self.state is State.OPEN:
            self.state = State.ROLLED_BACK
        setattr(self.connection, NOTE, None)
        if self.handled_errors is not None:
            self.handled_errors.let_go()


def recover(connection: BaseDatabaseWrapper, *, attended: bool = False) -> None:
    """Roll back a transaction that nobody ended. Discard a connection on which no code
    can end one any more.

    ``attended``: also one that somebody was there to end, because its claim was struck.
    """
    left: Transaction | None = getattr(connection, NOTE, None)
    if left is not None and (attended or not left.is_attended):
        if left.is_left:
            claim = getattr(left.owner, "claim", None)
            log(
                logging.WARNING,
                "unended",
                "idempotency: a run was abandoned, and is rolled back",
                operation=claim and claim.operation,
            )
        left.close()
    if is_inconsistent(connection):
        discard(connection)
