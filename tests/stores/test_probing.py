"""What a database can do is tried. Here PostgreSQL plays others: functions of our own stand before its own."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from uuid import UUID

import pytest
from django.core.management import call_command
from django.core.management.base import SystemCheckError
from django.db import IntegrityError, connection, transaction

from django_idempotency import engine, logs
from django_idempotency.checks.databases import check_capabilities
from django_idempotency.exceptions import StoreRefused
from django_idempotency.models import IdempotencyRecord, Status
from django_idempotency.outcomes import Claimed, InFlight, Keep, Operation, StoredResponse
from django_idempotency.policy import Policy
from django_idempotency.stores import postgresql, probing, store_for
from django_idempotency.stores.database import DatabaseStore
from django_idempotency.stores.probing import Capabilities, probe
from tests.support.callers import effects, entry_point, paying
from tests.support.threads import OtherThread, in_threads
from tests.support.waiting import eventually, someone_waits_for_a_lock

pytestmark = [pytest.mark.postgresql, pytest.mark.plain_table, pytest.mark.usefixtures("transactional_db")]
ALL = Capabilities(function=True, place=True, key_locks=True, row_locks=True, partitioned=False)
TOKENS = (UUID(int=1), UUID(int=2))
OTHERS = "otherwise"  # the schema in which names are looked up first

LOCKS_NOTHING = """
CREATE FUNCTION {schema}.pg_try_advisory_xact_lock(integer, integer) RETURNS boolean LANGUAGE sql AS 'SELECT true';
CREATE FUNCTION {schema}.pg_advisory_xact_lock(integer, integer) RETURNS boolean LANGUAGE sql AS 'SELECT true'
"""
PARTITIONED = """
CREATE TABLE {schema}.django_idempotency_record (LIKE public.django_idempotency_record INCLUDING DEFAULTS)
PARTITION BY RANGE (created_at);
CREATE TABLE {schema}.record_default PARTITION OF {schema}.django_idempotency_record DEFAULT
"""
LEADS_NOWHERE = """
CREATE FUNCTION {schema}.django_idempotency_claim(
    uuid, text, text, text, text, bytea, uuid, bytea, text, boolean, interval, interval, interval
) RETURNS TABLE (
    claimed text, place tid, free boolean, id uuid, scope text, key varchar, fingerprint bytea, mode varchar,
    hold_on_crash boolean, trace bytea, created_at timestamptz, status varchar, attempts integer, on_hold boolean,
    reason text, token uuid, locked_at timestamptz, locked_until timestamptz, expires_at timestamptz,
    response_status smallint, response_headers jsonb, response_body bytea, now timestamptz
) LANGUAGE plpgsql AS $$
#variable_conflict use_column
BEGIN
    FOR claimed, place, free, id, scope, key, fingerprint, mode, hold_on_crash, trace, created_at, status, attempts,
        on_hold, reason, token, locked_at, locked_until, expires_at, response_status, response_headers, response_body,
        now
    IN SELECT * FROM public.django_idempotency_claim($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13)
    LOOP
        place := '(4000000,1)';
        RETURN NEXT;
    END LOOP;
