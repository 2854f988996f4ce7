"""A table that is distributed by ``id`` over several servers: each hot statement names
it, and so goes to one of them.

What is held here on plain PostgreSQL is what Citus takes of the statements;
test_citus.py runs on Citus itself.
"""

from __future__ import annotations

import re
from uuid import uuid4

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.db import connections

from django_idempotency import engine
from django_idempotency.contrib.citus import store as citus
from django_idempotency.contrib.citus.store import CitusStore
from django_idempotency.contrib.testing.stores import StoreContract
from django_idempotency.models import IdempotencyRecord
from django_idempotency.stores import configured, postgresql, store_for
from django_idempotency.stores.claim_function import FUNCTION, TRANSACTION
from django_idempotency.stores.database import ahead
from django_idempotency.values.exceptions import StoreUnavailable
from django_idempotency.values.outcomes import (
    Claimed,
    Fail,
    Keep,
    Operation,
    Release,
    Replay,
    StoredResponse,
)
from django_idempotency.values.policy import Atomic, Policy
from tests.support.callers import settle
from tests.support.checks import CITUS, ids_found
from tests.support.shard_locks import refused_across_shards, shard_of
from tests.support.statements import sent_statements

pytestmark = pytest.mark.postgresql
TABLE = IdempotencyRecord._meta.db_table
VALUE = r"(?:\$\d+|'[0-9a-f-]{32,36}'(?:::uuid)?)"
ONE_RECORD = re.compile(
    rf"""\bid"? (?:= {VALUE}|= ANY\({VALUE}|IN \({VALUE}\)|= seen\.id)"""
)
VERDICTS = [Keep(StoredResponse(201)), Fail("broke"), Release()]


def test_the_claims_function_looks_and_inserts_by_the_id():
    looks = re.findall(rf"FROM {TABLE}\b.*", FUNCTION)
    assert len(looks) == 2
    assert len(
        re.findall(rf"FROM {TABLE} AS record\s+WHERE record\.id = new_id\b", FUNCTION)
    ) == len(looks)
    assert re.search(
        rf"INSERT INTO {TABLE} \(\s+id,.*?VALUES \(\s+new_id,", FUNCTION, re.DOTALL
    )
    assert "UPDATE " not in FUNCTION.replace("NO KEY UPDATE", "")


def claimed(key, policy):
    claim = engine.claim(Operation("s", key, bytes(32), "POST", "/"), policy)
    assert isinstance(claim, Claimed)
    return claim


def lapse(claim):
    """In atomic mode its grace, in lease mode its lease, which was watched."""
    IdempotencyRecord.objects.filter(pk=claim.id).update(
        locked_at=ahead(-10), locked_until=ahead(-10)
    )


@pytest.mark.psycopg3
@pytest.mark.usefixtures("transactional_db")
@pytest.mark.parametrize("mode", ["atomic", "lease"])
def test_every_statement_sent_to_postgresql_names_one_record(mode):
    """The hot path as it is: claim, lock, completion, replay, renewal, takeover,
    release, failure, hold, batch.
    """
    policy = Policy(mode=mode)
    store = store_for(policy)
    dead, freed, failed, held = (
        claimed(key, policy) for key in ("dead", "freed", "failed", "held")
    )
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
        together = engine.claim_many(
            [Operation("s", key, bytes(32)) for key in "ab"], policy
        )
    of_records = [
        sql for sql in sent.all if TABLE in sql and not sql.startswith("EXPLAIN")
    ]
    assert len(of_records) >= 10
    assert [sql for sql in of_records if not ONE_RECORD.search(sql)] == []
    claims = sent.on("django_idempotency_claim(")
    assert claims
    assert all(
        re.search(
            r"django_idempotency_claim\(\s*(?:\$1|'[0-9a-f-]{32,36}'|wanted\.id,)", sql
        )
        for sql in claims
    )
    assert [claim.operation.key for claim in together] == ["a", "b"]


STORE = {"BACKEND": f"{citus.__name__}.{CitusStore.__name__}"}


@pytest.fixture
def citus_store(settings):
    settings.IDEMPOTENCY = {"STORES": {"default": STORE}}


@pytest.fixture
def shards(transactional_db, citus_store, monkeypatch):
    """The shards of each statement that has locked records; one that names several is
    refused, as by Citus.
    """
    with refused_across_shards(monkeypatch) as locked:
        yield locked


@pytest.mark.usefixtures("transactional_db", "citus_store")
class TestOnOneServer(StoreContract):
    """Citus's store on a table that is not distributed."""


@pytest.mark.usefixtures("shards")
class TestOnSeveralServers(StoreContract):
    pass


@pytest.mark.usefixtures("shards")
def test_the_database_is_asked_once_whether_the_table_is_distributed():
    citus._distributed.clear()
    assert citus.is_distributed("default")
    with connections["default"].execute_wrapper(
        lambda *_args: pytest.fail("asked again")
    ):
        assert citus.is_distributed("default")


def test_plain_tables_lock_any_rows(db, monkeypatch):
    monkeypatch.setattr(citus, "_distributed", {})
    assert not citus.is_distributed("default")
    ids = [uuid4() for _ in range(3)]
    assert citus.in_shards(ids, "default") == [ids]


def test_ids_are_grouped_by_shard_always_in_the_same_order(shards):
    ids = [uuid4() for _ in range(30)]
    expected = [
        [id for id in sorted(ids) if shard_of(id) == shard]
        for shard in sorted(set(map(shard_of, ids)))
    ]
    assert citus.in_shards(ids, "default") == expected


