"""The claim by record as a function of the database's, and the locks of claims, on
PostgreSQL.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from django.db import connections, router
from django.db.backends.base.base import BaseDatabaseWrapper

from django_idempotency.models import IdempotencyRecord
from django_idempotency.stores.database import COLUMNS
from django_idempotency.values.outcomes import Operation

# Classes of advisory locks in the form of two integers: a lock of the application's own
# does not meet ours by chance.
KEY_LOCKS, TABLE_LOCKS = 0x49444D50, 0x49444D51
# What claims that are locks have locked, in the form of one integer: 16 bits that say
# which kind of lock it is, and 48 bits of the id, or of the request. Of the id they are
# half from the key's digest and half from that of scope and key, so that what is in
# flight can be searched by the raw key. The number of the table keeps tenants apart
# that have a schema each: advisory locks are those of a whole database.
OWNER_LOCKS, REQUEST_LOCKS = 0x4944, 0x4945
TABLE_NUMBER = "'django_idempotency_record'::regclass::oid::bigint"
OWNER_LOCK = (
    f"('x{OWNER_LOCKS:x}' || left({{id}}::text, 6) || substr({{id}}::text, 25, 6))"
    f"::bit(64)::bigint\n    # {TABLE_NUMBER}"
)

# A transaction of this server. After a failover, another server may give its number
# again.
SERVER = "extract(epoch FROM pg_postmaster_start_time())::text"
TRANSACTION = f"(pg_current_xact_id()::text || '@' || {SERVER})"

# The claim by record. Its reasons are in the file.
FUNCTION = (Path(__file__).parent / "sql" / "claim.sql").read_text()

# A claim by lock needs no record: the owner's transaction has the key locked, and
# writes the record when it ends.
#
# First the request's lock is taken, then the owner's: CASE fixes their order, AND would
# not. So the request's is refused where the same request is in flight, and the owner's
# where another one is, or where another claim just asks. The locks of a transaction
# that has ended go one after the other. So "other" stands only if the owner's
# transaction has not ended: its advisory locks go after its virtual one. Whoever asks
# has the request's lock until then.
# https://github.com/postgres/postgres/blob/master/src/backend/storage/lmgr/README
#
# The number of the table is part of its locks, so that tenants with a schema each don't
# meet. A caller that waited for a conversion of the table has locked by the number of
# the old one, and has to ask again.
TRY_LOCKS = f"""
CASE
    WHEN NOT pg_try_advisory_xact_lock(%s::bigint # {TABLE_NUMBER}) THEN 'same'
    WHEN NOT pg_try_advisory_xact_lock({OWNER_LOCK.format(id="%s")}) THEN 'other'
END
"""
MEET = (
    f"SELECT pg_backend_pid(), current_schemas(false), {TABLE_NUMBER}::text,"
    f" {TRY_LOCKS}"
)
# The lookup comes last, with a snapshot that has all that was committed before the
# locks were let go.
LOOKUP = f"""
SELECT
    {TABLE_NUMBER}::text, to_char(statement_timestamp() AT TIME ZONE 'UTC',
        'YYYY-MM-DD HH24:MI:SS.US"+00"'),
    CASE WHEN record.id IS NULL AND current_setting('transaction_read_only') = 'off'
    THEN {TRANSACTION} END AS transaction,
    {", ".join(f"record.{name}" for name in COLUMNS)}, statement_timestamp()
FROM (SELECT) AS one LEFT JOIN django_idempotency_record AS record ON record.id = %s
"""
IS_RUNNING = f"""
SELECT EXISTS (
    SELECT FROM pg_locks AS held JOIN pg_locks AS running USING (virtualtransaction)
    WHERE held.locktype = 'advisory' AND held.mode = 'ExclusiveLock' AND held.granted
        AND held.objsubid = 1
        AND (held.classid::bigint << 32) + held.objid::bigint
            = {OWNER_LOCK.format(id="%s")}
        AND held.database = (SELECT oid FROM pg_database
            WHERE datname = current_database())
        AND running.locktype = 'virtualxid' AND running.granted
)
"""

# Which sessions have claims by lock of this table. A transaction that claims reads the
# table, and has that lock, too, until it ends: so neither a lock of the application's
# own is counted, nor that of a tenant with another table. Nothing is locked to find
# out.
LOCK_HOLDERS = f"""
FROM pg_locks AS held
JOIN pg_database AS here ON here.oid = held.database
    AND here.datname = current_database()
CROSS JOIN LATERAL (
    SELECT (held.classid::bigint << 32 | held.objid::bigint)
        # to_regclass('django_idempotency_record')::oid::bigint
) AS owner (lock)
LEFT JOIN pg_stat_activity AS session ON session.pid = held.pid
WHERE held.locktype = 'advisory' AND held.objsubid = 1 AND held.mode = 'ExclusiveLock'
    AND held.granted
    AND owner.lock >> 48 = {OWNER_LOCKS}
    AND EXISTS (
        SELECT FROM pg_locks AS reading
        WHERE reading.virtualtransaction = held.virtualtransaction
            AND reading.locktype = 'relation'
            AND reading.database = held.database
            AND reading.relation = to_regclass('django_idempotency_record')::oid
    )
"""

TABLE = "SELECT to_regclass('django_idempotency_record') IS NOT NULL"
PARTITIONED = (
    "SELECT relkind = 'p' FROM pg_class WHERE oid ="
    " to_regclass('django_idempotency_record')"
)
MAY_CALL = """
SELECT bool_and(has_function_privilege(oid, 'EXECUTE')) FROM pg_proc
WHERE proname = 'django_idempotency_claim' AND pg_function_is_visible(oid)
"""


def request_lock(operation: Operation) -> int:
    """Return the number of a request's lock: the same for the same key and content,
    whichever key digests them.
    """
    text = operation.id.bytes + (operation.digest or operation.fingerprint)
    return REQUEST_LOCKS << 48 | int.from_bytes(
        hashlib.sha256(text).digest()[:6], "big"
    )


def can_claim(connection: BaseDatabaseWrapper) -> bool:
    """False where the table is there, but not the functions, or not for this role."""
    return not _has_table(connection) or _ask(connection, MAY_CALL) is True


def create_after_migrate(using: str, **_named: Any) -> None:
    """Create the functions where tables are made without migrations, as test runs can
    be configured to.
    """
    connection = connections[using]
    ours = router.allow_migrate_model(using, IdempotencyRecord) and _has_table(
        connection
    )
    if ours and _ask(connection, MAY_CALL) is None:
        with connection.cursor() as cursor:
            cursor.execute(FUNCTION)


def _has_table(connection: BaseDatabaseWrapper) -> bool:
    return connection.vendor == "postgresql" and bool(_ask(connection, TABLE))


def _ask(connection: BaseDatabaseWrapper, question: str) -> Any:
    with connection.cursor() as cursor:
        cursor.execute(question)
        (row,) = cursor.fetchone() or (None,)
        return row
