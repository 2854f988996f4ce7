"""What the Redis store asks of the server, and how often; by which connections, and
what happens to broken ones.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import ExitStack
from uuid import uuid4

import pytest
import redis
from django.http import HttpResponse

from django_idempotency import engine
from django_idempotency.contrib.redis import client
from django_idempotency.contrib.redis.client import connection
from django_idempotency.contrib.testing.stores import RESPONSE
from django_idempotency.http.placement import idempotent
from django_idempotency.stores import store_for
from django_idempotency.values.exceptions import StoreRefused, StoreUnavailable
from django_idempotency.values.outcomes import Claimed, Replay
from django_idempotency.values.policy import Lease
from tests.contrib.redis.records import (
    HOLD,
    LEASE,
    RETRY,
    claimed,
    connections,
    done,
    operation,
    use,
    was_granted,
)
from tests.support.brokers import valkey_program
from tests.support.callers import SCOPE, post
from tests.support.loops import run
from tests.support.redis_servers import REDIS, running_node
from tests.support.waiting import eventually

pytestmark = pytest.mark.redis_server
COMMANDS = ("evalsha", "eval", "ping")


class Interrupted(Exception):
    pass


def client_id() -> int:
    """By which connection this thread asks."""
    return store_for(LEASE).connection.execute("CLIENT", "ID")


def test_a_first_request_is_two_commands_and_a_replay_is_one(node):
    done(LEASE)  # the server knows the scripts now

    def asked(act):
        before = node.client.info("commandstats")
        result = act()
        after = node.client.info("commandstats")
        counts = [_calls(after, name) - _calls(before, name) for name in COMMANDS]
        return result, sum(counts)

    claim, commands = asked(lambda: done(LEASE))  # which is too long to be renewed
    assert commands == 2
    assert asked(lambda: engine.claim(claim.operation, LEASE)) == (Replay(RESPONSE), 1)


def _calls(stats, command):
    return stats.get(f"cmdstat_{command}", {"calls": 0})["calls"]


@pytest.mark.parametrize("many", [False, True])
def test_replies_that_were_not_read_are_not_the_next_commands(node, monkeypatch, many):
    """As when a signal's handler raises, as that of a time limit does."""
    held, store = [claimed(), claimed()][: 1 + many], store_for(LEASE)
    lost = [Claimed(claim.operation, uuid4()) for claim in held]

    def interrupt(*_args, **_options):
        monkeypatch.undo()
        raise Interrupted

    store.renew(held)
    monkeypatch.setattr(redis.connection.Connection, "read_response", interrupt)
    with pytest.raises(Interrupted):
        store.renew(held)
    assert store.renew(lost) == set()


def test_a_connection_that_the_server_has_closed_is_replaced(node):
    before = client_id()
    node.client.client_kill_filter(_id=str(before))
    assert isinstance(claimed(), Claimed)
    assert client_id() != before


def test_a_command_that_timed_out_is_not_tried_once_more(node, settings):
    use(settings, node.url, timeout=1.0)
    eventually(was_granted)
    with node.client as asking:
        before = connections(asking)
        node.freeze()
        with pytest.raises(StoreUnavailable, match="TimeoutError"):
            store_for(LEASE).read(uuid4())
        node.thaw()
        assert connections(asking) == before


def test_a_redis_that_is_frozen_is_not_asked_for_each_new_key(
    node, settings, monkeypatch
):
    """Each request would wait for it. Owners ask it all the same."""
    claim = claimed()
    use(settings, node.url, timeout=1.0, prefix="idempotency:")
    eventually(was_granted)
    monkeypatch.setattr(client, "PAUSE", 600.0)
    node.freeze()
    for said in ("TimeoutError", "did not respond in time a moment ago"):
        with pytest.raises(StoreUnavailable, match=said):
            claimed()
    with pytest.raises(StoreUnavailable, match="a moment ago"):
        store_for(LEASE).read(uuid4())
    with pytest.raises(StoreUnavailable, match="TimeoutError"):
        store_for(LEASE).renew([claim])
    node.thaw()
    paused = store_for(LEASE).connection._paused_until

    def responds():
        """Once the pause is over; but a busy machine's server may be late again."""
        paused[""] = time.monotonic()
        return was_granted()

    eventually(responds)
    assert not paused


def test_a_connection_to_a_former_master_is_given_up(settings, tmp_path):
    """Its address leads to another server by now."""
    address = tmp_path / "active.sock"
    with ExitStack() as stack:
        sockets = [tmp_path / "a.sock", tmp_path / "b.sock"]
        old, new = (
            stack.enter_context(running_node(tmp_path, "--unixsocket", str(path)))
            for path in sockets
        )
        address.symlink_to(sockets[0])
        use(settings, f"unix://{address}")
        claimed()
        old.client.replicaof("127.0.0.1", str(new.port))
        eventually(lambda: old.client.info("replication")["role"] == "slave")
        address.unlink()
        address.symlink_to(sockets[1])
        with pytest.raises(StoreUnavailable, match="ReadOnlyError"):
            claimed()
        assert isinstance(claimed(), Claimed)
        connection.cache_clear()


