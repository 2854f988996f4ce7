"""Erasure and a cache in front: what is erased is replayed no more, or for a stated
number of seconds.
"""

from __future__ import annotations

from uuid import uuid4

import pytest
from django.core.cache import caches
from django.core.management import call_command

from django_idempotency import engine
from django_idempotency.maintenance import erase
from django_idempotency.maintenance.formatting import age
from django_idempotency.stores import store_for
from django_idempotency.values.outcomes import Claimed, Replay
from tests.contrib.cached.test_cached import (
    POLICY,
    FaultyCache,
    asked,
    broken,
    done,
    operation,
    use,
)
from tests.support.callers import stop_heartbeat

pytestmark = pytest.mark.usefixtures("transactional_db")
FILES = "django.core.cache.backends.filebased.FileBasedCache"
MEMORY = "django.core.cache.backends.locmem.LocMemCache"
FAULTY = "tests.contrib.cached.test_cached.FaultyCache"
BOUND = 60.0  # twice max_age


@pytest.fixture(autouse=True)
def cache(settings, tmp_path):
    """``cache(backend)`` puts another cache in front."""

    def put(backend):
        location = str(tmp_path) if backend == FILES else uuid4().hex
        settings.CACHES = {"default": {"BACKEND": backend, "LOCATION": location}}

    put(FILES)
    use(settings)
    yield put
    stop_heartbeat()


@pytest.fixture
def one():
    one = operation()
    done(one)
    assert asked(one)[1] == 0
    return one


def test_an_erased_response_is_not_replayed(one, capsys):
    call_command("idempotency_privacy", "erase", "--scope", one.scope)
    assert capsys.readouterr().out.startswith("Erased: 1; left alone: none; ")
    assert isinstance(engine.claim(one, POLICY), Claimed)


def test_an_erased_body_is_not_replayed(one):
    assert erase(one.scope, bodies=True).complete
    outcome, statements = asked(one)
    assert isinstance(outcome, Replay)
    assert (outcome.response.body, statements) == (None, 1)


@pytest.mark.parametrize("by_store", [False, True], ids=["erase", "delete"])
def test_a_record_read_before_an_erasure_is_not_cached_after_it(one, by_store):
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
def test_a_response_erased_before_it_is_cached_is_not_cached(bodies):
    one = operation()
    done(one, hook=lambda: erase(one.scope, bodies=bodies))
    outcome, statements = asked(one)
    assert statements > 0
    assert isinstance(outcome, Replay if bodies else Claimed)
    assert not bodies or outcome.response.body is None


def test_a_new_response_is_cached_after_an_erasure(one):
    erase(one.scope)
    done(one)
    assert asked(one)[1] == 0


def test_a_dry_run_leaves_the_cache_alone(one):
    assert erase(one.scope, dry_run=True).rows == 1
    assert asked(one)[1] == 0


def test_an_erasure_reports_a_cache_that_is_unavailable(
    one, cache, monkeypatch, capsys
):
    cache(FAULTY)
    monkeypatch.setattr(FaultyCache, "fault", staticmethod(broken))
    with pytest.raises(SystemExit) as ended:
        call_command("idempotency_privacy", "erase", "--scope", one.scope)
    assert ended.value.code == 1
    assert f"may replay them for another {age(BOUND)}." in capsys.readouterr().out


def test_an_erasure_reports_a_cache_in_each_process(one, cache):
    cache(MEMORY)
    erased = erase(one.scope)
    assert (erased.cached_for, erased.complete) == (BOUND, False)
