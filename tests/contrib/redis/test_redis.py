"""The Redis store: the contract on Redis and on Valkey, what its keys expire by, and
what its failures come to.
"""

from __future__ import annotations

import base64
import os
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from uuid import uuid4

import pytest
import redis
from django.core.exceptions import ImproperlyConfigured
from django.http import HttpResponse

from django_idempotency import engine, signals
from django_idempotency.contrib.redis import scripts
from django_idempotency.contrib.redis.client import connection
from django_idempotency.contrib.redis.store import RedisStore
from django_idempotency.contrib.testing.stores import RESPONSE, StoreContract
from django_idempotency.maintenance.stats import alarms_of_store
from django_idempotency.stores import store_for
from django_idempotency.stores.base import Seen
from django_idempotency.values.exceptions import StoreRefused, StoreUnavailable
from django_idempotency.values.outcomes import Claimed, Keep, Replay, StoredResponse
from django_idempotency.values.policy import Body, Lease
from tests.contrib.redis.records import (
    BACKEND,
    HOLD,
    LEASE,
    RETRY,
    claimed,
    done,
    operation,
    use,
)
from tests.support.brokers import valkey_program
from tests.support.callers import entry_point, heard, is_replay
from tests.support.checks import found, ids_found
from tests.support.commands import told
from tests.support.redis_servers import running_node
from tests.support.waiting import eventually

pytestmark = pytest.mark.redis
KEYS = [base64.b64encode(os.urandom(32)).decode()]


def time_to_live(claim: Claimed) -> float | None:
    """Seconds; ``None`` for a key that does not expire."""
    store = store_for(RETRY)
    left = store.connection.client.pttl(store._key(claim.id))
    return None if left == -1 else left / 1000


def lives(claim: Claimed, seconds: float) -> bool:
    """Whether it was so many, a moment ago."""
    return seconds - 60 < time_to_live(claim) <= seconds


IN_PROGRESS = 300 + 3600  # seconds: the lease, and those of an abandoned record


class Contract(StoreContract):
    alias = "redis"


@pytest.mark.usefixtures("on_redis")
class TestOnRedis(Contract):
    pass


@pytest.fixture(scope="module")
def valkey(tmp_path_factory):
    with running_node(
        tmp_path_factory.mktemp("valkey"),
        "--appendonly",
        "yes",
        program=valkey_program(),
    ) as running:
        yield running


@pytest.mark.valkey
class TestOnValkey(Contract):
    @pytest.fixture(autouse=True)
    def configured(self, settings, valkey):
        use(settings, valkey.url)

    def test_a_write_waits_for_the_disk(self, settings, valkey):
        use(settings, valkey.url, durability="disk", durability_timeout=20)
        claim = claimed()
        assert store_for(RETRY).complete(claim, RESPONSE)
        valkey.kill()
        valkey.start()
        connection.cache_clear()
        assert store_for(RETRY).read(claim.id).response == RESPONSE


@pytest.mark.parametrize("begun", ["claimed", "taken over"])
@pytest.mark.usefixtures("on_redis")
def test_an_encrypted_response_is_replayed_from_redis(begun, settings):
    settings.IDEMPOTENCY |= {"ENCRYPTION_KEYS": KEYS}
    policy = RETRY.derive(body=Body(encrypt="require"))
    store = store_for(policy)
    claim = claimed(policy)
    if begun == "taken over":
        with store.try_lock(claim.id) as record:
            claim = store.reassign(record, claim.operation, uuid4())
    stored = store.encode(RESPONSE, claim)
    assert store.complete(claim, stored)
    record = store.read(claim.id)
    assert RESPONSE.body not in record.response_body
    assert store.decode(record.response, record) == RESPONSE
    assert (
        store.decode(record.response, replace(record, created_at=record.now)).body
        is None
    )


