"""A table that is distributed by ``id`` over several servers: each hot statement names it, and so goes to one of them.

What is held here on plain PostgreSQL is what Citus takes of the statements; test_citus.py runs on Citus itself.
"""

from __future__ import annotations

import re
from dataclasses import replace
from uuid import uuid4

import pytest
from django.db import connections

from django_idempotency import engine
from django_idempotency.checks.databases import check_capabilities
from django_idempotency.models import IdempotencyRecord
from django_idempotency.outcomes import Claimed, Fail, Keep, Operation, Release, Replay, StoredResponse
from django_idempotency.policy import Policy
from django_idempotency.stores import distribution, postgresql, store_for
from django_idempotency.stores.claim_function import FUNCTION
from django_idempotency.stores.database import ahead
from django_idempotency.stores.probing import Capabilities
from tests.support.shard_locks import refused_across_shards, shard_of
from tests.support.statements import sent_statements

TABLE = IdempotencyRecord._meta.db_table
BY_ID = re.compile(r"\bid = (?:%s|ANY\(%s\)|seen\.id|done\.id)")
VALUE = r"(?:\$\d+|'[0-9a-f-]{32,36}'(?:::uuid)?)"
ONE_RECORD = re.compile(rf"""\bid"? (?:= {VALUE}|= ANY\({VALUE}|IN \({VALUE}\)|= seen\.id)""")
VERDICTS = [Keep(StoredResponse(201)), Fail("broke"), Release()]
CLAIMS = {"CLAIM", "CLAIM_MANY"}  # by the function, whose first argument is the id
WRITTEN = {
    name: text
    for name, text in vars(postgresql).items()
    if name.isupper() and isinstance(text, str) and re.search(rf"(FROM|UPDATE|INTO) {TABLE}\b", text)
}


def test_the_statements_are_found():
    assert {"LOCK", "COMPLETE", "RELEASE", "LOCK_MANY", "COMPLETE_MANY", "COUNT_REPLAYS"} <= WRITTEN.keys()


@pytest.mark.parametrize("name", WRITTEN)
def test_a_hot_statement_names_the_distribution_column(name):
    assert BY_ID.search(WRITTEN[name])


@pytest.mark.parametrize("name", sorted(CLAIMS))
def test_the_id_is_the_first_argument_of_the_claims_function(name):
    call = getattr(postgresql, name).partition("django_idempotency_claim(")[2]
    assert call.lstrip().startswith(("%s", "wanted.id"))


def test_the_claims_function_looks_and_inserts_by_the_id():
    looks = re.findall(rf"FROM {TABLE}\b.*", FUNCTION)
    assert len(looks) == 2
    assert len(re.findall(rf"FROM {TABLE} AS record\s+WHERE record\.id = new_id\b", FUNCTION)) == len(looks)
    assert re.search(rf"INSERT INTO {TABLE} \(\s+id,.*?VALUES \(\s+new_id,", FUNCTION, re.DOTALL)
    assert "UPDATE " not in FUNCTION.replace("NO KEY UPDATE", "")


def claimed(key, policy):
    claim = engine.claim(Operation("s", key, bytes(32), "POST", "/"), policy)
    assert isinstance(claim, Claimed)
    return claim


def lapse(claim):
    """In atomic mode its grace, in lease mode its lease, which was watched."""
    IdempotencyRecord.objects.filter(pk=claim.id).update(locked_at=ahead(-10), locked_until=ahead(-10))


def settle(claim, policy, verdict):
    with engine.execution(claim, policy) as run:
        run.settle(verdict)


@pytest.mark.postgresql
@pytest.mark.psycopg3
@pytest.mark.usefixtures("transactional_db")
@pytest.mark.parametrize("mode", ["atomic", "lease"])
def test_every_statement_sent_to_postgresql_names_one_record(mode):
    """The hot path as it is: claim, lock, completion, replay, renewal, takeover, release, failure, hold."""
    policy = Policy(mode=mode)
    store = store_for(policy)
    dead, freed, failed, held = (claimed(key, policy) for key in ("dead", "freed", "failed", "held"))
    for claim in (dead, held):
        lapse(claim)
    with sent_statements() as sent:
        done = claimed("done", policy)
        settle(done, policy, Keep(StoredResponse(201)))
        assert isinstance(engine.claim(done.operation, policy), Replay)
        assert store.renew([freed]) == {freed.token}
        assert store.leases_left({freed.token: freed.id})
        store.expire({freed.token: freed.id})
        settle(freed, policy, Release())
        settle(failed, policy, Fail("broke"))
        assert claimed("dead", policy).attempt == 2
        with store.try_lock(held.id) as record:
            store.hold(record, "an operator decides")
        store.count_replays({done.id: 1})
        assert store.read(done.id)
    of_records = [sql for sql in sent.all if TABLE in sql and not sql.startswith("EXPLAIN")]
    assert len(of_records) >= 10
    assert [sql for sql in of_records if not ONE_RECORD.search(sql)] == []
    claims = sent.on("django_idempotency_claim(")
    assert claims
    assert all(re.search(r"django_idempotency_claim\(\s*(?:\$1|'[0-9a-f-]{32,36}')", sql) for sql in claims)


