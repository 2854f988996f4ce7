"""The Redis store on a Redis Cluster of six nodes: the contract and failover."""

from __future__ import annotations

import gc
import time
import warnings
from collections import defaultdict
from uuid import uuid4

import pytest

from django_idempotency import engine
from django_idempotency.contrib.redis import client
from django_idempotency.contrib.testing.stores import RESPONSE, StoreContract
from django_idempotency.stores import store_for
from django_idempotency.values.exceptions import StoreUnavailable
from django_idempotency.values.outcomes import Claimed, InFlight, Replay
from tests.contrib.redis.records import LEASE, connections, done, operation, use
from tests.support.redis_servers import HARDLY_EVER, SOON, running_cluster
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
        **{"cluster": True, "prefix": "idempotency:", **options},
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


@pytest.fixture
def masters(settings, tmp_path):
    """Three, none of which is taken for dead, however long it is frozen. Each has keys
    of its own.
    """
    partly = ("--cluster-require-full-coverage", "no")
    with running_cluster(tmp_path, *partly, replicas=0) as running:
        # one that is frozen keeps the test waiting, but a busy one may be late
        use_cluster(settings, running, timeout=3.0)
        yield running


def keys_by_master(cluster):
    operations = defaultdict(list)
    for one in (operation() for _ in range(100)):
        operations[master_of(cluster, one).port].append(one)
    return operations


def new_claim(one):
    return store_for(LEASE).claim(one, uuid4())


def test_a_frozen_master_costs_its_own_keys_alone(masters, monkeypatch):
    by_master = keys_by_master(masters)
    frozen = masters.nodes[1]
    one, *others = by_master.pop(frozen.port)
    claim = new_claim(one)
    monkeypatch.setattr(client, "PAUSE", 600.0)
    frozen.freeze()
    with pytest.raises(StoreUnavailable, match="TimeoutError"):
        new_claim(others[0])
    for other in others:
        with pytest.raises(StoreUnavailable, match="a moment ago"):
            new_claim(other)
    for elsewhere in [one for ones in by_master.values() for one in ones]:
        assert isinstance(new_claim(elsewhere), Claimed)
    with pytest.raises(StoreUnavailable, match="TimeoutError"):
        store_for(LEASE).renew([claim])
    frozen.thaw()
    paused = store_for(LEASE).connection._paused_until
    (node,) = paused
    monkeypatch.setitem(paused, node, time.monotonic())
    assert isinstance(new_claim(others[1]), Claimed)
    assert isinstance(new_claim(others[2]), Claimed)
    assert not paused


def test_a_master_that_timed_out_is_not_asked_once_more(masters):
    one = operation()
    new_claim(one)
    node = master_of(masters, one)
    with node.client as asking:
        before = connections(asking)
        node.freeze()
        with pytest.raises(StoreUnavailable, match="TimeoutError"):
            store_for(LEASE).read(one.id)
        node.thaw()
        assert connections(asking) == before


@pytest.mark.parametrize("durability", ["none", "replicas"])
def test_a_slot_that_no_master_had_is_looked_for_again(settings, shared, durability):
    use_cluster(settings, shared, durability=durability, durability_timeout=20)
    store, one = store_for(LEASE), operation()
    of_redis = store.connection.client
    del of_redis.nodes_manager.slots_cache[of_redis.keyslot(store._key(one.id))]
    assert isinstance(new_claim(one), Claimed)
    # redis-py has replaced clients of nodes, and left them open
    with warnings.catch_warnings(action="ignore", category=ResourceWarning):
        gc.collect()


def master_of(cluster, one):
    return cluster.master_of(store_for(LEASE)._key(one.id))


def fail_over(cluster, master, replica):
    cluster.take_for_dead_after(SOON)
    master.kill()
    has_taken_over(cluster, replica)


def has_taken_over(cluster, replica):
    eventually(
        lambda: replica.client.info("replication")["role"] == "master", within=120
    )
    eventually(cluster.is_whole, within=120)
    cluster.take_for_dead_after(HARDLY_EVER)


def claimed_again(one):
    """What a second caller is told, once the cluster answers again."""

    def ask():
        try:
            return engine.claim(one, LEASE)
        except StoreUnavailable:
            return None

    return eventually(ask, within=120, every=0.2)


def test_a_failover_keeps_what_a_replica_has_acknowledged(settings, cluster):
    use_cluster(settings, cluster, durability="replicas", durability_timeout=20)
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
    use_cluster(
        settings, cluster, timeout=1.0, durability="replicas", durability_timeout=0.5
    )
    operations = [operation() for _ in range(30)]
    master = master_of(cluster, operations[0])
    replica = cluster.replica_of(master)
    cluster.take_for_dead_after(SOON)

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

    won = [id for ids in in_threads(5, work, timeout=300) for id in ids]
    assert len(won) == len(set(won))
    has_taken_over(cluster, replica)
    use_cluster(settings, cluster)
    for one in operations:
        assert isinstance(
            claimed_again(one), InFlight if one.id in won else InFlight | Claimed
        )