def test_leases_are_renewed_shard_by_shard(shards):
    policy = Policy(mode="lease")
    claims = [claimed(f"k{number}", policy) for number in range(20)]
    assert store_for(policy).renew(claims) == {claim.token for claim in claims}
    assert shards == [
        {shard} for shard in sorted({shard_of(claim.id) for claim in claims})
    ]


def test_a_batch_is_locked_shard_by_shard(shards):
    policy = Policy()
    claims = [claimed(f"k{number}", policy) for number in range(20)]
    store = store_for(policy)
    with store.transaction():
        assert {claim.token for claim in store.lock_many(claims)} == {
            claim.token for claim in claims
        }
    assert shards == [
        {shard} for shard in sorted({shard_of(claim.id) for claim in claims})
    ]


@pytest.fixture
def elsewhere(shards, monkeypatch):
    """What the server of a record says of transactions is about others than the
    caller's.
    """
    for name in ("LOCK", "LOCK_MANY"):
        monkeypatch.setattr(
            postgresql, name, getattr(postgresql, name).replace(TRANSACTION, "'7'")
        )
    monkeypatch.setattr(
        postgresql,
        "GUARDED_WRITE",
        postgresql.GUARDED_WRITE.replace(TRANSACTION, "'7'"),
    )
    monkeypatch.setattr(postgresql, "WAS_COMMITTED", "%s IS NULL")


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("verdict", VERDICTS)
def test_a_run_on_several_servers_goes_by_the_transaction_of_its_own(verdict):
    settle(claimed("k", Policy()), Policy(), verdict)
    status = (
        IdempotencyRecord.objects.filter(key="k")
        .values_list("status", flat=True)
        .first()
    )
    assert status == {Keep: "completed", Fail: "failed", Release: None}[type(verdict)]


def test_replays_of_several_shards_are_counted_one_by_one(shards):
    claims = [claimed(f"k{number}", Policy()) for number in range(5)]
    store_for(Policy()).count_replays(
        {claim.id: number for number, claim in enumerate(claims)}
    )
    counted = IdempotencyRecord.objects.filter(
        pk__in=[claim.id for claim in claims]
    ).order_by("key")
    assert list(counted.values_list("replays", flat=True)) == [0, 1, 2, 3, 4]
    assert shards == []


@pytest.mark.usefixtures("elsewhere")
def test_a_run_that_failed_after_its_transaction_was_committed_is_on_hold():
    claim, store = claimed("k", Policy()), store_for(Policy())
    with store.transaction():
        locked = store.lock(claim)
    assert store.fail(locked, "broke")
    assert IdempotencyRecord.objects.values_list("on_hold", flat=True).get(pk=claim.id)


@pytest.mark.psycopg3
@pytest.mark.usefixtures("elsewhere")
def test_a_batch_is_completed_by_the_transaction_of_its_own():
    """With a plain UPDATE: what depends on all of its rows would have to be asked of
    several servers.
    """
    claims, store = (
        [claimed(f"k{number}", Policy()) for number in range(5)],
        store_for(Policy()),
    )
    with store.transaction(), sent_statements() as sent:
        locked = store.lock_many(claims)
        assert store.complete_many(
            [(claim, StoredResponse(201)) for claim in locked]
        ) == len(claims)
    assert sent.on("WITH written") == []
    assert set(IdempotencyRecord.objects.values_list("status", flat=True)) == {
        "completed"
    }


@pytest.mark.usefixtures("citus_store")
def test_claims_by_lock_are_refused():
    policy = Policy(mode=Atomic(claim="lock"))
    with pytest.raises(
        ImproperlyConfigured, match=r"'default' \(CitusStore\) are on several servers"
    ):
        store_for(policy)


def test_e024_finds_claims_by_lock(settings):
    settings.IDEMPOTENCY = {
        "STORES": {"default": STORE},
        "ATOMIC": Atomic(claim="lock"),
    }
    assert ids_found("E024", databases=()) == ["E024"]
    settings.IDEMPOTENCY = {"STORES": {"default": STORE}}
    assert ids_found("E024", databases=()) == []


@pytest.mark.usefixtures("citus_store")
def test_e023_finds_the_store_without_its_app(monkeypatch):
    assert ids_found("E023", databases=()) == []
    configured.cache_clear()
    monkeypatch.setattr(citus.apps, "is_installed", lambda _app: False)
    assert ids_found("E023", databases=()) == ["E023"]


@pytest.mark.usefixtures("shards")
def test_e034_finds_a_partitioned_table(monkeypatch):
    assert ids_found("E034") == []
    monkeypatch.setattr(citus, "PARTITIONED", "SELECT true")
    assert ids_found("E034") == ["E034"]


def test_e001_finds_distributed_records_whose_store_is_another(shards, settings):
    assert ids_found("E001", label=CITUS) == []
    settings.IDEMPOTENCY = {}
    assert ids_found("E001", label=CITUS) == ["E001"]
    citus._distributed["default"] = False
    assert ids_found("E001", label=CITUS) == []


@pytest.mark.usefixtures("transactional_db", "citus_store")
def test_leases_are_not_renewed_if_the_store_fails_as_a_process_asks_for_its_shards(
    proxy, monkeypatch
):
    policy = Policy(mode="lease")
    claim, store = claimed("k", policy), store_for(policy)
    monkeypatch.setattr(citus, "_distributed", {})  # what a process asks once
    proxy.go_away()
    with pytest.raises(StoreUnavailable):
        store.renew([claim])
