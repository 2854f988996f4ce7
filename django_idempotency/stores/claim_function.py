"""The claims as functions of the database's, on PostgreSQL."""

from __future__ import annotations

from typing import Any

from django.db import connections, router
from django.db.backends.base.base import BaseDatabaseWrapper

from django_idempotency.models import IdempotencyRecord

# Classes of advisory locks in the form of two integers: a lock of the application's own does not meet ours by chance.
KEY_LOCKS, TABLE_LOCKS = 0x49444D50, 0x49444D51
LONGEST_WAIT = "2s"
# What claims that are locks have locked, in the form of one integer: 16 bits that say which kind of lock it is, and 48
# bits of the id, or of the request. Of the id they are half from the key's digest and half from that of scope and key,
# so that what is in flight can be searched by the raw key. The number of the table keeps tenants apart that have a
# schema each: advisory locks are those of a whole database.
OWNER_LOCKS, REQUEST_LOCKS = 0x4944, 0x4945
TABLE_NUMBER = "'django_idempotency_record'::regclass::oid::bigint"
OWNER_LOCK = f"""('x{OWNER_LOCKS:x}' || left({{id}}::text, 6) || substr({{id}}::text, 25, 6))::bit(64)::bigint
    # {TABLE_NUMBER}"""

# Migration 0008 has the texts as they were released. A later release changes them by a migration of its own that makes
# them anew. With other columns or parameters a function gets a new name: connections that have the old ones prepared
# could not call it, and a deployment runs both releases a while.
#
# Two ids that share a hash wait for each other's claim, which does no harm. Where a claim and its COMMIT are two
# statements, a client that is frozen between them keeps the lock: others wait LONGEST_WAIT for it, or for as long as
# their own lock_timeout says, and ask again.
#
# Each statement in it has a snapshot of its own, so that what was committed while the lock was waited for is seen. That
# is what makes a key unique on a partitioned table, where no constraint can, and it keeps a duplicate from waiting for
# the COMMIT of an owner whose response is written already. The server keeps the plans, whatever pooler stands between.
# Above READ COMMITTED all statements have one snapshot, as old as the call: there it makes no record in a partitioned
# table, and returns no row.
#
# The row lock is tried only where the owner's life depends on it, and ends with the call. A caller that gets it because
# the owner has committed since the look finds the response when it contends for the record.
#
# Where there is no record, the key may be that of a claim by lock (below). A record is made only under a share of its
# lock, so neither of the two kinds begins while the other is at it. Where the lock is taken, the row that is returned
# has no id.
#
# A claim in atomic mode commits asynchronously: the completing commit is synchronous and WAL is a prefix, so a claim
# lost in a crash of the server was never completed.
# https://www.postgresql.org/docs/current/wal-async-commit.html
FUNCTION = f"""
CREATE OR REPLACE FUNCTION django_idempotency_claim(
    new_id uuid, new_scope text, new_key text, new_method text, new_path text, new_fingerprint bytea,
    new_token uuid, new_trace bytea, new_mode text, new_hold_on_crash boolean, lease interval, retention interval,
    kept_for interval
)
RETURNS TABLE (
    claimed text, place tid, free boolean, id uuid, scope text, key varchar, fingerprint bytea, mode varchar,
    hold_on_crash boolean, trace bytea, created_at timestamptz, status varchar, attempts integer, on_hold boolean,
    reason text, token uuid, locked_at timestamptz, locked_until timestamptz, expires_at timestamptz,
    response_status smallint, response_headers jsonb, response_body bytea, now timestamptz
)
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    old django_idempotency_record;
    own_lock_timeout text;
    table_number bigint := {TABLE_NUMBER};
    owner_lock bigint := {OWNER_LOCK.format(id="new_id")};
    owned boolean;
BEGIN
    now := statement_timestamp();
    IF NOT pg_try_advisory_xact_lock({KEY_LOCKS}, uuid_hash(new_id)) THEN
        own_lock_timeout := current_setting('lock_timeout');
        IF own_lock_timeout = '0' THEN
            PERFORM set_config('lock_timeout', '{LONGEST_WAIT}', true);
        END IF;
        PERFORM pg_advisory_xact_lock({KEY_LOCKS}, uuid_hash(new_id));
        PERFORM set_config('lock_timeout', own_lock_timeout, true);
    END IF;
    owned := NOT pg_try_advisory_xact_lock_shared(owner_lock);
    SELECT * INTO old FROM django_idempotency_record AS record WHERE record.id = new_id;
    IF table_number <> {TABLE_NUMBER} THEN
        RAISE serialization_failure USING MESSAGE = 'the table of the records was replaced by another one';
    END IF;
    IF NOT FOUND THEN
        IF current_setting('transaction_isolation') IN ('repeatable read', 'serializable')
            AND (SELECT relkind = 'p' FROM pg_class WHERE oid = 'django_idempotency_record'::regclass)
        THEN
            RETURN;
        END IF;
        IF owned THEN
            RETURN NEXT;
            RETURN;
        END IF;
        INSERT INTO django_idempotency_record (
            id, scope, key, method, path, fingerprint, mode, hold_on_crash, trace, created_at, status, token,
            locked_at, locked_until, updated_at, expires_at, purge_at
        )
        VALUES (
            new_id, new_scope, new_key, new_method, new_path, new_fingerprint, new_mode, new_hold_on_crash, new_trace,
            now, 'processing', new_token, now, now + lease, now, now + retention, now + kept_for
        )
        RETURNING ctid INTO place;
        IF new_mode = 'atomic' THEN
            PERFORM set_config('synchronous_commit', 'off', true);
        END IF;
        claimed := to_char(now AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI:SS.US"+00"');
        RETURN NEXT;
        RETURN;
    END IF;
    IF old.token IS NOT NULL AND old.mode = 'atomic' AND old.fingerprint = new_fingerprint THEN
        PERFORM FROM django_idempotency_record AS record
        WHERE record.id = new_id AND record.created_at = old.created_at
        FOR NO KEY UPDATE SKIP LOCKED;
        free := FOUND;
    END IF;
    RETURN QUERY SELECT
        NULL, place, free, old.id, old.scope, old.key, old.fingerprint, old.mode, old.hold_on_crash, old.trace,
        old.created_at, old.status, old.attempts, old.on_hold, old.reason, old.token, old.locked_at, old.locked_until,
        old.expires_at, old.response_status, old.response_headers, old.response_body, now;
END
$$
"""

