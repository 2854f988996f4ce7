"""Who runs what has no record yet, because its claim is a lock: the sessions that have such a lock, on PostgreSQL."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from django.db import connections

from django_idempotency.keys import id_range
from django_idempotency.stores.claim_function import OWNER_LOCKS

OWNERS = f"""
SELECT held.pid, activity.xact_start, statement_timestamp()
FROM pg_locks AS held
JOIN pg_stat_activity AS activity USING (pid)
JOIN pg_database AS here ON here.oid = held.database AND here.datname = current_database()
CROSS JOIN LATERAL (
    SELECT (held.classid::bigint << 32 | held.objid::bigint) # to_regclass('django_idempotency_record')::oid::bigint
) AS key (lock)
WHERE held.locktype = 'advisory' AND held.objsubid = 1 AND held.mode = 'ExclusiveLock' AND held.granted
    AND key.lock >> 48 = {OWNER_LOCKS} AND (%s::bigint IS NULL OR key.lock >> 24 & x'ffffff'::bigint = %s)
ORDER BY activity.xact_start, held.pid
"""


@dataclass(frozen=True, slots=True)
class LockOwner:
    """A session of the database in which a claim by lock is in progress.

    ``since``: when its transaction began, as far as this role may see it. ``now``: the database's time.
    """

    pid: int
    since: datetime | None
    now: datetime


def lock_owners(using: str, key: str | None = None) -> list[LockOwner]:
    """Return the sessions with a claim by lock, of a raw ``key`` in whatever scope or of all; the longest first.

    A lock has 24 bits of the key's digest: another key may be taken for it, once in 16 million. None on databases other
    than PostgreSQL.
    """
    if connections[using].vendor != "postgresql":
        return []
    bits = None if key is None else id_range(key)[0].int >> 104
    with connections[using].cursor() as cursor:
        cursor.execute(OWNERS, [bits, bits])
        return [LockOwner(*row) for row in cursor.fetchall()]
