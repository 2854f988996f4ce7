"""The Redis store on a Redis Cluster of six nodes: the contract and failover."""

from __future__ import annotations

from uuid import uuid4

import pytest

from django_idempotency import engine
from django_idempotency.contrib.testing.stores import RESPONSE, StoreContract
from django_idempotency.stores import store_for
from django_idempotency.values.exceptions import StoreUnavailable
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
    use(
        settings,
        cluster.url,
        **{"cluster": True, "timeout": 1.0, "prefix": "idempotency:", **options},
    )


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


def master_of(cluster, one):
    return cluster.master_of(store_for(LEASE)._key(one.id))


def fail_over(cluster, master, replica):
    master.kill()
    eventually(
        lambda: replica.client.info("replication")["role"] == "master", within=60
    )
    eventually(cluster.is_whole, within=60)


def claimed_again(one):
    """What a second caller is told, once the cluster answers again."""

    def ask():
        try:
            return engine.claim(one, LEASE)
        except StoreUnavailable:
            return None

    return eventually(ask, within=60, every=0.2)


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
    eventually(
        lambda: replica.client.info("replication")["role"] == "master", within=60
    )
    use_cluster(settings, cluster)
    for one in operations:
        assert isinstance(
            claimed_again(one), InFlight if one.id in won else InFlight | Claimed
        )
