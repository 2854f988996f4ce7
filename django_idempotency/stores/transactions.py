"""Transactions that leave a sound connection, whatever interrupts them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from threading import get_ident
from typing import Any

from django.db import Error, InterfaceError, OperationalError, connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.transaction import TransactionManagementError

from django_idempotency.reporting.logs import log
from django_idempotency.stores import pipeline
from django_idempotency.stores.handled_errors import (
    ACTIVE,
    IN_ERROR,
    HandledErrors,
    libpq_status,
)
from django_idempotency.values.exceptions import StoreUnavailable

NOTE = "_django_idempotency_transaction"
SAVEPOINT = "django_idempotency"


class Transaction:
    """A transaction of this package, which is ended explicitly: ``begin()``, then ``commit()`` or ``roll_back()``.

    An exception that a signal's handler raises (Celery's soft time limit, a worker's timeout) can strike between any
    two lines, even inside Django's own ``Atomic``. So the transaction is noted on its connection before it begins, and
    until it has ended. ``close()`` rolls back what is left of it. Nobody may be left to call that, so the next claim on
    the connection does: see ``recover()``.

    ``owner``: the context of the run to which it belongs, if it is a run's. ``committing``: COMMIT was sent, together
    with the write before it, and may have taken place; ``error`` is what came of it instead.
    """

    def __init__(self, using: str, *, durable: bool = False) -> None:
        self.connection = connections[using]
        self.block = transaction.atomic(using=using, durable=durable)
        self.outermost = not self.connection.in_atomic_block
        self.owner: Any = None
        self.handled_errors: HandledErrors | None = None
        self.thread = get_ident()
        self.ends = self.committing = self.has_savepoint = False
        self.error: BaseException | None = None

    def begin(self) -> None:
        if (outer := noted(self.connection)) is None or not outer.is_open:
            setattr(self.connection, NOTE, self)
        try:
            self.block.__enter__()
        except BaseException:  # what a signal's handler raises need not be an Exception
            self.close()
            raise

    def outlive_handled_errors(self) -> None:
        """Have errors that are handled from now on undo no more than they would outside of the transaction."""
        if self._is_innermost():
            self.handled_errors = HandledErrors(self.connection)

    @property
    def must_roll_back(self) -> bool:
        """Whether this can no longer be committed."""
        return (
            transaction.get_rollback(self.connection.alias)
            or libpq_status(self.connection) == IN_ERROR
        )

    def behind_savepoint(self, work: Callable[[], bool]) -> bool:
        """Call ``work`` behind a savepoint, which the next call releases, and return what it returns.

        If that is false, or if it raises, its writes are rolled back, and its ``on_commit`` hooks are dropped. Each
        savepoint costs one message to the server: ``transaction.atomic()`` would send two statements by Django's
        cursors.

        Raises ``TransactionManagementError`` if ``work`` returns true but has left the transaction failed or marked for
        rollback, because nothing of it could be committed.
        """
        connection, hooks = self.connection, len(self.connection.run_on_commit)
        release = (
            [(connection.ops.savepoint_commit_sql(SAVEPOINT), ())]
            if self.has_savepoint
            else []
        )
        pipeline.together(
            [*release, (connection.ops.savepoint_create_sql(SAVEPOINT), ())], connection
        )
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
        del connection.run_on_commit[hooks:]
        transaction.set_rollback(
            False, using=using
        )  # else Django lets no statement through
        try:
            pipeline.execute(
                connection.ops.savepoint_rollback_sql(SAVEPOINT), (), connection
            )
        except BaseException as error:
            transaction.set_rollback(True, using=using)
            if not isinstance(
                error, Error
            ):  # the exception that ``work`` raised says more than an ``Error`` does
                raise

    def take_over_hooks(
        self, report: Callable[[Exception], None]
    ) -> Callable[[], None]:
        """Have every hook run after COMMIT, even if others raise. Errors go to ``report``.

        Django runs them when COMMIT returns, and skips the rest once one raises. Call this last inside the transaction.
        Return a function that runs the hooks that have not run yet, in case COMMIT took place without a response.
        """
        connection, hooks = self.connection, list[Callable[[], object]]()

        def run() -> None:
            while hooks:
                hook = hooks.pop(0)
                try:
                    hook()
                except Exception as error:
                    report(error)

        if not connection.savepoint_ids:  # a test case's transaction runs none
            hooks += [entry[1] for entry in connection.run_on_commit]
            stand_in: Any = (set(), run, False)
            connection.run_on_commit = [stand_in] if hooks else []
        return run

    def end_with_next_write(self) -> None:
        """Let COMMIT go to the server together with the next write of a record, if a test case's does not enclose it.

        ``commit()`` has to be called all the same.
        """
        self.ends = self.outermost and self._is_innermost()

    def commit(self) -> None:
        """Commit, unless the transaction is marked for rollback. An error does not tell whether that took place."""
        if self.error is not None:
            self.abort(self.error)
            raise self.error
        if self.connection.in_atomic_block and not self._is_innermost():
            self.close()
            raise TransactionManagementError(
                "A transaction.atomic() block was entered and never left."
            )
        self._leave(None)

    def roll_back(self) -> None:
        if (
            not self._is_innermost()
        ):  # an inner block was never left, or other code has closed the connection
            return self.close()
        transaction.set_rollback(True, using=self.connection.alias)
        return self._leave(None)

    def abort(self, error: BaseException) -> None:
        """Roll back because of ``error``, which propagates, unless that is done.

        Raises ``StoreUnavailable`` if the database is unavailable by then. Nothing was committed.
        """
        if self._is_innermost() and noted(self.connection) is self:
            self._leave(error)
        else:
            self.close()

    def close(self) -> None:
        """Roll back if this was not ended, or not to its end."""
        if noted(self.connection) is not self or self.thread != get_ident():
            return
        if self.is_open and self.outermost:
            discard(self.connection)
        elif self._is_innermost():
            self.block.__exit__(GeneratorExit, GeneratorExit(), None)
        self._forget()

    @property
    def is_open(self) -> bool:
        if (
            self.connection.in_atomic_block
        ):  # without a block if an exception struck before that was noted
            blocks = self.connection.atomic_blocks
            return not blocks or any(block is self.block for block in blocks)
        is_connected = self.outermost and self.connection.connection is not None
        return is_connected and (
            not self.connection.autocommit or _is_out_of_step(self.connection)
        )

    @property
    def is_attended(self) -> bool:
        """Whether the view of its run is running, or its response is made, so that somebody is there to end it."""
        return self.owner is not None and bool(self.owner.running or self.owner.ending)

    def __enter__(self) -> Transaction:
        self.begin()
        return self

    def __exit__(
        self, _kind: Any, error: BaseException | None, _traceback: Any
    ) -> None:
        if (
            self.thread == get_ident()
        ):  # else the garbage collector leaves a generator in another thread
            self._leave(error)

    def _is_innermost(self) -> bool:
        blocks = self.connection.atomic_blocks
        return (
            self.connection.in_atomic_block
            and bool(blocks)
            and blocks[-1] is self.block
        )

    def _leave(self, error: BaseException | None) -> None:
        try:
            self.block.__exit__(None if error is None else type(error), error, None)
        except BaseException as raised:
            self.close()
            if error is not None and isinstance(
                raised, OperationalError | InterfaceError
            ):
                # Django could not connect again after a rollback on a broken connection.
                raise StoreUnavailable(str(raised).strip()) from raised
            raise
        if error is not None:
            self.close()
        elif noted(self.connection) is self:
            self._forget()

    def _forget(self) -> None:
        setattr(self.connection, NOTE, None)
        if self.handled_errors is not None:
            self.handled_errors.let_go()


def noted(connection: BaseDatabaseWrapper) -> Transaction | None:
    """Return the transaction of this package that began on ``connection`` and has not ended; ``None`` without one."""
    found: Transaction | None = getattr(connection, NOTE, None)
    return found


def ending(connection: BaseDatabaseWrapper) -> Transaction | None:
    """Return the transaction that is to end with the next write."""
    found = noted(connection)
    return found if found is not None and found.ends else None


def recover(connection: BaseDatabaseWrapper) -> None:
    """Roll back a transaction that nobody ended. Discard a connection on which no code can end one any more."""
    left = noted(connection)
    if left is not None and not left.is_attended:
        if left.is_open:
            log(
                logging.WARNING,
                "unended",
                "idempotency: a run was abandoned, and is rolled back",
            )
        left.close()
    if _is_inconsistent(connection):
        discard(connection)


def _is_inconsistent(connection: BaseDatabaseWrapper) -> bool:
    """Whether an exception has struck inside Django's own code, so that it is in a block without having noted which."""
    if connection.in_atomic_block:
        return not connection.atomic_blocks
    return _is_out_of_step(connection) or (
        not connection.autocommit and libpq_status(connection) == ACTIVE
    )


def _is_out_of_step(connection: BaseDatabaseWrapper) -> bool:
    """Whether Django and the driver disagree about autocommit, because an exception struck between their notes of it.

    What Django takes for committed would be rolled back. SQLite's driver only notes whether a transaction is open.
    """
    driver: Any = connection.connection
    if driver is None or connection.vendor not in ("postgresql", "mysql", "sqlite"):
        return False
    if connection.vendor == "sqlite":
        return bool(
            connection.autocommit
            and driver.in_transaction
            and not connection.in_atomic_block
        )
    stated = (
        driver.get_autocommit
        if hasattr(driver, "get_autocommit")
        else driver.autocommit
    )
    autocommit: bool = stated() if callable(stated) else stated
    return autocommit != connection.autocommit


def discard(connection: BaseDatabaseWrapper) -> None:
    """Close a connection, whatever block it claims to be in. The server rolls back its open transaction."""
    connection.in_atomic_block = connection.closed_in_transaction = False
    with suppress(Error):
        connection.close()
    connection.connection = None
