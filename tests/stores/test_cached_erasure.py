"""Erasure and a cache in front: what is erased is replayed no more, or for a stated number of seconds."""

from __future__ import annotations

from uuid import uuid4

import pytest
from django.core.cache import caches
from django.core.management import call_command
from django.db import transaction

from django_idempotency import engine
from django_idempotency.maintenance import erase
from django_idempotency.outcomes import Claimed, Keep, Replay
from django_idempotency.stats.formatting import age
from django_idempotency.stores import cached, store_for
from tests.stores.test_cached import POLICY, RESPONSE, asked, broken, done, operation
from tests.support.callers import stop_heartbeat

pytestmark = pytest.mark.usefixtures("transactional_db")
FILES = "django.core.cache.backends.filebased.FileBasedCache"
MEMORY = "django.core.cache.backends.locmem.LocMemCache"
FAULTY = "tests.stores.test_cached.FaultyCache"
BOUND = 60.0  # twice max_age


@pytest.fixture(autouse=True)
def cache(settings, tmp_path):
    """``cache(backend)`` puts another cache in front."""

    def put(backend):
        location = str(tmp_path) if backend == FILES else uuid4().hex
        settings.CACHES = {"default": {"BACKEND": backend, "LOCATION": location}}

    put(FILES)
    settings.IDEMPOTENCY = {"STORES": {"default": {"BACKEND": "django_idempotency.stores.cached.CachedStore"}}}
    cached._guards.clear()
    yield put
    stop_heartbeat()


@pytest.fixture
def one():
    one = operation()
    done(one)
    assert asked(one)[1] == 0
    return one


def test_an_erased_response_is_replayed_no_more(one, capsys):
    call_command("idempotency_erase", "--scope", one.scope)
    assert capsys.readouterr().out.startswith("1 record erased; left: none. A retry")
    assert isinstance(engine.claim(one, POLICY), Claimed)


def test_an_erased_body_is_replayed_no_more(one):
    assert erase(one.scope, bodies=True).complete
    outcome, statements = asked(one)
    assert isinstance(outcome, Replay)
    assert (outcome.response.body, statements) == (None, 1)


@pytest.mark.parametrize("by_store", [False, True], ids=["idempotency_erase", "idempotency_store erase"])
def test_what_was_read_before_the_erasure_is_cached_no_more(one, by_store):
    caches["default"].clear()
    store = store_for(POLICY)
    read = store.read(one.id)
    if by_store:
        assert store.delete(read)
    else:
        assert erase(one.scope).complete
    store._keep_record(read)
    assert isinstance(engine.claim(one, POLICY), Claimed)


@pytest.mark.parametrize("bodies", [False, True])
def test_what_is_erased_before_it_is_cached_is_not_cached(bodies):
    one = operation()
    claim = engine.claim(one, POLICY)
    with engine.execution(claim, POLICY) as execution:
        # A hook of the project's, before the one that writes to the cache.
        transaction.on_commit(lambda: erase(one.scope, bodies=bodies))
        execution.settle(Keep(RESPONSE))
    outcome, statements = asked(one)
    assert statements > 0
    assert isinstance(outcome, Replay if bodies else Claimed)
    assert not bodies or outcome.response.body is None


def test_a_new_response_is_cached_after_an_erasure(one):
    erase(one.scope)
    done(one)
    assert asked(one)[1] == 0


def test_a_dry_run_leaves_the_cache_alone(one):
    assert erase(one.scope, dry_run=True).erased == 1
    assert asked(one)[1] == 0


def test_an_erasure_tells_of_a_cache_that_is_away(one, cache, monkeypatch, capsys):
    from tests.stores.test_cached import FaultyCache

    cache(FAULTY)
    monkeypatch.setattr(FaultyCache, "fault", staticmethod(broken))
    with pytest.raises(SystemExit) as ended:
        call_command("idempotency_erase", "--scope", one.scope)
    assert ended.value.code == 1
    assert f"it may replay them for another {age(BOUND)}." in capsys.readouterr().out


def test_an_erasure_tells_of_a_cache_in_each_process(one, cache):
    cache(MEMORY)
    erased = erase(one.scope)
    assert (erased.cached_for, erased.complete) == (BOUND, False)
