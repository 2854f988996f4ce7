"""What ``OBSERVE`` would have prevented: digests in memory that are compared in the
database about every ten seconds.

No request waits for this, executes a statement for it or fails because of it. Digests
that can't be written are dropped, so a duplicate may be missed, but none is invented.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from django.db import connections, transaction

from django_idempotency.contrib.dashboard import models
from django_idempotency.contrib.dashboard.conf import options
from django_idempotency.contrib.dashboard.counters import counters
from django_idempotency.contrib.dashboard.models import IdempotencyObservation
from django_idempotency.extending import conf
from django_idempotency.extending.stores import (
    Operation,
    background,
    databases,
    record_id,
    store_for,
)

FLUSH_EVERY = 10.0
MOST = 10_000  # digests that a process keeps before they are written
AT_ONCE = 300  # rows in a statement

# requests with a key, and without
KEYED, UNKEYED = "observed_keyed", "observed_unkeyed"
DUPLICATE_KEYED, DUPLICATE_UNKEYED = "duplicate_keyed", "duplicate_unkeyed"
REFUSED, UNPROTECTED = "observed_refused", "observed_unprotected"
EVENTS = {KEYED, UNKEYED, DUPLICATE_KEYED, DUPLICATE_UNKEYED, REFUSED, UNPROTECTED}

TABLE = IdempotencyObservation._meta.db_table
# On SQLite, which compares times as text, in the form in which Django writes them.
_SECONDS_BEFORE = (
    "replace(strftime('%%Y-%%m-%%d %%H:%%M:%%f000', {}, '-' || %s || ' seconds'),"
    " '.000000', '')"
)
# The time of a request that was ``%s`` seconds ago by the clock of its process, and the
# conflict part of the upsert.
_AGO = {
    "postgresql": "statement_timestamp() - make_interval(secs => %s)",
    "mysql": "timestampadd(MICROSECOND, -1000000 * %s, utc_timestamp(6))",
    "sqlite": _SECONDS_BEFORE.format("'now'"),
}
_MERGE = {
    "postgresql": (
        f"""
        ON CONFLICT (digest) DO UPDATE SET seen_at = greatest({TABLE}.seen_at,
            EXCLUDED.seen_at), found = EXCLUDED.found
            + ({TABLE}.seen_at >= EXCLUDED.seen_at - make_interval(secs => %s))::int
    """
    ),
    "mysql": (
        """
        ON DUPLICATE KEY UPDATE found = VALUES(found)
            + (seen_at >= timestampadd(MICROSECOND, -1000000 * %s, VALUES(seen_at))),
        seen_at = greatest(seen_at, VALUES(seen_at))
    """
    ),
    "sqlite": (
        f"""
        ON CONFLICT (digest) DO UPDATE SET seen_at = max({TABLE}.seen_at,
            EXCLUDED.seen_at), found = EXCLUDED.found
            + ({TABLE}.seen_at >= {_SECONDS_BEFORE.format("EXCLUDED.seen_at")})
    """
    ),
}


@dataclass(slots=True)
class _Seen:
    """Requests with one digest. ``last``: the time of the last one by the monotonic
    clock.
    """

    here: Operation  # as it is counted
    event: str
    count: int
    last: float


class Observations:
    """The digests of this process that are not compared yet."""

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._seen: dict[UUID, _Seen] = {}

    def receive(
        self,
        sender: object,
        operation: Operation | None,
        *,
        keyed: bool,
        fate: str | None,
    ) -> None:
        """Count a request, and keep its digest if it is comparable. Both are written
        after about ten seconds.

        ``operation``: ``None`` if the request can't be compared with others.
        ``fate``: ``REFUSED`` or ``UNPROTECTED``, if that is what it would have been.
        """
        using = databases()[0]
        here = Operation("", "", b"", sender=sender, database=using)
        counters.count(KEYED if keyed else UNKEYED, here.view, here)
        if fate is not None:
            counters.count(fate, here.view, here)
        if operation is not None and self._keep(
            operation, here, DUPLICATE_KEYED if keyed else DUPLICATE_UNKEYED
        ):
            background.later(self.flush, FLUSH_EVERY, store_for(conf().policy, here))

    def _keep(self, operation: Operation, here: Operation, event: str) -> bool:
        """Keep a digest; return whether it is now the only one."""
        whole = operation.scope, operation.key, operation.fingerprint.hex()
        id = record_id("", "\0".join(whole))
        with self._lock:
            seen = self._seen.get(id)
            if seen is not None:
                seen.count, seen.last = seen.count + 1, time.monotonic()
            elif len(self._seen) < MOST:
                self._seen[id] = _Seen(here, event, 1, time.monotonic())
            return len(self._seen) == 1

    def flush(self) -> None:
        """Compare the digests and count the duplicates. An error drops the digests and
        is raised.
        """
        with self._lock:
            seen, self._seen = self._seen, {}
        window, using = options().observe, databases()[0]
        if window is None:
            return
        for id, found in _compare(sorted(seen.items()), window, using):
            counters.count(seen[id].event, seen[id].here.view, seen[id].here, found)
        # at once, because at the end of a process there is no later flush
        counters.flush(using)


def _compare(
    seen: list[tuple[UUID, _Seen]], window: float, using: str
) -> Iterator[tuple[UUID, int]]:
    """Yield the digests of duplicates, and how many there were. All processes use one
    order to avoid deadlocks.
    """
    connection = connections[using]
    to_database = IdempotencyObservation._meta.get_field("digest").get_db_prep_value
    row = f"(%s, {_AGO[connection.vendor]}, %s)"
    for first in range(0, len(seen), AT_ONCE):
        some, now = seen[first : first + AT_ONCE], time.monotonic()
        values = [
            (to_database(id, connection), round(now - each.last, 3), each.count - 1)
            for id, each in some
        ]
        rows_of_values = ", ".join([row] * len(some))
        statement = (
            f"INSERT INTO {TABLE} (digest, seen_at, found) VALUES {rows_of_values}"
            f" {_MERGE[connection.vendor]}"
        )
        parameters = [*(value for each in values for value in each), window]
        rows = _merge(statement, parameters, [value[0] for value in values], using)
        yield from ((UUID(str(id)), found) for id, found in rows if found)


def _merge(
    statement: str, parameters: list[Any], digests: list[Any], using: str
) -> list[tuple[Any, int]]:
    connection = connections[using]
    if connection.features.can_return_rows_from_bulk_insert:
        with connection.cursor() as cursor:
            cursor.execute(f"{statement} RETURNING digest, found", parameters)
            return cursor.fetchall()  # type: ignore[no-any-return]
    # MySQL. Nobody else changes the rows before COMMIT.
    select = (
        f"SELECT digest, found FROM {TABLE} WHERE digest IN"
        f" ({', '.join(['%s'] * len(digests))})"
    )
    with transaction.atomic(using=using), connection.cursor() as cursor:
        cursor.execute(statement, parameters)
        cursor.execute(select, digests)
        return cursor.fetchall()  # type: ignore[no-any-return]


def prune(*, using: str) -> int:
    """Delete some of the oldest digests past ``OBSERVE``, or of all if it is off;
    return how many were deleted.
    """
    return models.prune(
        IdempotencyObservation, "seen_at", options().observe or 0, using
    )


observations = Observations()
os.register_at_fork(after_in_child=observations._reset)
