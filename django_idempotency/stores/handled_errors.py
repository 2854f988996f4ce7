"""Have an error that a view handles undo no more than it would outside of the business transaction.

Django marks the open block for rollback when ``save()`` or ``delete()`` raises, whatever the error is, and lets no
statement through until the block has ended.
"""

from __future__ import annotations

from typing import Any

from django.db import DatabaseError, DataError, IntegrityError
from django.db.backends.base.base import BaseDatabaseWrapper

# libpq's statuses: in the middle of a statement; in a transaction; in one that can only be rolled back; lost.
# https://www.postgresql.org/docs/current/libpq-status.html#LIBPQ-PQTRANSACTIONSTATUS
ACTIVE, IN_TRANSACTION, IN_ERROR, LOST = 1, 2, 3, 4
HOOKS = (
    "get_rollback",
    "savepoint_commit",
    "savepoint_rollback",
    "set_rollback",
    "validate_no_broken_transaction",
)


def libpq_status(connection: BaseDatabaseWrapper) -> int | None:
    """Return the status of the connection's transaction, as psycopg tells it; ``None`` for other drivers.

    In a pipeline it is ``ACTIVE``: an exception may have left one between its statements.
    """
    driver: Any = getattr(connection.connection, "pgconn", None)
    return driver and (ACTIVE if driver.pipeline_status else driver.transaction_status)


class _NoSavepoint:
    """Stands for the savepoint of a block that wants none, so that Django tells how the block has ended."""

    def __bool__(self) -> bool:
        return False


# Note [Marks for rollback]
# ~~~~~~~~~~~~~~~~~~~~~~~~~
# The business transaction is marked by
# - set_rollback(True). That is final.
# - the failure of a block inside it, if the block can't be rolled back by itself. That is final, too, unless the block
#   has executed nothing. bulk_create(), most delete() and save() of a model with a parent's table are blocks without a
#   savepoint.
# - save(), update() or delete() of one statement, and Django notes the error in rollback_exc. Nothing is half done, so
#   the mark is removed while the server's transaction is sound.
# Blocks with a savepoint are Django's affair: outside of a transaction, they would be rolled back, too.
class HandledErrors(list[Any]):
    """The blocks that are open on a connection. It replaces Django's own list, to learn of those that begin.

    ``final``: the mark stays. ``executed``: a statement was, since the last block began.
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

    def unmark(self) -> None:
        """Remove the mark of an error that has left the business transaction as it was."""
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
    """Whether ``error`` has undone nothing but its own statement. PostgreSQL tells; elsewhere, the error does."""
    status = libpq_status(connection)
    if status is not None:
        return status == IN_TRANSACTION
    return isinstance(error, IntegrityError | DataError) or not isinstance(
        error.__cause__, connection.Database.Error
    )
