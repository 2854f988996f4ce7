"""Records as this package's own store writes them, one at a time or in large
numbers.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from django.db import connections, transaction

BODY = b"x" * 200
HEADERS = (
    ("Content-Type", "application/json"),
    ("Vary", "Accept"),
    ("Allow", "POST, OPTIONS"),
)
TABLE = "django_idempotency_record"


@contextmanager
def filling(name: str) -> Iterator[Any]:
    """Yield a cursor to fill the table of the database with the alias ``name`` with.

    The table has no indexes meanwhile. Afterwards it has them again, as if all of it
    had grown slowly.
    """
    with connections[name].cursor() as cursor:
        cursor.execute("SET maintenance_work_mem = '512MB'")
        cursor.execute(
            "SELECT indexname, indexdef FROM pg_indexes WHERE tablename = %s", [TABLE]
        )
        indexes = {
            index: definition
            for index, definition in cursor.fetchall()
            if not index.endswith("_pkey")
        }
        for index in indexes:
            cursor.execute(f"DROP INDEX {index}")
        cursor.execute(f"ALTER TABLE {TABLE} DROP CONSTRAINT {TABLE}_pkey")
        yield cursor
        # Two thirds full, as keys that arrive in no order leave it.
        cursor.execute(
            f"ALTER TABLE {TABLE} ADD PRIMARY KEY (id) WITH (fillfactor = 70)"
        )
        for definition in indexes.values():
            cursor.execute(definition)
        cursor.execute(f"VACUUM (ANALYZE, FREEZE) {TABLE}")
        cursor.execute("CHECKPOINT")


def copy(cursor: Any, id: uuid.UUID, times: int, **different: str) -> None:
    """Make ``times`` copies, whose lease and retention end at different times within a
    day. ``different`` has other values for columns, in which ``i`` is the number of the
    copy.
    """
    cursor.execute(
        "SELECT column_name FROM information_schema.columns WHERE table_name = %s",
        [TABLE],
    )
    columns = [column for (column,) in cursor.fetchall()]
    ahead = "+ i %% 86400 * interval '1 second'"
    changed = {
        "id": "gen_random_uuid()",
        "purge_at": f"purge_at {ahead}",
        "locked_until": f"locked_until {ahead}",
    }
    values = ", ".join((changed | different).get(column, column) for column in columns)
    cursor.execute(
        f"INSERT INTO {TABLE} ({', '.join(columns)}) "
        f"SELECT {values} FROM {TABLE}, generate_series(1, %s) AS i WHERE id = %s",
        [times, id],
    )


def claim_one(name: str) -> uuid.UUID:
    operation = _new_operation()
    _store(name).claim(operation, uuid.uuid4())
    id: uuid.UUID = operation.id
    return id


def run_one(name: str) -> tuple[uuid.UUID, float]:
    """Do a whole request's work on a record; return its id, and how many seconds the
    claim took.
    """
    from django_idempotency.values.outcomes import StoredResponse

    operation, store = _new_operation(), _store(name)
    begun = time.perf_counter()
    claimed = store.claim(operation, uuid.uuid4())
    took = time.perf_counter() - begun
    with transaction.atomic(using=name):
        assert store.lock(claimed)
        assert store.complete(claimed, StoredResponse(201, HEADERS, BODY))
    return operation.id, took


def _new_operation() -> Any:
    from django_idempotency.values.outcomes import Operation

    key = str(uuid.uuid4())
    return Operation(
        key=key,
        scope="user:1",
        fingerprint=uuid.uuid4().bytes * 2,
        method="POST",
        path="/effects/",
    )


def _store(name: str) -> Any:
    from django_idempotency.stores import store_for
    from django_idempotency.values.policy import Policy

    return store_for(Policy(using=name))