@pytest.mark.usefixtures("on_redis")
def test_an_encrypted_response_that_is_written_again_is_the_same(settings, monkeypatch):
    settings.IDEMPOTENCY |= {"ENCRYPTION_KEYS": KEYS}
    policy, written = RETRY.derive(body=Body(encrypt=True)), RedisStore.complete

    def unacknowledged(*args, **kwargs):
        assert written(*args, **kwargs)
        raise StoreUnavailable("0 of 1 acknowledgements")

    monkeypatch.setattr(RedisStore, "complete", unacknowledged)
    with (
        heard(signals.stale_write_rejected) as rejected,
        heard(signals.key_completed) as completed,
    ):
        done(policy)
        monkeypatch.setattr(RedisStore, "complete", written)
        eventually(lambda: rejected or completed)
    assert (rejected, len(completed)) == ([], 1)


@pytest.mark.parametrize("status", [201, 402, 422])
@pytest.mark.usefixtures("on_redis")
def test_a_record_that_redis_has_lost_does_not_withdraw_the_response(status):
    """As after a failover. No other attempt has run."""
    runs = []

    def view(request):
        id = request.idempotency.record_id
        store_for(RETRY).connection.client.delete(store_for(RETRY)._key(id))
        return HttpResponse(runs.append(1), status=status)

    send = entry_point(view, mode=RETRY.mode, store="redis")
    first, second = send(), send()
    assert first.status_code == second.status_code == status
    assert (is_replay(second), len(runs)) == ((status != 422), 1 + (status == 422))


@pytest.mark.parametrize(("audit", "kept"), [(None, 100), (500, 500)])
@pytest.mark.usefixtures("on_redis")
def test_when_a_record_in_progress_and_a_response_expire(audit, kept):
    policy = LEASE.derive(retention=100)
    policy = policy.derive(audit_retention=audit) if audit else policy
    store, claim = store_for(policy), claimed(policy)
    assert lives(claim, IN_PROGRESS)
    store.connection.client.pexpire(store._key(claim.id), 60_000)
    store.renew([claim])
    assert lives(claim, IN_PROGRESS)
    store.complete(claim, RESPONSE)
    assert lives(claim, kept)


@pytest.mark.usefixtures("on_redis")
def test_a_record_without_retention_never_expires():
    for_good = LEASE.derive(retention=None)
    claim = claimed(for_good)
    assert lives(claim, IN_PROGRESS)
    store_for(for_good).complete(claim, RESPONSE)
    assert time_to_live(claim) is None


@pytest.mark.usefixtures("on_redis")
def test_a_record_that_an_operator_may_have_to_decide_on_never_expires():
    store, claim = store_for(HOLD), claimed(HOLD)
    assert time_to_live(claim) is None
    store.renew([claim])
    assert time_to_live(claim) is None
    store.fail(claim, "crashed", on_hold=True)
    assert time_to_live(claim) is None
    lapsed = claimed()
    with store.try_lock(lapsed.id) as record:
        store.hold(record, "nobody knows")
    assert time_to_live(lapsed) is None


@pytest.mark.parametrize("encrypted", [False, True])
@pytest.mark.usefixtures("on_redis")
def test_a_record_that_was_lost_during_its_run_is_written_anew(settings, encrypted):
    if encrypted:
        settings.IDEMPOTENCY |= {"ENCRYPTION_KEYS": KEYS, "BODY": Body(encrypt=True)}
    one, store = operation(), store_for(RETRY)
    run = engine.begin(one, RETRY)
    store.connection.run(scripts.RELEASE, store._key(one.id), run.claim.token.hex)
    assert store.read(one.id) is None
    assert run.end(Keep(RESPONSE)) is None
    replay = engine.begin(one, RETRY)
    assert isinstance(replay, Replay)
    assert replay.response.body == RESPONSE.body


