"""A cache in front of the database: replays without a statement, and faults that cost
speed and nothing else.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from uuid import uuid4

import pytest
from django.core.cache import caches
from django.core.cache.backends import locmem
from django.core.cache.backends.locmem import LocMemCache
from django.db import DEFAULT_DB_ALIAS, connection, connections, transaction
from django.test.utils import CaptureQueriesContext

from django_idempotency import engine
from django_idempotency.contrib import cached
from django_idempotency.contrib.testing.stores import RESPONSE, StoreContract
from django_idempotency.http.placement import idempotent
from django_idempotency.models import IdempotencyRecord, Status
from django_idempotency.stores import store_for
from django_idempotency.stores.database import DatabaseStore
from django_idempotency.values.outcomes import (
    Claimed,
    Keep,
    Mismatch,
    Operation,
    Replay,
    StoredResponse,
)
from django_idempotency.values.policy import Policy
from tests.http.test_may_replay import ALLOWED, by_header, holds, is_refused
from tests.support.callers import is_replay, stop_heartbeat
from tests.support.sql import run_sql
from tests.support.views import Runs
from tests.support.waiting import eventually

pytestmark = pytest.mark.usefixtures("transactional_db")
POLICY = Policy()
BACKEND = "django_idempotency.contrib.cached.CachedStore"


def faulty(name):
    sound = getattr(LocMemCache, name)

    def act(cache, *args, **named):
        return sound(cache, *args, **named) if cache.fault is None else cache.fault()

    return act


class FaultyCache(LocMemCache):
    fault = None
    get, add, set = map(faulty, ("get", "add", "set"))


@pytest.fixture(autouse=True)
def cached_store(settings, monkeypatch):
    name = uuid4().hex
    settings.CACHES = {
        "default": {"BACKEND": f"{__name__}.FaultyCache", "LOCATION": name}
    }
    use(settings)
    yield
    FaultyCache.fault = None
    stop_heartbeat()


def use(settings, **options):
    settings.IDEMPOTENCY = {
        "STORES": {"default": {"BACKEND": BACKEND, "OPTIONS": options}}
    }
    cached._guards.clear()


class TestBehindACache(StoreContract):
    pass


def operation(body: bytes = b"1" * 32, key: str = "") -> Operation:
    return Operation("test", key or str(uuid4()), body, "POST", "/")


def done(
    one: Operation,
    response: StoredResponse = RESPONSE,
    policy: Policy = POLICY,
    hook: Callable[[], object] = lambda: None,
) -> None:
    """``hook``: the project's, which comes before the one that writes to the cache."""
    claim = engine.claim(one, policy)
    assert isinstance(claim, Claimed)
    with engine.execution(claim, policy) as execution:
        transaction.on_commit(hook)
        execution.verdict = Keep(response)


def asked(one: Operation):
    """The outcome, and how many statements it took."""
    with CaptureQueriesContext(connection) as sent:
        return engine.claim(one, POLICY), len(sent)


def test_a_response_that_was_rolled_back_is_not_served():
    one = operation()
    claim = engine.claim(one, POLICY)
    store = store_for(POLICY)
    with transaction.atomic():
        assert store.complete(store.lock(claim) or claim, RESPONSE)
        transaction.set_rollback(True)
    assert store._cached(one) is None


def test_a_first_request_asks_the_cache_once_and_writes_to_it_once():
    calls = []
    FaultyCache.fault = staticmethod(lambda: calls.append(1) or True)
    done(operation())
    assert len(calls) == 2


def test_a_deleted_record_is_served_for_max_age_seconds_at_most(settings, monkeypatch):
    use(settings, max_age=100)
    one = operation()
    done(one)
    IdempotencyRecord.objects.filter(pk=one.id).delete()
    assert asked(one)[0] == Replay(RESPONSE)
    clock = SimpleNamespace(time=lambda: time.time() + 100)
    monkeypatch.setattr(locmem, "time", clock)
    assert isinstance(asked(one)[0], Claimed)


def test_a_response_read_from_the_database_leaves_a_cached_one_alone():
    one = operation()
    done(one)
    store_for(POLICY)._keep(one, Status.COMPLETED, StoredResponse(200, (), b"old"), 100)
    assert asked(one)[0] == Replay(RESPONSE)


def test_the_response_of_a_new_run_replaces_that_of_a_deleted_record():
    one, other = operation(), StoredResponse(200, (), b"new")
    done(one)
    IdempotencyRecord.objects.filter(pk=one.id).delete()
    claim = DatabaseStore.bind(POLICY, one, "default", None).claim(one, uuid4())
    with engine.execution(claim, POLICY) as execution:
        execution.verdict = Keep(other)
    assert asked(one) == (Replay(other), 0)


