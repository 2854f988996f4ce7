"""A caller that waits for the first one's response."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from django.db import connection, connections
from django.db.backends.signals import connection_created
from django.http import HttpResponse

from django_idempotency import engine, signals
from django_idempotency.engine.waiting import waiters
from tests.support.aliases import another_alias
from tests.support.callers import Gate, entry_point, heard, is_replay, mode_of, paying, row
from tests.support.views_of_laws import in_both_modes, row_locks
from tests.support.waiting import eventually

pytestmark = pytest.mark.usefixtures("payer")


@row_locks
@in_both_modes
def test_a_waiter_gives_up_in_time_and_it_is_counted(mode):
    with Gate().running(mode=mode) as first, heard(signals.request_rejected) as timeouts:
        before = row()
        answer = entry_point(paying, mode=mode, wait=0.2)()
        assert row() == before, "the claim is not taken along"
    assert (answer.status_code, [sent["reason"] for sent in timeouts]) == (409, ["wait_timeout"])
    assert first.result().status_code == 201


@row_locks
def test_a_waiter_asks_less_and_less_often(monkeypatch):
    gate, pauses = Gate(), []

    def pass_over(seconds):
        pauses.append(seconds)
        if len(pauses) == 6:
            gate.let_go.set()

    with gate.running(mode="lease"):
        monkeypatch.setattr(engine.waiting.time, "sleep", pass_over)
        entry_point(paying, mode="lease", wait=30)()
    assert pauses[:6] == [0.02, 0.04, 0.08, 0.16, 0.25, 0.25]


@row_locks
@in_both_modes
def test_a_waiter_has_no_connection_while_it_waits(mode, monkeypatch):
    """It opens one to ask at first, and one when the owner has ended; in between one thread looks for all."""
    gate, held, opened, sleep = Gate(), [], [], time.sleep
    waiter = threading.current_thread()

    def look_and_sleep(seconds):
        if threading.current_thread() is waiter:
            held.append(connection.connection is not None)
            if len(held) == 4:
                gate.let_go.set()
        sleep(seconds)

    def count(**named):
        if threading.current_thread() is waiter:
            opened.append(named)

    with gate.running(mode=mode_of(mode, takeover_grace=0)) as first:
        connection.close()
        monkeypatch.setattr(engine.waiting.time, "sleep", look_and_sleep)
        connection_created.connect(count)
        try:
            answer = entry_point(paying, mode=mode_of(mode, takeover_grace=0), wait=30)()
        finally:
            connection_created.disconnect(count)
    assert (answer.content, is_replay(answer)) == (first.result().content, True)
    assert len(held) >= 4
    assert not any(held)
    assert len(opened) == 2


@pytest.mark.postgresql
@pytest.mark.psycopg_pool
@in_both_modes
def test_waiters_leave_the_pool_to_others(mode, pooled):
    """The owner has one of two connections; without giving theirs back, three waiters could not all ask."""
    policy = {"mode": mode, "using": pooled}
    with ThreadPoolExecutor(3) as pool:
        with Gate().running(**policy) as first:
            waiting = [pool.submit(wait_for_owner, **policy) for _ in range(3)]
            eventually(lambda: len(waiters) == 3)
            with connections[pooled].cursor() as cursor:
                cursor.execute("SELECT 1")
            connections[pooled].close()
        answers = [answer.result(30) for answer in waiting]
    assert [answer.content for answer in answers] == [first.result().content] * 3
    assert all(map(is_replay, answers))


def reset_session(raw):
    raw.execute("RESET ALL")
    raw.commit()


@pytest.mark.postgresql
@pytest.mark.psycopg_pool
@pytest.mark.parametrize(("reset", "is_kept"), [(None, False), (reset_session, True)], ids=["none", "reset"])
def test_a_session_is_not_passed_on_through_a_pool(pooled, reset, is_kept):
    """Middleware sets the session for its request, and undoes it once the view has responded: too late for others."""
    connections[pooled].settings_dict["OPTIONS"]["pool"]["reset"] = reset
    ids = []

    def wait():
        ids.append(ask(pooled, "SELECT pg_backend_pid() FROM set_config('app.tenant', '42', false)"))
        return wait_for_owner(mode="lease", using=pooled)

    with ThreadPoolExecutor(1) as pool, Gate().running(mode="lease", using=pooled):
        waiter = pool.submit(wait)
        free = connections[pooled].pool
        eventually(lambda: len(waiters) == 1 and free.get_stats().get("pool_available"))
        seen = ask(pooled, "SELECT coalesce(current_setting('app.tenant', true), '')")
        same = ask(pooled, "SELECT pg_backend_pid()") == ids[0]
        connections[pooled].close()
    assert is_replay(waiter.result(30))
    assert (seen, same) == ("", is_kept)


def ask(alias, statement):
    with connections[alias].cursor() as cursor:
        cursor.execute(statement)
        return cursor.fetchone()[0]


def wait_for_owner(**policy):
    try:
        return entry_point(paying, wait=30, **policy)()
    finally:
        connections.close_all()


@pytest.fixture
def pooled():
    """An alias of the default database, with a pool of two connections."""
    options = {**connection.settings_dict["OPTIONS"], "pool": {"min_size": 0, "max_size": 2, "timeout": 5}}
    with another_alias("pooled", OPTIONS=options, CONN_MAX_AGE=0) as alias:
        yield alias
        connections[alias].close()
        connections[alias].close_pool()


@row_locks
@in_both_modes
def test_a_waiter_runs_once_the_owner_has_failed(mode):
    def fail(request):
        gate(request)
        return HttpResponse(status=500)

    gate = Gate()
    with ThreadPoolExecutor(2) as pool:
        owner = pool.submit(in_thread, fail, mode=mode)
        assert gate.entered.wait(30)
        waiter = pool.submit(in_thread, paying, mode=mode, wait=30)
        eventually(lambda: len(waiters) == 1)
        gate.let_go.set()
        assert [owner.result(30).status_code, waiter.result(30).status_code] == [500, 201]
    assert len(waiters) == 0


def in_thread(view, **policy):
    try:
        return entry_point(view, **policy)()
    finally:
        connections.close_all()