END
$$
"""


@pytest.fixture
def otherwise(transactional_db, monkeypatch):
    """``otherwise(statements)``: from now on the database is another one, on every connection."""

    def make(*statements: str) -> None:
        with connection.cursor() as cursor:
            cursor.execute(f"CREATE SCHEMA {OTHERS}")
            for statement in statements:
                cursor.execute(statement.format(schema=OTHERS))
        connection.close()
        options = connection.settings_dict["OPTIONS"]
        path = {"options": f"-c search_path={OTHERS},public,pg_catalog"}
        monkeypatch.setitem(connection.settings_dict, "OPTIONS", options | path)

    yield make
    monkeypatch.undo()
    connection.close()
    with connection.cursor() as cursor:
        cursor.execute(f"DROP SCHEMA IF EXISTS {OTHERS} CASCADE")


@pytest.fixture
def no_function(transactional_db, monkeypatch):
    monkeypatch.setattr(postgresql, "_without_function", {})
    monkeypatch.setattr(logs, "_said", {})
    with connection.cursor() as cursor:
        cursor.execute("ALTER FUNCTION django_idempotency_claim RENAME TO mislaid")
    yield
    with connection.cursor() as cursor:
        cursor.execute(
            "DO $$ BEGIN ALTER FUNCTION mislaid RENAME TO django_idempotency_claim;"
            " EXCEPTION WHEN undefined_function THEN NULL; END $$"
        )


def operation(key: str = "k") -> Operation:
    return Operation("s", key, bytes(32), "POST", "/")


def run(policy: Policy, key: str = "k") -> Claimed:
    claim = engine.claim(operation(key), policy)
    assert isinstance(claim, Claimed)
    with engine.execution(claim, policy) as execution:
        execution.settle(Keep(StoredResponse(201)))
    assert IdempotencyRecord.objects.get(key=key).status == Status.COMPLETED
    return claim


def claimed_by(rivals: int) -> int:
    outcomes = in_threads(rivals, lambda _index: engine.claim(operation(), Policy(mode="lease")))
    return sum(isinstance(outcome, Claimed) for outcome in outcomes)


def ids() -> list[str]:
    return [message.id.rpartition(".")[2] for message in check_capabilities(None, databases=["default"])]


# --- What is seen ----------------------------------------------------------------------------------------------------


def test_postgresql_can_do_all_and_nothing_stays_of_the_trial():
    assert probe("default") == ALL
    assert not IdempotencyRecord.objects.exists()
    assert ids() == []


def test_a_record_of_a_trial_that_died_is_past_its_time(monkeypatch):
    monkeypatch.setattr(probing, "_excludes", lambda *_args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        probe("default")
    assert not IdempotencyRecord.objects.exists()
    with connection.cursor() as cursor:
        cursor.execute(probing.RECORD, [UUID(int=1)])
    assert IdempotencyRecord.objects.purgeable().count() == 1


def test_advisory_locks_that_lock_nothing_are_found_out(otherwise):
    otherwise(LOCKS_NOTHING)
    seen = probe("default")
    assert (seen.key_locks, seen.row_locks, seen.unique) == (False, True, True)
    assert ids() == []


def test_e084_claims_by_lock_need_advisory_locks(otherwise, settings):
    otherwise(LOCKS_NOTHING)
    settings.IDEMPOTENCY = {"CLAIM": "lock"}
    assert ids() == ["E084"]


def test_a_plain_table_needs_no_advisory_locks(otherwise):
    otherwise(LOCKS_NOTHING)
    assert claimed_by(8) == 1


def test_e076_a_partitioned_table_without_advisory_locks(otherwise):
    otherwise(LOCKS_NOTHING, PARTITIONED)
    assert probe("default").partitioned
    assert ids() == ["E076"]


def test_e076_says_so_at_the_check(otherwise):
    otherwise(LOCKS_NOTHING, PARTITIONED)
    with pytest.raises(
        SystemCheckError, match=r"a key can be claimed twice: .* advisory locks do not exclude other sessions"
    ):
        call_command("check", databases=["default"])


def test_w078_a_place_that_leads_nowhere_costs_statements_only(otherwise):
    otherwise(LEADS_NOWHERE)
    assert ids() == ["W078"]
    assert run(Policy(), "a").place == "(4000000,1)"
    run(Policy(mode="lease"), "b")


def test_e077_row_locks_that_lock_nothing_are_no_proof_of_life(monkeypatch, settings):
    """As in Aurora DSQL, where two transactions meet at COMMIT; here the trial forgets to lock."""
    monkeypatch.setattr(probing, "ROW_LOCK", probing.ROW_LOCK.partition(" FOR ")[0])
    settings.ROOT_URLCONF = ()
    assert probe("default").row_locks is False
    with pytest.raises(SystemCheckError, match=r"(?s)E077\) A policy is in atomic mode, but .*Aurora DSQL"):
        call_command("check", databases=["default"])
    settings.IDEMPOTENCY = {"MODE": "lease"}
    assert ids() == []


def test_a_role_that_may_not_write_proves_nothing_of_locks(otherwise):
    otherwise(
        "CREATE VIEW {schema}.django_idempotency_record AS SELECT * FROM public.django_idempotency_record LIMIT 9"
    )
    assert probe("default").row_locks is None


@pytest.mark.usefixtures("db")
def test_a_trial_is_possible_in_the_transaction_of_a_test_case():
    assert probe("default") == ALL


# --- Without the function --------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_function")
def test_without_the_function_a_claim_is_a_look_and_an_insert():
    assert probe("default") == Capabilities(
        function=False, place=False, key_locks=True, row_locks=True, partitioned=False
    )
    run(Policy(), "a")
    claim = run(Policy(mode="lease"), "b")
    assert (claim.place, claim.schemas) == (None, ("public",))
    assert claimed_by(8) == 1


@pytest.mark.usefixtures("no_function")
def test_without_the_function_a_batch_is_claimed_one_by_one():
    store = store_for(Policy(mode="lease"))
    wanted = [(operation(key), claim_token) for key, claim_token in zip("ab", TOKENS, strict=True)]
    assert [made.token for made in store.claim_many(wanted)] == list(TOKENS)


@pytest.mark.usefixtures("no_function")
def test_the_function_is_asked_for_again_after_a_while(monkeypatch):
    monkeypatch.setattr(postgresql, "ASK_FOR_FUNCTION_EVERY", 0.0)
    assert run(Policy(), "a").place is None
    with connection.cursor() as cursor:
        cursor.execute("ALTER FUNCTION mislaid RENAME TO django_idempotency_claim")
    assert run(Policy(), "b").place


@pytest.mark.usefixtures("no_function")
def test_a_partitioned_table_needs_the_function(otherwise, caplog):
    otherwise(PARTITIONED)
    refused_with_a_line(caplog)
    refused_with_a_line(caplog)
    assert [record.event for record in caplog.records].count("no_function") == 1  # not for every request
    assert ids() == ["E076"]


def refused_with_a_line(caplog):
    with pytest.raises(StoreRefused, match="django_idempotency_claim is missing, or this role may not EXECUTE it"):
        engine.claim(operation("b"), Policy())
    assert "Run manage.py migrate, or grant EXECUTE. (ProgrammingError 42883)" in caplog.text


@pytest.mark.usefixtures("no_function")
def test_without_the_function_a_request_to_a_partitioned_table_is_503(otherwise, payer):
    otherwise(PARTITIONED)
    response = entry_point(paying)("k")
    assert (response.status_code, effects()) == (503, 0)


@pytest.mark.usefixtures("no_function")
def test_a_newly_partitioned_table_needs_the_function(otherwise, caplog):
    """As where a tenant's schema lacks the function, and the next one's table is partitioned."""
    run(Policy(), "a")
    otherwise(PARTITIONED)
    refused_with_a_line(caplog)
    with connection.cursor() as cursor:
        cursor.execute("ALTER FUNCTION mislaid RENAME TO django_idempotency_claim")
    assert claimed_by(8) == 1


def test_a_batch_without_the_function_meets_a_new_record():
    """Whose INSERT is not committed yet: no look finds it, and the function's INSERT waits for it."""
    policy = Policy(mode="lease")
    rival = OtherThread()
    rival(transaction.set_autocommit, False)
    assert rival(DatabaseStore(policy, "default").claim, operation("a"), TOKENS[0])
    with ThreadPoolExecutor(1) as pool:
        batch = pool.submit(in_threads, 1, lambda _index: engine.claim_many(list(map(operation, "ab")), policy))
        eventually(someone_waits_for_a_lock)
        rival(transaction.commit)
        assert batch.result(60) == [[None, None]]  # to be claimed one by one
    rival.close()
    first, second = (engine.claim(operation(key), policy) for key in "ab")
    assert isinstance(first, InFlight)
    assert isinstance(second, Claimed)


# --- Errors that another server passes on ----------------------------------------------------------------------------


def test_a_nameless_check_violation_is_no_missing_partition(caplog):
    """As from a worker of Citus: its code comes, and its text, but neither table nor constraint."""
    with connection.cursor() as cursor:
        cursor.execute(
            "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS"
            " $$ BEGIN RAISE check_violation USING MESSAGE = 'passed on'; END $$;"
            "CREATE TRIGGER refuse BEFORE INSERT ON django_idempotency_record FOR EACH ROW EXECUTE FUNCTION refuse()"
        )
        try:
            with pytest.raises(IntegrityError, match="passed on"):
                engine.claim(operation(), Policy())
        finally:
            cursor.execute("DROP FUNCTION refuse CASCADE")
    assert [record.event for record in caplog.records if hasattr(record, "event")] == []
