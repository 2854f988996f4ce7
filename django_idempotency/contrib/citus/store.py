"""Records that Citus distributes by ``id`` over several servers.

A statement about one record goes to the server that has it. No statement can lock
records of several shards. A function that tells something about its server, such as the
number of the transaction, tells it about the record's server in a SELECT, and about the
server that was asked in an UPDATE.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from contextlib import nullcontext
from typing import Any
from uuid import UUID

from django.apps import apps
from django.core.exceptions import ImproperlyConfigured
from django.db import NotSupportedError, ProgrammingError, connections
from django.db.models import BooleanField, Value

from django_idempotency import Policy
from django_idempotency.extending.stores import (
    PARTITIONED,
    TRANSACTION,
    Claimed,
    DatabaseOptions,
    DatabaseStore,
    IdempotencyRecord,
    PostgreSQLStore,
    Transaction,
    execute,
    store_errors,
)

APP = "django_idempotency.contrib.citus"
TABLE = IdempotencyRecord._meta.db_table

OWN_TRANSACTION = f"SELECT {TRANSACTION} AS transaction"
ANY_ROWS = f"SELECT id FROM {TABLE} LIMIT 0 FOR NO KEY UPDATE"
# Always in the same order, so that two callers that lock these groups can't wait for
# each other.
BY_SHARD = f"""
SELECT array_agg(id ORDER BY id) FROM (
    SELECT id, get_shard_id_for_distribution_column('{TABLE}', id) AS shard
        FROM unnest(%s::uuid[]) AS id
) AS placed GROUP BY shard ORDER BY shard
"""

_distributed: dict[str, bool] = {}


class CitusStore(PostgreSQLStore):
    """A store in a database where Citus distributes the records. Name this class in
    ``STORES``.

    It locks the records of several shards one shard after the other, and asks for the
    number of its transaction in a statement of its own. Claims are records: each server
    has advisory locks of its own.
    """

    @classmethod
    def configure(cls, **options: Any) -> DatabaseOptions:
        if not apps.is_installed(APP):  # maintenance has to know of the shards, too
            raise ImproperlyConfigured(
                f"{cls.__name__} needs {APP!r} in INSTALLED_APPS."
            )
        return super().configure(**options)

    @classmethod
    def unfit_for(cls, policy: Policy, alias: str) -> str | None:
        if not policy.claims_by_lock:
            return super().unfit_for(policy, alias)
        return (
            f'claim is "lock", but the records in the store {alias!r} ({cls.__name__})'
            " are on several servers, each with advisory locks of its own; leave"
            ' claim="lock" out of Atomic(…).'
        )

    def objections(self) -> Iterable[str]:
        if self._ask(PARTITIONED, ()) == (True,):
            yield (
                f"In the database {self.name!r} a key can be claimed twice: the table"
                " is partitioned, and its rows are on several servers."
            )

    def renew(self, claims: Iterable[Claimed]) -> set[UUID]:
        renewed: set[UUID] = set()
        for part in self._by_shard(claims):
            renewed |= super().renew(part)
        return renewed

    def lock(self, claim: Claimed) -> Claimed | None:
        locked = super().lock(claim)
        return locked and self._in_transaction([locked])[0]

    def lock_many(self, claims: Sequence[Claimed]) -> list[Claimed]:
        locked: list[Claimed] = []
        for part in self._by_shard(claims):
            locked += super().lock_many(part)
        return self._in_transaction(locked) if locked else []

    def _by_shard(self, claims: Iterable[Claimed]) -> list[list[Claimed]]:
        by_id = {claim.id: claim for claim in claims}
        with store_errors():
            return [[by_id[id] for id in part] for part in in_shards(by_id, self.name)]

    def _in_transaction(self, locked: Sequence[Claimed]) -> list[Claimed]:
        """Return the claims with the number of this transaction, instead of that on the
        server of their records.
        """
        (number,) = self._ask(OWN_TRANSACTION, ())
        return [
            claim.with_receipt(claim.receipt._replace(transaction=number))
            for claim in locked
        ]

    # The numbers of transactions are compared in the WHERE of a statement or by one of
    # its own, and COMMIT is not sent along: the guard in ``PostgreSQLStore``'s writes
    # would be evaluated on the server of the record.

    def _end_owned(self, statement: str, values: Any, claim: Claimed) -> bool:
        return self._owned(statement, values, claim) is not None

    def _end_many(self, statement: str, values: Any, count: int) -> int:
        with store_errors():
            return execute(statement, values, self.connection).rows

    def _was_committed(self, claim: Claimed) -> Any:
        return Value(self._has_committed(claim), output_field=BooleanField())

    def count_replays(self, counts: dict[UUID, int]) -> None:
        DatabaseStore.count_replays(self, counts)  # one by one


def is_distributed(using: str) -> bool:
    """Return whether the rows are on several servers, so that no statement can lock
    arbitrary ones.

    Each process tries this once. False if there is no such table. Raises Django's
    ``OperationalError`` if the database can't be reached.
    """
    if using not in _distributed:
        _distributed[using] = connections[
            using
        ].vendor == "postgresql" and not _locks_any(using)
    return _distributed[using]


def _locks_any(using: str) -> bool:
    connection = connections[using]
    # Without a transaction, there is nothing to protect from the error. A pooler in
    # statement mode refuses one.
    block = Transaction(using) if connection.in_atomic_block else nullcontext()
    try:
        with block, connection.cursor() as cursor:
            cursor.execute(ANY_ROWS)
    except NotSupportedError:
        return False
    except ProgrammingError:  # no such table, or not for this role
        return True
    return True


def in_shards(ids: Collection[UUID], using: str) -> list[Collection[UUID]]:
    """Return ``ids`` in groups, each of which one statement can lock: one group unless
    they are distributed.
    """
    if not is_distributed(using):
        return [ids]
    with connections[using].cursor() as cursor:
        cursor.execute(BY_SHARD, [list(ids)])
        return [found for (found,) in cursor.fetchall()]
