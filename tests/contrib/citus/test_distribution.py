"""A table that is distributed by ``id`` over several servers: each hot statement names it, and so goes to one of them.

What is held here on plain PostgreSQL is what Citus takes of the statements; test_citus.py runs on Citus itself.
"""

from __future__ import annotations

import re
from uuid import uuid4

import pytest
from django.db import connections

from django_idempotency import engine
from django_idempotency.contrib.citus import distribution
from django_idempotency.models import IdempotencyRecord
from django_idempotency.policy import Atomic, Policy
from django_idempotency.stores import postgresql, store_for
from django_idempotency.stores.claim_function import FUNCTION
from django_idempotency.stores.database import ahead
from django_idempotency.values.outcomes import Claimed, Fail, Keep, Operation, Release, Replay, StoredResponse
from tests.support.callers import entry_point, paying
from tests.support.shard_locks import refused_across_shards, shard_of
from tests.support.statements import sent_statements

TABLE = IdempotencyRecord._meta.db_table
VALUE = r"(?:\$\d+|'[0-9a-f-]{32,36}'(?:::uuid)?)"
ONE_RECORD = re.compile(rf"""\bid"? (?:= {VALUE}|= ANY\({VALUE}|IN \({VALUE}\)|= seen\.id)""")
VERDICTS = [Keep(StoredResponse(201)), Fail("broke"), Release()]


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
        run.verdict = verdict


@pytest.mark.postgresql
@pytest.mark.psycopg3
@pytest.mark.usefixtures("transactional_db")
@pytest.mark.parametrize("mode", ["atomic", "lease"])
def test_every_statement_sent_to_postgresql_names_one_record(mode):
    """The hot path as it is: claim, lock, completion, replay, renewal, takeover, release, failure, hold, batch."""
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
        assert store.read(done.id)
        together = engine.claim_many([Operation("s", key, bytes(32)) for key in "ab"], policy)
    of_records = [sql for sql in sent.all if TABLE in sql and not sql.startswith("EXPLAIN")]
    assert len(of_records) >= 10
    assert [sql for sql in of_records if not ONE_RECORD.search(sql)] == []
    claims = sent.on("django_idempotency_claim(")
    assert claims
    assert all(re.search(r"django_idempotency_claim\(\s*(?:\$1|'[0-9a-f-]{32,36}'|wanted\.id,)", sql) for sql in claims)
    assert [claim.operation.key for claim in together] == ["a", "b"]


@pytest.fixture
def shards(transactional_db, monkeypatch):
    """The shards of each statement that has locked records; one that names several is refused, as by Citus."""
    with refused_across_shards(monkeypatch) as locked:
        yield locked


@pytest.mark.postgresql
@pytest.mark.usefixtures("shards")
def test_the_database_is_asked_once_whether_the_table_is_distributed():
    distribution._distributed.clear()
    assert distribution.is_distributed("default")
    with connections["default"].execute_wrapper(lambda *_args: pytest.fail("asked again")):
        assert distribution.is_distributed("default")


def test_plain_tables_lock_any_rows(db, monkeypatch):
    monkeypatch.setattr(distribution, "_distributed", {})
    assert not distribution.is_distributed("default")


@pytest.mark.postgresql
def test_ids_are_grouped_by_shard_always_in_the_same_order(shards):
    ids = [uuid4() for _ in range(30)]
    expected = [[id for id in sorted(ids) if shard_of(id) == shard] for shard in sorted(set(map(shard_of, ids)))]
    assert distribution.in_shards(ids, "default") == expected


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
        assert {claim.token for claim in store.lock_many(claims)} == {claim.token for claim in claims}
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
    claim = claimed("k", Policy(mode=Atomic(claim="lock")))
    assert not claim.by_lock
    assert IdempotencyRecord.objects.filter(pk=claim.id).exists()


@pytest.mark.postgresql
@pytest.mark.usefixtures("transactional_db")
@pytest.mark.parametrize("claim", ["record", "lock"])
def test_a_request_is_refused_if_the_store_fails_as_a_process_asks_for_its_shards(claim, proxy, monkeypatch):
    monkeypatch.setattr(distribution, "_distributed", {})  # what a process asks once
    proxy.go_away()
    assert entry_point(paying, mode=Atomic(claim=claim))().status_code == 503
