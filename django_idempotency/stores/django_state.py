"""What Django and psycopg keep for themselves about a connection: in which blocks it
is, and how its transaction stands.

No other module touches these attributes, which are private. CI tests them with Django
5.2, 6.0 and 6.1, and with psycopg 3.2 and 3.3.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from threading import Lock, get_ident
from typing import Any

from django.db import DatabaseError, DataError, Error, IntegrityError
from django.db.backends.base.base import BaseDatabaseWrapper

# libpq's statuses: outside of a transaction; in the middle of a statement; in a
# transaction; in one that can only be rolled back; lost.
# https://www.postgresql.org/docs/current/libpq-status.html#LIBPQ-PQTRANSACTIONSTATUS
IDLE, ACTIVE, IN_TRANSACTION, IN_ERROR, LOST = range(5)


def libpq_status(connection: BaseDatabaseWrapper) -> int | None:
    """Return the status of the connection's transaction, as psycopg tells it; ``None``
    for other drivers.

    In a pipeline it is ``ACTIVE``: an exception may have left one between its
    statements.
    """
    driver: Any = getattr(connection.connection, "pgconn", None)
    return driver and (ACTIVE if driver.pipeline_status else driver.transaction_status)


def expect_usable(connection: Any) -> None:
    """Connect, or raise what a cursor of Django's would raise. Inside a block, that the
    connection is healthy was asked when the block began.
    """
    if connection.connection is None or not connection.in_atomic_block:
        connection.close_if_health_check_failed()
        connection.ensure_connection()
    if connection._thread_ident != get_ident():
        connection.validate_thread_sharing()
    if connection.needs_rollback:
        connection.validate_no_broken_transaction()


# --- The blocks of a connection -------------------------------------------------------


def is_innermost(block: Any, connection: BaseDatabaseWrapper) -> bool:
    """Whether ``block`` is the one that would be left next."""
    blocks = connection.atomic_blocks
    return connection.in_atomic_block and bool(blocks) and blocks[-1] is block


def may_be_inside(block: Any, connection: BaseDatabaseWrapper) -> bool:
    """Whether the connection is in ``block``, or in one that was not noted because an
    exception struck before that.
    """
    blocks = connection.atomic_blocks
    return connection.in_atomic_block and (
        not blocks or any(each is block for each in blocks)
    )


def in_transaction_of_others(connection: BaseDatabaseWrapper) -> bool:
    """Whether a transaction is open, or would be with the next statement, that is not a
    test case's.
    """
    if connection.in_atomic_block:
        blocks = connection.atomic_blocks
        return not all(getattr(block, "_from_testcase", False) for block in blocks)
    if connection.connection is None:
        return not connection.settings_dict["AUTOCOMMIT"]
    return not connection.autocommit


def is_outermost(block: Any, connection: BaseDatabaseWrapper) -> bool:
    """Whether ``block`` is the only one, and Django is to commit when it is left."""
    blocks = connection.atomic_blocks
    is_inside = connection.in_atomic_block and not connection.savepoint_ids
    return is_inside and bool(blocks) and blocks[-1] is block


def leave_committed(connection: BaseDatabaseWrapper) -> None:
    """Leave the outermost block as ``Atomic.__exit__`` does, but for COMMIT, which the
    server has confirmed.
    """
    connection.atomic_blocks.pop()
    connection.in_atomic_block = connection.errors_occurred = False
    connection.run_commit_hooks_on_set_autocommit_on = True
    connection.set_autocommit(True)


def is_out_of_step(connection: BaseDatabaseWrapper) -> bool:
    """Whether Django and the driver disagree about autocommit, because an exception
    struck between their notes of it.

    What Django takes for committed would be rolled back. SQLite's driver only notes
    whether a transaction is open.
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


def is_inconsistent(connection: BaseDatabaseWrapper) -> bool:
    """Whether an exception has struck inside Django's own code, so that no code can end
    the transaction any more.
    """
    if connection.in_atomic_block:
        return not connection.atomic_blocks
    return is_out_of_step(connection) or (
        not connection.autocommit and libpq_status(connection) == ACTIVE
    )


def discard(connection: BaseDatabaseWrapper) -> None:
    """Close a connection, whatever block it claims to be in. The server rolls back its
    open transaction.
    """
    connection.in_atomic_block = connection.closed_in_transaction = False
    with suppress(Error):
        connection.close()
    connection.connection = None


def break_off(connection: Any) -> None:
    """Close psycopg's connection in the middle of its statements. Nobody can tell what
    the next results would belong to.

    Its lock may still be held, and a rollback would wait for it.
    """
    connection.errors_occurred = True
    connection.connection.pgconn.finish()
    connection.connection.lock = Lock()


# --- What runs after COMMIT -----------------------------------------------------------


def hooks_of(connection: Any) -> list[Any]:
    """Return Django's own list of the ``on_commit`` hooks so far."""
    hooks: list[Any] = connection.run_on_commit
    return hooks