@pytest.mark.django_db
@pytest.mark.usefixtures("on_redis")
def test_the_reaper_frees_keys_in_redis_or_puts_them_on_hold():
    short = Lease(seconds=1)
    free, hold = (
        claimed(RETRY.derive(mode=replace(short, on_crash=crash)))
        for crash in ("retry", "hold")
    )
    store = store_for(RETRY)
    assert eventually(
        lambda: store.read(hold.id).locked_until < store.read(hold.id).now
    )
    done = Counter()

    def both_are_done():
        """A watch in which a busy machine stood still is left to the next command."""
        (found,) = told("idempotency_reap", "--store=redis")
        done.update(found["done"])
        return done.total() >= 2

    eventually(both_are_done)
    assert done == {"failed": 1, "on_hold": 1}
    stand = [
        (each.status, each.on_hold) for each in map(store.read, (free.id, hold.id))
    ]
    assert stand == [("failed", False), ("failed", True)]
    assert not store.complete(free, RESPONSE)
    assert alarms_of_store("redis", seconds=5)["stuck"] == 0


@pytest.mark.usefixtures("on_redis")
def test_a_completion_can_be_repeated_with_the_same_response():
    store, claim = store_for(RETRY), claimed()
    assert store.complete(claim, RESPONSE)
    assert store.complete(claim, RESPONSE)
    assert not store.complete(claim, StoredResponse(200))
    assert not store.complete(Claimed(claim.operation, uuid4()), RESPONSE)
    assert store.read(claim.id).response == RESPONSE


@pytest.mark.usefixtures("on_redis")
def test_replays_are_counted():
    store, claim = store_for(RETRY), claimed()
    store.count_replays({claim.id: 2, uuid4(): 1})
    store.count_replays({claim.id: 3})
    assert store.connection.client.hget(store._key(claim.id), "replays") == b"5"


@pytest.mark.redis_server
def test_scripts_that_were_flushed_are_loaded_again(node):
    claim, more = claimed(), claimed()
    assert store_for(RETRY).renew([claim, more]) == {claim.token, more.token}
    node.client.script_flush()
    assert store_for(RETRY).renew([claim, more]) == {claim.token, more.token}
    node.client.script_flush()
    assert store_for(RETRY).complete(claim, RESPONSE)


@pytest.mark.redis_server
def test_a_server_that_is_dead_is_unavailable_to_every_method(node):
    store, claim = store_for(RETRY), claimed()
    node.kill()
    for ask in (
        lambda: store.claim(operation(), uuid4()),
        lambda: store.read(claim.id),
        lambda: store.complete(claim, RESPONSE),
        lambda: store.fail(claim, "broke"),
        lambda: store.release(claim),
        lambda: store.renew([claim]),
        lambda: store.renew([claim, claim]),
        lambda: store.count_replays({claim.id: 1, uuid4(): 1}),
        lambda: list(store.records()),
    ):
        with pytest.raises(StoreUnavailable):
            ask()


@pytest.mark.redis_server
def test_a_full_server_refuses_new_records_and_keeps_old(node):
    """It is also unavailable to a watch of leases: nobody can renew, so an owner whose
    lease lapses may be alive.
    """
    running, ended, store = claimed(), done(), store_for(RETRY)
    node.client.config_set("maxmemory", "1")
    for refused in (claimed, lambda: store.leases_left({running.token: running.id})):
        with pytest.raises(StoreRefused):
            refused()
    node.client.config_set("maxmemory", "0")
    assert store.leases_left({running.token: running.id}).keys() == {running.token}
    assert engine.claim(ended.operation, RETRY) == Replay(RESPONSE)


@pytest.mark.redis_server
def test_a_response_is_stored_once_the_server_is_back(node, settings):
    """The effects have happened: the run ends as it should, and a thread keeps at
    it.
    """
    node.client.config_set("appendonly", "yes")
    claim, patient = engine.claim(operation(), RETRY), store_for(RETRY)
    use(settings, node.url, timeout=1.0, prefix="idempotency:")
    with engine.execution(claim, RETRY) as execution:
        execution.verdict = Keep(RESPONSE)
        node.freeze()
    node.thaw()
    eventually(lambda: patient.read(claim.id).response == RESPONSE)


@pytest.mark.redis_server
def test_a_claim_without_enough_replicas_is_refused(node, settings):
    use(settings, node.url, durability="replicas", durability_timeout=0.1)
    mine = operation()
    with pytest.raises(StoreRefused, match="0 of 1 acknowledgements"):
        engine.claim(mine, RETRY)
    assert store_for(RETRY).read(mine.id) is None


