"""The Redis store on a Redis Cluster of six nodes: the contract, failover, and what a failover loses."""

from __future__ import annotations

from uuid import uuid4

import pytest

from django_idempotency import engine
from django_idempotency.contrib.testing.stores import RESPONSE, StoreContract
from django_idempotency.exceptions import StoreUnavailable
from django_idempotency.stores import store_for
from django_idempotency.values.outcomes import Claimed, InFlight, Replay
from tests.contrib.redis.records import LEASE, done, operation, use
from tests.support.redis_servers import running_cluster
from tests.support.threads import in_threads
from tests.support.waiting import eventually

pytestmark = [pytest.mark.redis_server, pytest.mark.slow]


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    with running_cluster(tmp_path_factory.mktemp("cluster")) as running:
        yield running


@pytest.fixture
def cluster(tmp_path):
    """One that may be broken."""
    with running_cluster(tmp_path) as running:
        yield running


def use_cluster(settings, cluster, **options):
    use(settings, cluster.url, **{"cluster": True, "timeout": 1.0, "prefix": "idempotency:", **options})


class TestOnACluster(StoreContract):
    alias = "redis"

    @pytest.fixture(autouse=True)
    def configured(self, settings, shared):
        use_cluster(settings, shared, prefix=f"test-{uuid4().hex}:")


def test_keys_are_spread_over_the_masters(settings, shared):
    use_cluster(settings, shared, prefix=f"test-{uuid4().hex}:")
    store, operations = store_for(LEASE), [operation() for _ in range(50)]
    for one in operations:
        assert isinstance(store.claim(one, uuid4()), Claimed)
    assert {record.id for record in store.records()} == {one.id for one in operations}
    assert len({shared.master_of(store._key(one.id)).port for one in operations}) == 3


def test_a_replica_acknowledges_a_claim(settings, shared):
    use_cluster(settings, shared, durability="replicas", durability_timeout=0.9)
    for _ in range(10):
        claim = engine.claim(operation(), LEASE)
        assert store_for(LEASE).complete(claim, RESPONSE)


def master_of(cluster, one):
    return cluster.master_of(store_for(LEASE)._key(one.id))


def cut(cluster, master):
    """Have the replica replicate no more, though it can be elected: the link is gone, and nobody knows."""
    replica = cluster.replica_of(master)
    master.client.config_set("repl-ping-replica-period", 3600)
    master.client.config_set("client-output-buffer-limit", "replica 0 0 0")
    replica.client.config_set("cluster-replica-validity-factor", 0)
    # The replica can't sign in to its master any more; its votes go by the cluster's bus, which asks for no password.
    replica.client.config_set("masteruser", "nobody")
    replica.client.config_set("masterauth", "wrong")
    replica.client.execute_command("CLIENT", "KILL", "TYPE", "master")
    master.client.execute_command("CLIENT", "KILL", "TYPE", "replica")
    eventually(lambda: replica.client.info("replication")["master_link_status"] == "down")
    return replica


def fail_over(cluster, master, replica):
    master.kill()
    eventually(lambda: replica.client.info("replication")["role"] == "master", within=60)
    eventually(cluster.is_whole, within=60)


def claimed_again(one):
    """What a second caller is told, once the cluster answers again."""

    def ask():
        try:
            return engine.claim(one, LEASE)
        except StoreUnavailable:
            return None

    return eventually(ask, within=60, every=0.2)


def test_a_failover_loses_a_claim_that_was_not_replicated(settings, cluster):
    """Both callers are told that the key is theirs: what docs/limits.md says of asynchronous replication."""
    use_cluster(settings, cluster)
    one = operation()
    master = master_of(cluster, one)
    replica = cut(cluster, master)
    first = engine.claim(one, LEASE)
    assert isinstance(first, Claimed)
    fail_over(cluster, master, replica)
    second = claimed_again(one)
    assert isinstance(second, Claimed)
    assert second.token != first.token
    assert not store_for(LEASE).complete(first, RESPONSE), "the record, at least, is fenced"
    assert store_for(LEASE).complete(second, RESPONSE)


def test_a_claim_that_a_failover_would_lose_is_refused(settings, cluster):
    use_cluster(settings, cluster, durability="replicas", durability_timeout=0.3)
    one = operation()
    cut(cluster, master_of(cluster, one))
    with pytest.raises(StoreUnavailable, match="0 of 1 acknowledgements"):
        engine.claim(one, LEASE)


def test_a_failover_keeps_what_a_replica_has_acknowledged(settings, cluster):
    use_cluster(settings, cluster, durability="replicas", durability_timeout=0.9)
    ended, running = done(LEASE).operation, operation()
    master = master_of(cluster, ended)
    while master_of(cluster, running) is not master:
        running = operation()
    assert isinstance(engine.claim(running, LEASE), Claimed)
    fail_over(cluster, master, cluster.replica_of(master))
    use_cluster(settings, cluster)  # the new master has no replica yet
    assert claimed_again(ended) == Replay(RESPONSE)
    assert isinstance(claimed_again(running), InFlight)


def test_claims_during_a_failover_are_refused_or_unique(settings, cluster):
    use_cluster(settings, cluster, durability="replicas", durability_timeout=0.5)
    operations = [operation() for _ in range(30)]
    master = master_of(cluster, operations[0])
    replica = cluster.replica_of(master)

    def work(number):
        if number == 0:
            master.kill()
            return []
        won = []
        for one in operations:
            try:
                outcome = engine.claim(one, LEASE)
            except StoreUnavailable:
                continue
            if isinstance(outcome, Claimed):
                won.append(one.id)
        return won

    won = [id for ids in in_threads(5, work) for id in ids]
    assert len(won) == len(set(won))
    eventually(lambda: replica.client.info("replication")["role"] == "master", within=60)
    use_cluster(settings, cluster)
    for one in operations:
        assert isinstance(claimed_again(one), InFlight if one.id in won else InFlight | Claimed)