def replace_hooks(connection: Any, run: Callable[[], None]) -> list[Callable[[], Any]]:
    """Return the ``on_commit`` hooks so far, and have Django call ``run`` in their
    place; none in a test case's transaction, which runs none.
    """
    if connection.savepoint_ids or not connection.run_on_commit:
        return []
    hooks = [hook for _ids, hook, _robust in connection.run_on_commit]
    connection.run_on_commit = [(set(), run, False)]
    return hooks


# --- Errors that a view handles -------------------------------------------------------
#
# They undo no more than they would outside of the business transaction. Django marks
# the open block for rollback when ``save()`` or ``delete()`` raises, whatever the error
# is, and lets no statement through until the block has ended.

HOOKS = (
    "get_rollback",
    "savepoint_commit",
    "savepoint_rollback",
    "set_rollback",
    "validate_no_broken_transaction",
)


class _NoSavepoint:
    """Stands for the savepoint of a block that wants none, so that Django tells how the
    block has ended.
    """

    def __bool__(self) -> bool:
        return False


# Note [Marks for rollback]
# ~~~~~~~~~~~~~~~~~~~~~~~~~
# The business transaction is marked by
# - set_rollback(True). That is final.
# - the failure of a block inside it, if the block can't be rolled back by itself. That
#   is final, too, unless the block has executed nothing. bulk_create(), most delete()
#   and save() of a model with a parent's table are blocks without a savepoint.
# - save(), update() or delete() of one statement, and Django notes the error in
#   rollback_exc. Nothing is half done, so the mark is removed while the server's
#   transaction is sound. Blocks with a savepoint are Django's affair: outside of a
#   transaction, they would be rolled back, too.
class HandledErrors(list[Any]):
    """The blocks that are open on a connection. It replaces Django's own list, to learn
    of those that begin.

    ``final``: the mark stays. ``executed``: a statement was, since the last block
    began.
    """

    def __init__(self, connection: Any) -> None:
        super().__init__(connection.atomic_blocks)
        self.connection = connection
        self.block = self[-1]
        self.depth = len(connection.savepoint_ids)
        self.final = self.executed = False
        connection.atomic_blocks, connection.rollback_exc = self, None
        for name in HOOKS:
            setattr(connection, name, getattr(self, name))

    def let_go(self) -> None:
        for name in HOOKS:
            vars(self.connection).pop(name, None)

    @property
    def is_innermost(self) -> bool:
        return (
            self.connection.atomic_blocks is self
            and bool(self)
            and self[-1] is self.block
        )

    @property
    def has_failed(self) -> bool:
        """Whether the last error that marked the transaction is the database's."""
        return isinstance(self.connection.rollback_exc, DatabaseError)

    def unmark(self) -> None:
        """Remove the mark of an error that has left the business transaction as it
        was.
        """
        connection, error = self.connection, self.connection.rollback_exc
        if (
            not connection.needs_rollback
            or error is None
            or self.final
            or not self.is_innermost
        ):
            return
        if is_sound(connection, error):
            connection.needs_rollback, connection.rollback_exc = False, None

    # --- Called by Django

    def append(self, block: Any) -> None:
        if self.is_innermost:
            self.unmark()
            ids = self.connection.savepoint_ids
            if ids[-1] is None and not self.connection.needs_rollback:
                ids.pop()
                ids.append(
                    self.connection.savepoint() if block.savepoint else _NoSavepoint()
                )
            self.executed = False
        super().append(block)

    def savepoint_commit(self, sid: Any) -> None:
        if not isinstance(sid, _NoSavepoint):
            type(self.connection).savepoint_commit(self.connection, sid)

    def savepoint_rollback(self, sid: Any) -> None:
        try:
            if not isinstance(sid, _NoSavepoint):
                type(self.connection).savepoint_rollback(self.connection, sid)
            elif self.executed:
                raise DatabaseError("The block that failed has no savepoint.")
        except BaseException:
            self.final = True
            raise
        self.connection.run_on_commit = [
            hook for hook in self.connection.run_on_commit if sid not in hook[0]
        ]

    def get_rollback(self) -> bool:
        self.unmark()
        marked: bool = type(self.connection).get_rollback(self.connection)
        return marked

    def set_rollback(self, rollback: bool) -> None:
        type(self.connection).set_rollback(self.connection, rollback)
        if not any(self.connection.savepoint_ids[self.depth :]):
            self.final = rollback

    def validate_no_broken_transaction(self) -> None:
        self.unmark()
        type(self.connection).validate_no_broken_transaction(self.connection)
        self.executed = True


def is_sound(connection: Any, error: BaseException) -> bool:
    """Whether ``error`` has undone nothing but its own statement. PostgreSQL tells;
    elsewhere, the error does.
    """
    status = libpq_status(connection)
    if status is not None:
        return status == IN_TRANSACTION
    return isinstance(error, IntegrityError | DataError) or not isinstance(
        error.__cause__, connection.Database.Error
    )