# A claim that needs no record: the owner's transaction has the key locked, and writes the record when it has ended.
#
# First the request's lock is taken, then the owner's. So the request's is refused where the same request is in flight
# ("same"), and the owner's where another one is ("other"), or another claim just looks ("unknown"). The locks of a
# transaction that has ended go one after the other. So "other" is told only if the owner's transaction has not ended:
# its advisory locks go after its virtual one. Whoever is asked has the request's lock by then.
# https://github.com/postgres/postgres/blob/master/src/backend/storage/lmgr/README
#
# The number of the table is part of its locks, so that tenants with a schema each don't meet. A caller that waited for
# a conversion of the table has locked by the number of the old one, and has to ask again.
#
# The look comes last, with a snapshot that has all that was committed before the locks were let go. Above READ
# COMMITTED it has not: there a unique index finds the duplicate when the record is written. Where there is none, in a
# partitioned table, and under SERIALIZABLE, where the look would make requests with different keys fail, no row is
# returned, and the claim is to be a record.
FUNCTION_BY_LOCK = f"""
CREATE OR REPLACE FUNCTION django_idempotency_claim_by_lock(new_id uuid, request_lock bigint)
RETURNS TABLE (
    claimed text, transaction text, place text, owner text, id uuid, scope text, key varchar, fingerprint bytea,
    mode varchar, hold_on_crash boolean, trace bytea, created_at timestamptz, status varchar, attempts integer,
    on_hold boolean, reason text, token uuid, locked_at timestamptz, locked_until timestamptz, expires_at timestamptz,
    response_status smallint, response_headers jsonb, response_body bytea, now timestamptz
)
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    old django_idempotency_record;
    table_number bigint := {TABLE_NUMBER};
    owner_lock bigint := {OWNER_LOCK.format(id="new_id")};
    own_request_lock bigint := request_lock # {TABLE_NUMBER};
    isolation text := current_setting('transaction_isolation');
BEGIN
    IF isolation = 'serializable' OR isolation = 'repeatable read'
        AND (SELECT relkind = 'p' FROM pg_class WHERE oid = 'django_idempotency_record'::regclass)
    THEN
        RETURN;
    END IF;
    now := statement_timestamp();
    IF NOT pg_try_advisory_xact_lock(own_request_lock) THEN
        owner := 'same';
    ELSIF NOT pg_try_advisory_xact_lock(owner_lock) THEN
        owner := 'other';
    END IF;
    SELECT * INTO old FROM django_idempotency_record AS record WHERE record.id = new_id;
    IF table_number <> {TABLE_NUMBER} THEN
        owner := 'unknown';
        RETURN NEXT;
        RETURN;
    END IF;
    IF FOUND THEN
        RETURN QUERY SELECT
            NULL, NULL, NULL, owner, old.id, old.scope, old.key, old.fingerprint, old.mode, old.hold_on_crash,
            old.trace, old.created_at, old.status, old.attempts, old.on_hold, old.reason, old.token, old.locked_at,
            old.locked_until, old.expires_at, old.response_status, old.response_headers, old.response_body, now;
        RETURN;
    END IF;
    IF owner IS NULL THEN
        IF current_setting('transaction_read_only') = 'on' THEN
            RAISE read_only_sql_transaction USING MESSAGE = 'cannot claim in a read-only transaction';
        END IF;
        claimed := to_char(now AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI:SS.US"+00"');
        transaction := pg_current_xact_id();
        place := table_number;
    ELSIF owner = 'other' AND NOT EXISTS (
        SELECT FROM pg_locks AS held JOIN pg_locks AS running USING (virtualtransaction)
        WHERE held.locktype = 'advisory' AND held.mode = 'ExclusiveLock' AND held.granted AND held.objsubid = 1
            AND (held.classid::bigint << 32) + held.objid::bigint = owner_lock
            AND held.database = (SELECT oid FROM pg_database WHERE datname = current_database())
            AND running.locktype = 'virtualxid' AND running.granted
    ) THEN
        owner := 'unknown';
    END IF;
    RETURN NEXT;
END
$$
"""