def lose_a_reply(monkeypatch) -> list[object]:
    """Lose the next reply and its connection, so that redis-py sends the command again
    on a new one.
    """
    real, lost = redis.connection.Connection.read_response, []

    def lose_one(connection, *args, **options):
        reply = real(connection, *args, **options)
        if not lost:
            lost.append(reply)
            connection.disconnect()
            raise redis.exceptions.ConnectionError("the reply was lost")
        return reply

    monkeypatch.setattr(redis.connection.Connection, "read_response", lose_one)
    return lost


def test_a_takeover_whose_reply_was_lost_is_this_attempts(node, monkeypatch):
    claim = claimed()
    store = store_for(LEASE)
    assert store.fail(claim, "failed")
    record, token = store.read(claim.id), uuid4()
    lost = lose_a_reply(monkeypatch)
    assert store.reassign(record, claim.operation, token).attempt == 2
    assert lost == [1]
    assert store.read(claim.id).token == token


@pytest.mark.parametrize(
    "program",
    [REDIS, pytest.param(valkey_program(), marks=pytest.mark.valkey)],
    ids=["Redis", "Valkey"],
)
def test_a_claim_whose_reply_was_lost_still_needs_its_replica(
    program, settings, tmp_path, monkeypatch
):
    with ExitStack() as stack:
        options = ("--repl-diskless-sync-delay", "0")
        master, replica = (
            stack.enter_context(running_node(tmp_path, *options, program=program))
            for _ in range(2)
        )
        replica.client.replicaof("127.0.0.1", str(master.port))
        asking = stack.enter_context(master.client)
        eventually(lambda: asking.set("any", "write") and asking.wait(1, 500))
        use(
            settings,
            master.url,
            durability="replicas",
            durability_timeout=0.9,
        )
        eventually(was_granted)  # a busy machine's replica may be late
        replica.freeze()
        mine, lost = operation(), lose_a_reply(monkeypatch)
        with pytest.raises(StoreRefused, match="0 of 1 acknowledgements"):
            store_for(LEASE).claim(mine, uuid4())
        assert lost
        assert store_for(LEASE).read(mine.id) is None


@pytest.mark.valkey
def test_a_claim_whose_reply_was_lost_still_needs_the_disk(
    settings, tmp_path, monkeypatch
):
    options = ("--appendonly", "yes", "--appendfsync", "always")
    with running_node(tmp_path, *options, program=valkey_program()) as node:
        use(settings, node.url, durability="disk")
        eventually(was_granted)  # nor is a busy machine's disk always in time
        node.client.config_set("appendfsync", "no")
        lost = lose_a_reply(monkeypatch)
        with pytest.raises(StoreRefused, match="0 of 1 acknowledgements"):
            store_for(LEASE).claim(operation(), uuid4())
        assert lost


def test_a_redis_that_hangs_does_not_stop_the_event_loop(
    transactional_db, settings, node
):
    @idempotent(mode=Lease(seconds=300), store="redis", scope=SCOPE)
    async def view(request):
        return HttpResponse(status=201)

    async def main(thawed_at=None):
        node.freeze()
        task, ticks = asyncio.ensure_future(view(post())), 0
        while not task.done():
            await asyncio.sleep(0.01)
            ticks += 1
            if ticks == thawed_at:
                node.thaw()
        return (await task).status_code, ticks

    # a loop that stands still has one tick, once the time is over
    status, ticks = run(lambda: main(thawed_at=40))
    assert (status, ticks >= 40) == (201, True)
    use(settings, node.url, timeout=0.4)
    assert run(main)[0] == 503


def test_finding_unfinished_records_costs_the_same_however_many_have_ended(node):
    def asked():
        before = node.client.info("commandstats")["cmdstat_evalsha"]["calls"]
        found = {record.id for record in store_for(HOLD).unfinished()}
        return (
            found,
            node.client.info("commandstats")["cmdstat_evalsha"]["calls"] - before,
        )

    held = claimed(HOLD)
    store_for(HOLD).fail(held, "who knows", on_hold=True)
    asked()  # the server knows the scripts now
    alone = asked()
    for _ in range(500):
        done()
    assert alone[0] == {held.id}
    assert asked() == alone


def test_records_on_hold_are_found_behind_any_number_in_progress(node, monkeypatch):
    monkeypatch.setattr("django_idempotency.contrib.redis.store.MOST_UNFINISHED", 1)
    store, progressing = store_for(HOLD), [claimed(HOLD) for _ in range(600)]
    store.fail(progressing[-1], "who knows", on_hold=True)
    found = list(store.unfinished())
    assert [record.id for record in found if record.on_hold] == [progressing[-1].id]
    assert len(found) <= 256


def test_an_abandoned_record_stops_being_unfinished_when_it_expires(node):
    store, claim = store_for(RETRY), claimed()
    index = store._key(claim.id)[:-32]
    assert node.client.zrange(index, 0, -1) == [claim.id.hex.encode()]
    node.client.delete(store._key(claim.id))  # as its expiry does
    assert list(store.unfinished()) == []
    assert node.client.exists(index) == 0