@pytest.mark.redis_server
def test_a_takeover_without_enough_replicas_is_left_to_a_retry(node, settings):
    claim = claimed()
    use(
        settings,
        node.url,
        prefix="idempotency:",
        durability="replicas",
        durability_timeout=0.1,
    )
    store = store_for(RETRY)
    with store.try_lock(claim.id) as record, pytest.raises(StoreRefused):
        store.reassign(record, claim.operation, uuid4())
    left = store.read(claim.id)
    assert (left.status, left.token, left.attempts) == ("failed", None, 2)


@pytest.mark.redis_server
def test_a_response_without_enough_replicas_is_written_again(node, settings, tmp_path):
    claim = claimed()
    use(
        settings,
        node.url,
        prefix="idempotency:",
        durability="replicas",
        durability_timeout=0.8,
    )
    store = store_for(RETRY)

    def written():
        with suppress(StoreUnavailable):
            return store.complete(claim, RESPONSE)

    with pytest.raises(StoreUnavailable, match="0 of 1"):
        store.complete(claim, RESPONSE)
    with running_node(tmp_path, "--replicaof", "127.0.0.1", str(node.port)) as replica:
        eventually(written)
        assert replica.client.hget(store._key(claim.id), "status") == b"completed"


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({}, "set either url or client, not both"),
        ({"url": "redis://x", "durability": "replica"}, "it must be one of "),
        (
            {"url": "redis://x", "durability": "disk", "durability_timeout": 3},
            "durability_timeout is 3; it must be less",
        ),
    ],
)
def test_invalid_options_are_errors_that_say_why(settings, options, told):
    settings.IDEMPOTENCY = {
        "STORES": {"redis": {"BACKEND": BACKEND, "OPTIONS": options}}
    }
    with pytest.raises(ImproperlyConfigured) as refused:
        store_for(RETRY)
    assert told in str(refused.value)


def a_client():
    return redis.Redis.from_url(a_client.url)


@pytest.mark.parametrize("by", ["url", "client"])
def test_a_client_that_decodes_responses_is_refused(settings, redis_url, by):
    a_client.url = f"{redis_url}?decode_responses=True"
    use(
        settings,
        **(
            {"url": a_client.url} if by == "url" else {"client": f"{__name__}.a_client"}
        ),
    )
    settings.IDEMPOTENCY |= {"STORE": "redis", "MODE": "lease"}
    with pytest.raises(ImproperlyConfigured, match="decode_responses=True"):
        store_for(RETRY).read(uuid4())
    (message,) = found("E034")
    assert "decode_responses=True" in message.msg


def test_the_password_is_not_shown(settings):
    use(settings, url="redis://:hunter2@127.0.0.1:1/0")
    store = store_for(RETRY)
    assert "hunter2" not in repr(store) + repr(store.options)
    with pytest.raises(StoreUnavailable) as error:
        store.read(uuid4())
    assert "hunter2" not in str(error.value)


@pytest.mark.django_db
@pytest.mark.redis_server
def test_checks_tell_of_a_server_that_evicts_keys_or_is_down(node, settings):
    settings.IDEMPOTENCY |= {"STORE": "redis", "MODE": "lease"}
    assert ids_found("E034", "W033") == []
    node.client.config_set("maxmemory-policy", "allkeys-lru")
    assert ids_found("E034", "W033") == ["E034"]
    node.kill()
    assert ids_found("E034", "W033") == ["W033"]


@pytest.mark.usefixtures("on_redis")
def test_a_prefix_with_signs_of_patterns_lists_its_own_records_only(
    settings, redis_url
):
    use(settings, redis_url, prefix=f"[a*]?{uuid4().hex}:")
    claim = claimed()
    assert [record.id for record in store_for(RETRY).records()] == [claim.id]
    assert isinstance(store_for(RETRY).claim(claim.operation, uuid4()), Seen)