@pytest.mark.usefixtures("transactional_db")
@pytest.mark.parametrize("mode", ["atomic", "lease"])
@pytest.mark.parametrize(
    "verdict", [Keep(StoredResponse(201)), Fail("broke"), Release()], ids=lambda each: str(type(each))
)
def test_every_statement_of_a_request_that_the_orm_writes_is_by_id(mode, verdict, monkeypatch):
    """By the portable store, whose statements Django makes: a run, a duplicate in flight, and what comes after."""
    monkeypatch.setattr("django_idempotency.stores.database.BY_VENDOR", {})
    policy, operation = Policy(mode=mode), Operation("s", "k", bytes(32), "POST", "/")
    sent = []

    def note(execute, sql, params, many, context):
        sent.append(sql)
        return execute(sql, params, many, context)

    with connections["default"].execute_wrapper(note):
        claim = engine.claim(operation, policy)
        assert isinstance(claim, Claimed)
        assert store_for(policy).read(claim.id)
        with engine.execution(claim, policy) as run:
            run.settle(verdict)
        again = engine.claim(operation, policy)
    assert isinstance(again, Replay if isinstance(verdict, Keep) else Claimed)
    of_records = [sql for sql in sent if TABLE in sql]
    assert len(of_records) >= 4
    for sql in of_records:
        assert "INSERT" in sql or re.search(r"""["`]id["`] (?:= %s|IN \(%s\))""", sql), sql


# --- Locks of several records ----------------------------------------------------------------------------------------


@pytest.fixture
def shards(transactional_db, monkeypatch):
    """The shards of each statement that has locked records; one that names several is refused, as by Citus."""
    with refused_across_shards(monkeypatch) as locked:
        yield locked


@pytest.mark.postgresql
@pytest.mark.usefixtures("shards")
def test_that_rows_are_on_several_servers_is_tried_once():
    distribution._distributed.clear()
    assert distribution.is_distributed("default")
    with connections["default"].execute_wrapper(lambda *_args: pytest.fail("asked again")):
        assert distribution.is_distributed("default")


def test_plain_tables_lock_any_rows(db, monkeypatch):
    monkeypatch.setattr(distribution, "_distributed", {})
    assert not distribution.is_distributed("default")


@pytest.mark.postgresql
@pytest.mark.parametrize("tells", [True, False])
def test_ids_are_told_apart_by_shard_always_in_the_same_order(shards, tells):
    ids = [uuid4() for _ in range(30)]
    if not tells:
        with connections["default"].cursor() as cursor:
            cursor.execute("ALTER FUNCTION get_shard_id_for_distribution_column RENAME TO mislaid")
    groups = distribution.in_shards(ids, "default")
    if not tells:
        with connections["default"].cursor() as cursor:
            cursor.execute("ALTER FUNCTION mislaid RENAME TO get_shard_id_for_distribution_column")
    expected = [[id for id in sorted(ids) if shard_of(id) == shard] for shard in sorted(set(map(shard_of, ids)))]
    assert groups == (expected if tells else [[id] for id in sorted(ids)])


@pytest.mark.postgresql
def test_leases_are_renewed_shard_by_shard(shards):
    policy = Policy(mode="lease")
    claims = [claimed(f"k{number}", policy) for number in range(20)]
    assert store_for(policy).renew(claims) == {claim.token for claim in claims}
    assert shards == [{shard} for shard in sorted({shard_of(claim.id) for claim in claims})]


@pytest.mark.postgresql
def test_a_batch_is_locked_shard_by_shard(shards):
    policy = Policy()
    claims = [claimed(f"k{number}", policy) for number in range(20)]
    store = store_for(policy)
    with store.transaction():
        assert store.lock_many(claims) == {claim.token for claim in claims}
    assert shards == [{shard} for shard in sorted({shard_of(claim.id) for claim in claims})]


@pytest.mark.postgresql
@pytest.mark.parametrize("verdict", VERDICTS)
def test_a_run_on_several_servers_goes_by_the_transaction_of_its_own(shards, verdict, monkeypatch):
    """The number that the row's server tells is another transaction's here."""
    monkeypatch.setattr(postgresql, "LOCK", postgresql.LOCK.replace("pg_current_xact_id()::text", "'7'"))
    settle(claimed("k", Policy()), Policy(), verdict)
    status = IdempotencyRecord.objects.filter(key="k").values_list("status", flat=True).first()
    assert status == {Keep: "completed", Fail: "failed", Release: None}[type(verdict)]


@pytest.mark.postgresql
def test_claims_by_lock_are_records_on_several_servers(shards):
    claim = claimed("k", Policy(claim="lock"))
    assert not claim.by_lock
    assert IdempotencyRecord.objects.filter(pk=claim.id).exists()


@pytest.mark.postgresql
@pytest.mark.plain_table
def test_e084_locks_of_several_servers_are_no_claims(shards, settings):
    settings.IDEMPOTENCY = {"CLAIM": "lock"}
    (error,) = check_capabilities(None, databases=["default"])
    assert error.id == "django_idempotency.E084"
    assert "on several servers, each with advisory locks of its own" in error.msg


def test_a_partitioned_table_on_several_servers_is_not_unique():
    plain = Capabilities(function=True, place=True, key_locks=True, row_locks=True, partitioned=False, distributed=True)
    assert plain.unique
    assert not replace(plain, partitioned=True).unique