def test_a_long_body_and_an_old_record_are_not_cached():
    one = operation()
    done(one, StoredResponse(200, (), b"x" * (64 * 1024 + 1)))
    assert asked(one)[1] == 1
    store_for(POLICY)._keep(one, Status.COMPLETED, RESPONSE, 0.5)
    assert store_for(POLICY)._cached(one) is None


def later(execute, *details):
    found = execute(*details)
    time.sleep(1.1)
    return found


def test_a_response_that_was_long_on_its_way_from_the_database_is_not_cached(settings):
    use(settings, max_age=1)
    one = operation()
    done(one)
    caches["default"].clear()
    with connection.execute_wrapper(later):
        assert engine.claim(one, POLICY) == Replay(RESPONSE)
    assert store_for(POLICY)._cached(one) is None


def test_a_response_whose_hooks_took_long_is_not_cached(settings):
    use(settings, max_age=1)
    one = operation()
    done(one, hook=lambda: time.sleep(1.1))
    assert store_for(POLICY)._cached(one) is None
    assert asked(one) == (Replay(RESPONSE), 1)


def test_an_entry_does_not_outlive_the_retention_of_its_record():
    one, policy = operation(), Policy(retention=1)
    done(one, policy=policy)
    eventually(lambda: isinstance(engine.claim(one, policy), Claimed), within=60)


def broken():
    raise ConnectionError("no cache")


def slow():
    time.sleep(0.3)


@pytest.mark.parametrize(
    "fault",
    [broken, slow, lambda: b"x" * 99, lambda: (0, "an entry of another version")],
    ids=["down", "slow", "bytes", "another version"],
)
def test_a_cache_in_whatever_state_costs_speed_alone(fault, monkeypatch):
    monkeypatch.setattr(cached, "PATIENCE", 0.25)
    one = operation()
    FaultyCache.fault = staticmethod(fault)
    done(one)
    assert asked(one)[0] == Replay(RESPONSE)
    assert asked(operation(b"2" * 32, one.key))[0] == Mismatch()


HEADERS, BODY = 7, 8  # places in an entry


@pytest.mark.parametrize("wrong", [None, -1, "x", (), [("a", 5)]])
def test_a_damaged_entry_counts_as_a_miss(wrong, caplog):
    one = operation()
    done(one)
    entry = caches["default"].get(cached._key(one.id, DEFAULT_DB_ALIAS))
    damaged = [entry[:-1]] + [
        (*entry[:place], wrong, *entry[place + 1 :])
        for place in range(len(entry))
        if (place, wrong) not in ((HEADERS, ()), (BODY, None))
    ]
    for each in damaged:
        FaultyCache.fault = staticmethod(lambda: each)  # noqa: B023
        assert asked(one) == (Replay(RESPONSE), 1), each
    assert "its entry in the cache 'default' is damaged" in caplog.text
    assert {entry.record_id for entry in caplog.records} == {str(one.id)}


@pytest.mark.parametrize("fault", [broken, slow], ids=["fails", "is slow"])
def test_a_cache_that_fails_or_is_slow_is_left_alone_for_a_while(fault, monkeypatch):
    monkeypatch.setattr(cached, "PATIENCE", 0.25)
    monkeypatch.setattr(cached, "PAUSE", 600.0)
    calls = []
    FaultyCache.fault = staticmethod(lambda: calls.append(1) or fault())
    one = operation()
    done(one)
    for _ in range(5):
        asked(one)
    assert len(calls) == 1


def test_a_response_is_replayed_to_its_tenant_only(monkeypatch):
    of = operation()
    wrapper = connections[DEFAULT_DB_ALIAS]
    monkeypatch.setattr(wrapper, "schema_name", "one", raising=False)
    done(of)
    store = store_for(POLICY)
    assert store._cached(of).response == RESPONSE
    wrapper.schema_name = "two"
    assert store._cached(of) is None


@pytest.mark.postgresql
def test_a_cache_that_can_not_tell_schemas_apart_is_left_alone(monkeypatch, caplog):
    monkeypatch.setattr(cached, "_first_schemas", {})
    monkeypatch.setattr(cached, "_several_schemas", set())
    of = operation()
    done(of)
    run_sql("SET search_path = pg_catalog, public")
    try:
        done(operation())
        assert store_for(POLICY)._cached(of) is None
    finally:
        run_sql("RESET search_path")
    assert "several schemas (public; pg_catalog, public)" in caplog.text


def test_a_store_behind_a_cache_asks_before_a_replay(call):
    runs = Runs()
    view = idempotent(may_replay=by_header)(runs.view)
    holds(lambda **options: call(view, **options), runs)
    IdempotencyRecord.objects.all().delete()
    assert is_refused(call(view)), "from the cache, too"
    assert is_replay(call(view, headers={ALLOWED: "yes"}))
