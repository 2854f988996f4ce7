"""The Redis store finds its records in progress and on hold without looking at those that have ended."""

from __future__ import annotations

import pytest

from django_idempotency.stores import store_for
from tests.contrib.redis.records import HOLD, RETRY, claimed, done

pytestmark = pytest.mark.redis_server


def test_finding_unfinished_records_costs_no_more_however_many_have_ended(node):
    def asked():
        before = node.client.info("commandstats")["cmdstat_evalsha"]["calls"]
        found = {record.id for record in store_for(HOLD).unfinished()}
        return found, node.client.info("commandstats")["cmdstat_evalsha"]["calls"] - before

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


def test_an_abandoned_record_that_has_expired_is_no_longer_unfinished(node):
    store, claim = store_for(RETRY), claimed()
    index = store._key(claim.id)[:-32]
    assert node.client.zrange(index, 0, -1) == [claim.id.hex.encode()]
    node.client.delete(store._key(claim.id))  # as its expiry does
    assert list(store.unfinished()) == []
    assert node.client.exists(index) == 0
