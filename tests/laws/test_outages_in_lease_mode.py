"""L6 in lease mode: after an outage of the store owners have a heartbeat's time, and a
finished run has precedence.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

import psycopg
import pytest
from django.db import connection

from django_idempotency import maintenance
from django_idempotency.engine import leases
from django_idempotency.models import IdempotencyRecord
from django_idempotency.stores import store_for
from django_idempotency.stores.database import DatabaseStore
from django_idempotency.values.policy import Lease, Policy
from tests.support.callers import (
    Gate,
    claim,
    effects,
    entry_point,
    is_replay,
    paying,
    record,
)
from tests.support.owner_process import holding
from tests.support.proxy import Proxy
from tests.support.sql import run_sql
from tests.support.threads import in_threads
from tests.support.views_of_laws import completed
from tests.support.waiting import eventually

pytestmark = [pytest.mark.slow, pytest.mark.postgresql]

LEASE, SHORT = 15, 1.5
TABLE = IdempotencyRecord._meta.db_table
LEFT = f"SELECT count(*) FROM {TABLE} WHERE locked_until > clock_timestamp()"
LAPSE = f"""
UPDATE {TABLE} SET locked_at = locked_at - (locked_until - now()), locked_until = now()
WHERE locked_until > now()
"""

Outage = tuple[Callable[[Proxy], object], Callable[[Proxy], object]]
OUTAGES: dict[str, Outage] = {
    "unreachable": (Proxy.go_away, Proxy.come_back),
    "frozen": (Proxy.freeze, Proxy.thaw),
}
in_all_outages = pytest.mark.parametrize("outage", OUTAGES.values(), ids=OUTAGES)


@contextmanager
def behind(proxy: Proxy) -> Iterator[psycopg.Connection]:
    """A connection for the test, past the proxy."""
    host, port = proxy.upstream
    settings = connection.settings_dict
    given = {
        "dbname": settings["NAME"],
        "user": settings["USER"],
        "password": settings["PASSWORD"],
    }
    with psycopg.connect(host=host, port=port, autocommit=True, **given) as direct:
        # an outage may have frozen a heartbeat that has the row locked
        direct.execute("SET lock_timeout = '1s'")
        yield direct


def until_its_lease_has_run_out(direct: psycopg.Connection) -> None:
    """After a heartbeat that failed, the rest of it takes no time."""
    eventually(could_not_be_renewed)
    eventually(lambda: has_lapsed(direct))


def could_not_be_renewed() -> bool:
    return any(keeper._leases and keeper._failed for keeper in leases._keepers.values())


def has_lapsed(direct: psycopg.Connection) -> bool:
    with suppress(psycopg.errors.LockNotAvailable):
        direct.execute(LAPSE)
    return direct.execute(LEFT).fetchone() == (0,)


def retried(view: Gate, **lease: Any) -> set[int]:
    """What a storm of retries gets at once."""
    return {
        answer.status_code for answer in in_threads(4, lambda _: ask(view, **lease))
    }


def ask(view: Gate, **lease: Any) -> Any:
    return entry_point(view, mode=Lease(seconds=LEASE, **lease))()


def running(view: Gate, **lease: Any) -> AbstractContextManager[Future[Any]]:
    return view.running(mode=Lease(seconds=LEASE, **lease))


@in_all_outages
def test_a_live_owner_has_its_lease_again_after(proxy, outage):
    begin, end = outage
    view = Gate()
    with behind(proxy) as direct, running(view) as answer:
        begin(proxy)
        until_its_lease_has_run_out(direct)
        end(proxy)
        assert retried(view) == {409}
        eventually(lambda: direct.execute(LEFT).fetchone() == (1,))
        assert retried(view) == {409}
    assert (answer.result().status_code, effects()) == (201, 1)


@pytest.mark.parametrize("on_crash", ["retry", "hold"])
def test_a_finished_run_is_stored_before_another_begins(proxy, on_crash):
    view = Gate()
    with behind(proxy) as direct, running(view, on_crash=on_crash) as answer:
        proxy.go_away()
        view.let_go.set()
        eventually(answer.done)
        until_its_lease_has_run_out(direct)
        proxy.come_back()
        assert 409 in retried(view, on_crash=on_crash) or is_replay(ask(view))
    replayed = eventually(
        lambda: is_replay(retry := ask(view, on_crash=on_crash)) and retry
    )
    assert (replayed.content, effects()) == (answer.result().content, 1)


def test_the_reaper_leaves_a_live_owner_its_lease(proxy):
    view = Gate()
    with behind(proxy) as direct, running(view) as answer:
        proxy.go_away()
        until_its_lease_has_run_out(direct)
        proxy.come_back()
        reaped = in_threads(1, lambda _: maintenance.reap())[0]
    assert (reaped.done["failed"], answer.result().status_code, effects()) == (
        0,
        201,
        1,
    )


@pytest.mark.usefixtures("payer")
def test_a_dead_owner_is_taken_over_even_if_each_lookup_takes_long(monkeypatch):
    """As on a machine that is busy, and longer than short leases are renewed in."""
    look = DatabaseStore.leases_left

    def slow(store, records):
        run_sql(f"SELECT pg_sleep({SHORT / 3})")
        return look(store, records)

    store = store_for(Policy(mode=Lease(seconds=SHORT)))
    dead = claim(policy=store.policy)
    monkeypatch.setattr(type(store), "leases_left", slow)
    retry = entry_point(paying, mode=store.policy.mode)
    assert eventually(lambda: completed(retry()))
    assert (effects(), record().attempts) == (1, dead.attempt + 1)


def test_an_outage_during_the_time_that_owners_have_restarts_it(proxy):
    """Two outages, with a moment between that is too short for a heartbeat."""
    view = Gate()
    with behind(proxy) as direct, running(view) as answer:
        proxy.go_away()
        until_its_lease_has_run_out(direct)
        proxy.come_back()
        assert retried(view) == {409}
        proxy.go_away()
        threading.Event().wait(LEASE * 2 / 3)  # longer than a lapsed lease is watched
        proxy.come_back()
        assert retried(view) == {409}
    assert (answer.result().status_code, effects()) == (201, 1)


@pytest.mark.usefixtures("payer")
def test_a_dead_owner_is_taken_over_soon_after_its_lease():
    with holding(mode=Lease(seconds=LEASE)) as owner:
        owner.kill()
    run_sql(LAPSE)
    (view := Gate()).let_go.set()
    eventually(lambda: completed(ask(view)))
    assert (effects(), record().attempts) == (1, 2)
