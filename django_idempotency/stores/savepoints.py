"""Savepoints that follow each other in one transaction."""

from __future__ import annotations

from collections.abc import Callable

from django.db import Error, connections, transaction

from django_idempotency.stores import drivers

SID = "django_idempotency"


class Savepoints:
    """Runs functions in the open transaction of ``using``, each behind a savepoint that the next one releases.

    Each costs one message to the server. ``transaction.atomic()`` would send two statements by Django's cursors.
    """

    def __init__(self, using: str, must_roll_back: Callable[[], bool]) -> None:
        self.using = using
        self.must_roll_back = must_roll_back
        self.connection = connections[using]
        self.began = False

    def run(self, work: Callable[[], None]) -> None:
        """Call ``work``. If it raises, its writes are rolled back, and its ``on_commit`` hooks are dropped.

        Raises ``TransactionManagementError`` if ``work`` returns but has left the transaction failed or marked for
        rollback, because nothing of it could be committed.
        """
        hooks = len(self.connection.run_on_commit)
        self._begin()
        try:
            with transaction.atomic(using=self.using, savepoint=False):
                work()
                if self.must_roll_back():
                    raise transaction.TransactionManagementError("The transaction is marked for rollback.")
        except BaseException:
            self._undo(hooks)
            raise

    def _begin(self) -> None:
        operations = self.connection.ops
        release = [operations.savepoint_commit_sql(SID)] if self.began else []
        drivers.send([*release, operations.savepoint_create_sql(SID)], self.connection)
        self.began = True

    def _undo(self, hooks: int) -> None:
        del self.connection.run_on_commit[hooks:]
        transaction.set_rollback(False, using=self.using)  # else Django lets no statement through
        try:
            drivers.send([self.connection.ops.savepoint_rollback_sql(SID)], self.connection)
        except BaseException as error:
            transaction.set_rollback(True, using=self.using)
            if not isinstance(error, Error):  # the exception that ``work`` raised says more than an ``Error`` does
                raise
