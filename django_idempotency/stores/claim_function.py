"""The claim as a function of the database's, on PostgreSQL."""

from __future__ import annotations

from typing import Any

from django.db import connections, router
from django.db.backends.base.base import BaseDatabaseWrapper

from django_idempotency.models import IdempotencyRecord

# Once released, it is changed by a migration of its own that makes it anew. With other columns or parameters it gets a
# new name: connections that have the old ones prepared could not call it, and a deployment runs both releases a while.
#
# Each statement in it has a snapshot of its own, so that what was committed while the lock was waited for is seen. That
# is what makes a key unique on a partitioned table, where no constraint can, and it keeps a duplicate from waiting for
# the COMMIT of a holder whose answer is written already. The server keeps the plans, whatever pooler stands between.
# Above READ COMMITTED all statements have one snapshot, as old as the call: there it makes no record in a partitioned
# table, and returns no row.
#
# The row lock is tried only where the holder's life depends on it, and ends with the call. Whoever gets it because the
# holder has committed since the look finds the answer when it contends for the record.
#
# A claim in atomic mode commits asynchronously: the completing commit is synchronous and WAL is a prefix, so a claim
# lost in a crash of the server was never completed.
# https://www.postgresql.org/docs/current/wal-async-commit.html
FUNCTION = """
CREATE OR REPLACE FUNCTION django_idempotency_claim(
    new_id uuid, new_scope text, new_key text, new_method text, new_path text, new_fingerprint bytea,
    new_token uuid, new_mode text, new_hold_on_crash boolean, lease interval, retention interval, kept_for interval
)
RETURNS TABLE (
    claimed text, place tid, free boolean, id uuid, scope text, key varchar, fingerprint bytea, mode varchar,
    hold_on_crash boolean, created_at timestamptz, status varchar, attempts integer, held boolean, reason text,
    token uuid, locked_at timestamptz, locked_until timestamptz, expires_at timestamptz, response_status smallint,
    response_headers jsonb, response_body bytea, now timestamptz
)
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    old django_idempotency_record;
BEGIN
    now := statement_timestamp();
    PERFORM pg_advisory_xact_lock(uuid_hash_extended(new_id, 0));
    SELECT * INTO old FROM django_idempotency_record AS record WHERE record.id = new_id;
    IF NOT FOUND THEN
        IF current_setting('transaction_isolation') IN ('repeatable read', 'serializable')
            AND (SELECT relkind = 'p' FROM pg_class WHERE oid = 'django_idempotency_record'::regclass)
        THEN
            RETURN;
        END IF;
        INSERT INTO django_idempotency_record (
            id, scope, key, method, path, fingerprint, mode, hold_on_crash, created_at, status, token, locked_at,
            locked_until, updated_at, expires_at, purge_at
        )
        VALUES (
            new_id, new_scope, new_key, new_method, new_path, new_fingerprint, new_mode, new_hold_on_crash, now,
            'processing', new_token, now, now + lease, now, now + retention, now + kept_for
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
        NULL, place, free, old.id, old.scope, old.key, old.fingerprint, old.mode, old.hold_on_crash, old.created_at,
        old.status, old.attempts, old.held, old.reason, old.token, old.locked_at, old.locked_until, old.expires_at,
        old.response_status, old.response_headers, old.response_body, now;
END
$$
"""

TABLE = "SELECT to_regclass('django_idempotency_record') IS NOT NULL"
MAY_CALL = """
SELECT has_function_privilege(oid, 'EXECUTE') FROM pg_proc
WHERE proname = 'django_idempotency_claim' AND pg_function_is_visible(oid)
"""


def can_claim(connection: BaseDatabaseWrapper) -> bool:
    """False where the table is there, but not the function, or not for this role."""
    return not _has_table(connection) or _ask(connection, MAY_CALL) is True


def create_after_migrate(using: str, **_named: Any) -> None:
    """See to the function where tables are made without migrations, as test runs can be told to."""
    connection = connections[using]
    ours = router.allow_migrate_model(using, IdempotencyRecord) and _has_table(connection)
    if ours and _ask(connection, MAY_CALL) is None:
        with connection.cursor() as cursor:
            cursor.execute(FUNCTION)


def _has_table(connection: BaseDatabaseWrapper) -> bool:
    return connection.vendor == "postgresql" and bool(_ask(connection, TABLE))


def _ask(connection: BaseDatabaseWrapper, question: str) -> Any:
    with connection.cursor() as cursor:
        cursor.execute(question)
        (answer,) = cursor.fetchone() or (None,)
        return answer
