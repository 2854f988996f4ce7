"""What a database that calls itself PostgreSQL can do: tried out, not taken from its name.

Citus, YugabyteDB, CockroachDB and Aurora DSQL all have Django's vendor ``postgresql``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from uuid import UUID, uuid4

from django.db import Error, connections
from django.db.backends.base.base import BaseDatabaseWrapper

from django_idempotency.models import IdempotencyRecord
from django_idempotency.stores.claim_function import KEY_LOCKS, is_partitioned
from django_idempotency.stores.distribution import is_distributed

TABLE = IdempotencyRecord._meta.db_table

CLAIM = """
SELECT place FROM django_idempotency_claim(
    %s, '', 'probe', '', '', '', %s, NULL, 'lease', false, interval '1 s', interval '1 s', interval '1 s'
) WHERE claimed IS NOT NULL
"""
AT_PLACE = f"SELECT count(*) FROM {TABLE} WHERE ctid = %s AND id = %s"
KEY_LOCK = f"SELECT pg_try_advisory_xact_lock({KEY_LOCKS}, uuid_hash(%s))"
ROW_LOCK = f"SELECT id FROM {TABLE} WHERE id = %s FOR NO KEY UPDATE SKIP LOCKED"
# Already past its time, so that a cleanup deletes it if this process dies.
RECORD = f"""
INSERT INTO {TABLE} (
    id, scope, key, method, path, fingerprint, mode, status, created_at, updated_at, expires_at, purge_at
) VALUES (%s, '', 'probe', '', '', '', 'lease', 'failed', {", ".join(["statement_timestamp()"] * 4)})
"""
NO_RECORD = f"DELETE FROM {TABLE} WHERE id = %s"


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What was seen to work.

    ``function``: the role can claim by the function. ``place``: a row's ``ctid`` leads to it. ``key_locks``,
    ``row_locks``: while one connection holds the advisory lock of a key, or the lock of a row, another one is refused
    it; ``None`` if the role may write no row to try it on. ``partitioned``: the table is partitioned.
    ``distributed``: its rows are on several servers, each with advisory locks of its own.
    """

    function: bool
    place: bool
    key_locks: bool
    row_locks: bool | None
    partitioned: bool
    distributed: bool = False

    @property
    def unique(self) -> bool:
        """Whether a key is claimed once at most. A constraint ensures it in a plain table, else the function does."""
        return not self.partitioned or (self.function and self.key_locks and not self.distributed)


def probe(using: str) -> Capabilities:
    """Find out what the database ``using`` can do, on two separate connections. Meanwhile it has one more record.

    Raises Django's ``OperationalError`` if it can't be reached.
    """
    with _connection(using) as first, _connection(using) as second:
        place = _tried(first, lambda: _claims(first))
        return Capabilities(
            function=place is not None,
            place=place is True,
            key_locks=_excludes(first, second, KEY_LOCK, uuid4()),
            row_locks=_locks_rows(first, second),
            partitioned=is_partitioned(first),
            distributed=is_distributed(using),
        )


@contextmanager
def _connection(using: str) -> Iterator[BaseDatabaseWrapper]:
    """Yield a connection outside of any transaction or pool of this thread."""
    own = connections[using].copy()
    own.settings_dict["OPTIONS"] = {k: v for k, v in own.settings_dict["OPTIONS"].items() if k != "pool"}
    try:
        own.ensure_connection()
        yield own
    finally:
        own.close()


def _tried(connection: BaseDatabaseWrapper, what: Callable[[], bool]) -> bool | None:
    """Return what ``what`` returns, or ``None`` if the database refuses. Everything is rolled back."""
    connection.set_autocommit(False)
    try:
        return what()
    except Error:
        return None
    finally:
        connection.rollback()
        connection.set_autocommit(True)


def _claims(connection: BaseDatabaseWrapper) -> bool:
    """Claim by the function; return whether the row is at the place that the function returned."""
    id = uuid4()
    with connection.cursor() as cursor:
        cursor.execute(CLAIM, [id, uuid4()])
        (place,) = cursor.fetchone()
        cursor.execute(AT_PLACE, [place, id])
        return bool(cursor.fetchone()[0])


def _locks_rows(first: BaseDatabaseWrapper, second: BaseDatabaseWrapper) -> bool | None:
    id = uuid4()
    with first.cursor() as cursor:
        try:
            cursor.execute(RECORD, [id])
        except Error:
            return None
    try:
        return _excludes(first, second, ROW_LOCK, id)
    finally:
        with first.cursor() as cursor:
            cursor.execute(NO_RECORD, [id])


def _excludes(first: BaseDatabaseWrapper, second: BaseDatabaseWrapper, lock: str, what: UUID) -> bool:
    """Return whether the second connection is refused what the first one has locked."""

    def is_refused() -> bool:
        return _has(first, lock, what) and _tried(second, lambda: _has(second, lock, what)) is False

    return _tried(first, is_refused) is True


def _has(connection: BaseDatabaseWrapper, lock: str, what: UUID) -> bool:
    with connection.cursor() as cursor:
        cursor.execute(lock, [what])
        row = cursor.fetchone()
        return row is not None and row[0] is not False
