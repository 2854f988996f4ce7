"""Transactions that leave a sound connection, whatever interrupts them, and the business transaction's hooks."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from contextlib import suppress
from threading import get_ident
from traceback import clear_frames
from typing import Any

from django.db import Error, connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper

from django_idempotency.stores.connections import in_foreign_transaction


class atomic:  # as Django's
    """Open ``transaction.atomic()``, and discard the connection if the block is left half way.

    An exception that a signal's handler raises (Celery's soft time limit, a worker's timeout) can strike inside
    Django's own ``__enter__`` and ``__exit__``, which then leave a transaction open that no code will end.

    A block that is never left is rolled back with the last reference to it, but only by its own thread, and only while
    it is the innermost one. A generator would be left by whatever thread the garbage collector runs in, and would end
    that thread's transaction.
    """

    thread: int | None = None  # none until there is a block to leave

    def __init__(self, using: str, *, durable: bool = False) -> None:
        self.connection = connections[using]
        self.outermost = not self.connection.in_atomic_block
        self.block = transaction.atomic(using=using, durable=durable)
        self.thread = get_ident()

    def __enter__(self) -> None:
        try:
            self.block.__enter__()
        except BaseException:  # what a signal's handler raises need not be an Exception
            self._discard_if_half_way()
            raise

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        if self.thread != get_ident():
            return
        try:
            self.block.__exit__(kind, error, traceback)
        except BaseException:
            self._discard_if_half_way()
            raise
        if kind is not None:
            self._discard_if_half_way()

    def __del__(self) -> None:
        if self.thread == get_ident() and self.connection.in_atomic_block and self._is_innermost():
            self.__exit__(GeneratorExit, GeneratorExit(), None)

    def _is_innermost(self) -> bool:
        blocks = self.connection.atomic_blocks
        return bool(blocks) and blocks[-1] is self.block

    def _discard_if_half_way(self) -> None:
        if self.outermost and _is_half_way(self.connection):
            discard(self.connection)


def _is_half_way(connection: BaseDatabaseWrapper) -> bool:
    if connection.in_atomic_block or connection.connection is None:
        return connection.in_atomic_block
    return not connection.autocommit or _is_out_of_step(connection)


def roll_back_left_open(connection: BaseDatabaseWrapper, error: BaseException) -> None:
    """Roll back the transaction of a block if ``error`` kept it from being left.

    An exception from a signal's handler can strike on the way into the exit of a block. The transaction is still open
    then, and a look at the record on this connection would take uncommitted changes for committed ones.
    """
    if in_foreign_transaction(connection):
        clear_frames(error.__traceback__)  # the frames hold the block, and would have it left at some later time
    if in_foreign_transaction(connection):
        discard(connection)


# --- Connections that were left inside a transaction ------------------------------------------------------------------

# References by the connection's list of blocks, and by the argument of getrefcount().
UNREFERENCED = 2
# libpq's statuses: in the middle of a statement; in a transaction that can only be rolled back.
# https://www.postgresql.org/docs/current/libpq-status.html#LIBPQ-PQTRANSACTIONSTATUS
ACTIVE, IN_ERROR = 1, 3


def discard_if_abandoned(connection: BaseDatabaseWrapper) -> None:
    """Discard a connection that is in a transaction that no code can end any more.

    A reference cycle, such as of an exception and the frames of its traceback, may be all that holds a block. So cycles
    are collected before a claim is refused because of a block.
    """
    if connection.in_atomic_block and in_foreign_transaction(connection) and not _is_abandoned(connection):
        gc.collect()
    if _is_abandoned(connection):
        discard(connection)


def _is_abandoned(connection: BaseDatabaseWrapper) -> bool:
    if not connection.in_atomic_block:
        return _is_out_of_step(connection) or (not connection.autocommit and libpq_status(connection) == ACTIVE)
    blocks = connection.atomic_blocks
    return all(sys.getrefcount(blocks[place]) <= UNREFERENCED for place in range(len(blocks)))


def _is_out_of_step(connection: BaseDatabaseWrapper) -> bool:
    """Whether Django and the driver disagree about autocommit, because an exception struck between their notes of it.

    What Django takes for committed would be rolled back. SQLite's driver only notes whether a transaction is open.
    """
    driver: Any = connection.connection
    if driver is None or connection.vendor not in ("postgresql", "mysql", "sqlite"):
        return False
    if connection.vendor == "sqlite":
        return bool(connection.autocommit and driver.in_transaction and not connection.in_atomic_block)
    told = driver.get_autocommit if hasattr(driver, "get_autocommit") else driver.autocommit
    autocommit: bool = told() if callable(told) else told
    return autocommit != connection.autocommit


def libpq_status(connection: BaseDatabaseWrapper) -> int | None:
    """Return the status of the connection's transaction, as psycopg tells it; ``None`` for other drivers."""
    info = getattr(connection.connection, "info", None)
    return getattr(info, "transaction_status", None)


def discard(connection: BaseDatabaseWrapper) -> None:
    """Close a connection, whatever block it claims to be in. The server rolls back its open transaction."""
    connection.in_atomic_block = connection.closed_in_transaction = False
    with suppress(Error):
        connection.close()
    connection.connection = None


# --- Hooks -----------------------------------------------------------------------------------------------------------


class CommitHooks:
    """The hooks to run once a transaction is committed. Each runs once, and one that raises does not stop the next.

    Django runs hooks when COMMIT returns, and skips the rest once one raises. ``run()`` runs them if COMMIT took place
    but its response was lost.
    """

    def __init__(self, connection: BaseDatabaseWrapper, report: Callable[[Exception], None]) -> None:
        """Take the place of the hooks of the outermost block of ``connection``. A test case's transaction runs none."""
        self.report = report
        self.hooks: list[Callable[[], object]] = []
        if not connection.savepoint_ids and connection.run_on_commit:
            self.hooks = [entry[1] for entry in connection.run_on_commit]
            stand_in: Any = (set(), self.run, False)
            connection.run_on_commit = [stand_in]

    def run(self) -> None:
        """Run the hooks that have not run yet."""
        while self.hooks:
            hook = self.hooks.pop(0)
            try:
                hook()
            except Exception as error:
                self.report(error)