# Which sessions have claims by lock of this table. A transaction that claims reads the table, and has that lock, too,
# until it ends: so neither a lock of the application's own is counted, nor that of a tenant with another table.
# Nothing is locked to find out.
LOCK_HOLDERS = f"""
FROM pg_locks AS held
JOIN pg_database AS here ON here.oid = held.database AND here.datname = current_database()
CROSS JOIN LATERAL (
    SELECT (held.classid::bigint << 32 | held.objid::bigint) # to_regclass('django_idempotency_record')::oid::bigint
) AS owner (lock)
LEFT JOIN pg_stat_activity AS session ON session.pid = held.pid
WHERE held.locktype = 'advisory' AND held.objsubid = 1 AND held.mode = 'ExclusiveLock' AND held.granted
    AND owner.lock >> 48 = {OWNER_LOCKS}
    AND EXISTS (
        SELECT FROM pg_locks AS reading
        WHERE reading.virtualtransaction = held.virtualtransaction AND reading.locktype = 'relation'
            AND reading.database = held.database
            AND reading.relation = to_regclass('django_idempotency_record')::oid
    )
"""

TABLE = "SELECT to_regclass('django_idempotency_record') IS NOT NULL"
PARTITIONED = "SELECT relkind = 'p' FROM pg_class WHERE oid = to_regclass('django_idempotency_record')"
MAY_CALL = """
SELECT bool_and(has_function_privilege(oid, 'EXECUTE')) FROM pg_proc
WHERE proname IN ('django_idempotency_claim', 'django_idempotency_claim_by_lock') AND pg_function_is_visible(oid)
HAVING count(*) = 2
"""


def can_claim(connection: BaseDatabaseWrapper) -> bool:
    """False where the table is there, but not the functions, or not for this role."""
    return not _has_table(connection) or _ask(connection, MAY_CALL) is True


def is_partitioned(connection: BaseDatabaseWrapper) -> bool:
    """Whether the table of the records is partitioned, so that no constraint makes a key unique in it."""
    return connection.vendor == "postgresql" and _ask(connection, PARTITIONED) is True


def create_after_migrate(using: str, **_named: Any) -> None:
    """See to the functions where tables are made without migrations, as test runs can be told to."""
    connection = connections[using]
    ours = router.allow_migrate_model(using, IdempotencyRecord) and _has_table(connection)
    if ours and _ask(connection, MAY_CALL) is None:
        with connection.cursor() as cursor:
            cursor.execute(FUNCTION)
            cursor.execute(FUNCTION_BY_LOCK)


def _has_table(connection: BaseDatabaseWrapper) -> bool:
    return connection.vendor == "postgresql" and bool(_ask(connection, TABLE))


def _ask(connection: BaseDatabaseWrapper, question: str) -> Any:
    with connection.cursor() as cursor:
        cursor.execute(question)
        (row,) = cursor.fetchone() or (None,)
        return row
