"""Tables whose rows are on several servers. A wing that knows such a database registers it here.

A statement about one record goes to the server that has it. No statement can lock records of several servers. A
function that tells something about its server, such as the number of the transaction, tells it about the record's
server in a SELECT, and about the server that was asked in an UPDATE.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol
from uuid import UUID


class Sharding(Protocol):
    """What the core asks about the record's table in the database ``using``."""

    def is_distributed(self, using: str) -> bool:
        """Return whether the rows are on several servers, so that no statement can lock arbitrary ones.

        Raises Django's ``OperationalError`` if the database can't be reached.
        """

    def in_shards(self, ids: Collection[UUID], using: str) -> list[list[UUID]]:
        """Return ``ids`` in groups, each of which one statement can lock."""


_sharding: Sharding | None = None


def register(sharding: Sharding) -> None:
    """Use ``sharding`` for every database. Call this in the ``ready()`` of an app."""
    global _sharding
    _sharding = sharding


def is_distributed(using: str) -> bool:
    return _sharding is not None and _sharding.is_distributed(using)


def in_shards(ids: Collection[UUID], using: str) -> list[list[UUID]]:
    """Return ``ids`` in groups, each of which one statement can lock: all together unless the rows are distributed."""
    return _sharding.in_shards(ids, using) if _sharding and _sharding.is_distributed(using) else [list(ids)]
