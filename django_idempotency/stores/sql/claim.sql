-- Migration 0001 makes this function. A later release that changes it adds a migration
-- that makes it anew. With other columns or parameters it gets a new name and a new
-- file: connections that have the old one prepared could not call it, and a deployment
-- runs both releases for a while.
--
-- Each statement in it has a snapshot of its own, so that what was committed while the
-- lock was waited for is seen. That is what makes a key unique on a partitioned table,
-- where no constraint can, and it keeps a duplicate from waiting for the COMMIT of an
-- owner whose response is written already. The server keeps the plans, whatever pooler
-- stands between.
CREATE OR REPLACE FUNCTION django_idempotency_claim(
    new_id uuid, new_scope text, new_key text, new_method text, new_path text,
    new_fingerprint bytea, new_token uuid, new_mode text, new_hold_on_crash boolean,
    lease interval, retention interval, kept_for interval
)
RETURNS TABLE (
    claimed text, place tid, free boolean, id uuid, scope text, key varchar,
    fingerprint bytea, mode varchar, hold_on_crash boolean, created_at timestamptz,
    status varchar, attempts integer, on_hold boolean, reason text, token uuid,
    locked_at timestamptz, locked_until timestamptz, expires_at timestamptz,
    response_status smallint, response_headers jsonb, response_body bytea,
    now timestamptz
)
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    old django_idempotency_record;
    own_lock_timeout text;
    table_number bigint := 'django_idempotency_record'::regclass::oid::bigint;
    owner_lock bigint :=
        ('x4944' || left(new_id::text, 6) || substr(new_id::text, 25, 6))
        ::bit(64)::bigint # 'django_idempotency_record'::regclass::oid::bigint;
    owned boolean;
BEGIN
    now := statement_timestamp();
    -- Two ids that share a hash wait for each other's claim, which does no harm. Where
    -- a claim and its COMMIT are two statements, a client that is frozen between them
    -- keeps the lock: others wait two seconds for it, or for as long as their own
    -- lock_timeout says, and ask again.
    IF NOT pg_try_advisory_xact_lock(1229213008, uuid_hash(new_id)) THEN
        own_lock_timeout := current_setting('lock_timeout');
        IF own_lock_timeout = '0' THEN
            PERFORM set_config('lock_timeout', '2s', true);
        END IF;
        PERFORM pg_advisory_xact_lock(1229213008, uuid_hash(new_id));
        PERFORM set_config('lock_timeout', own_lock_timeout, true);
    END IF;
    -- Where there is no record, the key may be that of a claim by lock. A record is
    -- made only under a share of its lock, so neither of the two kinds begins while the
    -- other is at it.
    owned := NOT pg_try_advisory_xact_lock_shared(owner_lock);
    SELECT * INTO old FROM django_idempotency_record AS record WHERE record.id = new_id;
    -- A caller that waited for a conversion of the table has the lock of the old one.
    IF table_number <> 'django_idempotency_record'::regclass::oid::bigint THEN
        RAISE serialization_failure
            USING MESSAGE = 'the table of the records was replaced by another one';
    END IF;
    IF NOT FOUND THEN
        -- Above READ COMMITTED all statements have one snapshot, as old as the call:
        -- there a partitioned table gets no record, and no row is returned.
        IF current_setting('transaction_isolation')
            IN ('repeatable read', 'serializable')
            AND (SELECT relkind = 'p' FROM pg_class
                WHERE oid = 'django_idempotency_record'::regclass)
        THEN
            RETURN;
        END IF;
        IF owned THEN
            RETURN NEXT;  -- a row without an id
            RETURN;
        END IF;
        INSERT INTO django_idempotency_record (
            id, scope, key, method, path, fingerprint, mode, hold_on_crash, created_at,
            status, token, locked_at, locked_until, updated_at, expires_at, purge_at
        )
        VALUES (
            new_id, new_scope, new_key, new_method, new_path, new_fingerprint, new_mode,
            new_hold_on_crash, now, 'processing', new_token, now, now + lease, now,
            now + retention, now + kept_for
        )
        RETURNING ctid INTO place;
        -- The completing commit is synchronous and WAL is a prefix, so a claim lost in
        -- a crash of the server was never completed.
        -- https://www.postgresql.org/docs/current/wal-async-commit.html
        IF new_mode = 'atomic' THEN
            PERFORM set_config('synchronous_commit', 'off', true);
        END IF;
        claimed := to_char(now AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI:SS.US"+00"');
        RETURN NEXT;
        RETURN;
    END IF;
    -- The row lock is tried only where the owner's life depends on it, and ends with
    -- the call. A caller that gets it because the owner has committed since the lookup
    -- finds the response when it locks the record.
    IF old.token IS NOT NULL AND old.mode = 'atomic'
        AND old.fingerprint = new_fingerprint
    THEN
        PERFORM FROM django_idempotency_record AS record
        WHERE record.id = new_id AND record.created_at = old.created_at
        FOR NO KEY UPDATE SKIP LOCKED;
        free := FOUND;
    END IF;
    RETURN QUERY SELECT
        NULL, place, free, old.id, old.scope, old.key, old.fingerprint, old.mode,
        old.hold_on_crash, old.created_at, old.status, old.attempts, old.on_hold,
        old.reason, old.token, old.locked_at, old.locked_until, old.expires_at,
        old.response_status, old.response_headers, old.response_body, now;
END
$$
