"""L6 in lease mode: after an outage of the store owners have a heartbeat's time, and a finished run has precedence."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest
from django.db import connection, connections
from django.http import HttpResponse

from django_idempotency import maintenance
from django_idempotency.models import IdempotencyRecord
from django_idempotency.policy import Lease
from tests.support.callers import effects, entry_point, is_replay, paying, record
from tests.support.proxy import Proxy
from tests.support.threads import in_threads
from tests.support.waiting import eventually

pytestmark = pytest.mark.postgresql

LEASE = 5
TABLE = IdempotencyRecord._meta.db_table
LEFT = f"SELECT count(*) FROM {TABLE} WHERE locked_until > clock_timestamp()"

Outage = tuple[Callable[[Proxy], object], Callable[[Proxy], object]]
OUTAGES: dict[str, Outage] = {
    "unreachable": (Proxy.go_away, Proxy.come_back),
    "frozen": (Proxy.freeze, Proxy.thaw),
}
in_all_outages = pytest.mark.parametrize("outage", OUTAGES.values(), ids=OUTAGES)


class Run:
    """A view that says when it runs; its first run ends when it is let go."""

    def __init__(self) -> None:
        self.runs: list[str] = []
        self.entered, self.let_go = threading.Event(), threading.Event()

    def __call__(self, request: Any) -> HttpResponse:
        self.runs.append("run")
        response = paying(request)
        if not self.entered.is_set():
            self.entered.set()
            assert self.let_go.wait(60)
        return response


@contextmanager
def behind(proxy: Proxy) -> Iterator[psycopg.Connection]:
    """A connection for the test, past the proxy."""
    host, port = proxy.upstream
    settings = connection.settings_dict
    given = {"dbname": settings["NAME"], "user": settings["USER"], "password": settings["PASSWORD"]}
    with psycopg.connect(host=host, port=port, autocommit=True, **given) as direct:
        yield direct


@contextmanager
def running(view: Run, **policy: Any) -> Iterator[list[Any]]:
    """The view runs in a thread with a connection of its own; its answer is in the list at the end."""
    answers: list[Any] = []

    def send() -> None:
        try:
            answers.append(entry_point(view, **{"mode": Lease(seconds=LEASE)} | policy)())
        finally:
            connections.close_all()

    thread = threading.Thread(target=send)
    thread.start()
    try:
        assert view.entered.wait(30)
        yield answers
    finally:
        view.let_go.set()
        thread.join(60)


def until_its_lease_has_run_out(direct: psycopg.Connection) -> None:
    eventually(lambda: direct.execute(LEFT).fetchone() == (0,))


def retried(view: Run, **policy: Any) -> list[int]:
    """What a storm of retries gets at once."""

    def send(_number: int) -> Any:
        return entry_point(view, **{"mode": Lease(seconds=LEASE)} | policy)()

    return [answer.status_code for answer in in_threads(4, send)]


@in_all_outages
def test_a_live_owner_has_its_lease_again_after(proxy, outage):
    begin, end = outage
    view = Run()
    with behind(proxy) as direct, running(view) as answers:
        begin(proxy)
        until_its_lease_has_run_out(direct)
        end(proxy)
        assert set(retried(view)) == {409}
        eventually(lambda: direct.execute(LEFT).fetchone() == (1,))
        assert set(retried(view)) == {409}
        view.let_go.set()
    assert (view.runs, answers[0].status_code, effects()) == (["run"], 201, 1)


@pytest.mark.parametrize("on_crash", ["retry", "hold"])
def test_a_finished_run_is_stored_before_another_begins(proxy, on_crash):
    view = Run()
    with behind(proxy) as direct, running(view, mode=Lease(seconds=LEASE, on_crash=on_crash)) as answers:
        proxy.go_away()
        view.let_go.set()
        eventually(lambda: answers)
        until_its_lease_has_run_out(direct)
        proxy.come_back()
        assert 409 in retried(view, mode=Lease(seconds=LEASE, on_crash=on_crash)) or is_replay(
            entry_point(view, mode="lease")()
        )
    replayed = eventually(lambda: _replay(view, on_crash))
    assert (view.runs, replayed.content, effects()) == (["run"], answers[0].content, 1)


def _replay(view: Run, on_crash: str) -> Any:
    answer = entry_point(view, mode=Lease(seconds=LEASE, on_crash=on_crash))()
    return answer if is_replay(answer) else None


def test_the_reaper_leaves_a_live_owner_its_lease(proxy):
    view = Run()
    with behind(proxy) as direct, running(view) as answers:
        proxy.go_away()
        until_its_lease_has_run_out(direct)
        proxy.come_back()
        reaped = in_threads(1, lambda _: maintenance.reap())[0]
        view.let_go.set()
    assert (reaped.done["failed"], view.runs, answers[0].status_code) == (0, ["run"], 201)


def test_an_outage_during_the_time_that_owners_have_begins_it_anew(proxy):
    """Two outages, with a moment between that is too short for a heartbeat."""
    view = Run()
    with behind(proxy) as direct, running(view) as answers:
        proxy.go_away()
        until_its_lease_has_run_out(direct)
        proxy.come_back()
        assert set(retried(view)) == {409}
        proxy.go_away()
        threading.Event().wait(LEASE)
        proxy.come_back()
        assert set(retried(view)) == {409}
        view.let_go.set()
    assert (view.runs, answers[0].status_code) == (["run"], 201)


@pytest.mark.usefixtures("payer")
def test_a_dead_owner_is_taken_over_soon_after_its_lease():
    from tests.support.owner_process import holding

    with holding(mode=Lease(seconds=LEASE)) as owner:
        owner.kill()
    view = Run()
    view.let_go.set()
    answer = eventually(lambda: _success(view))
    assert (answer.status_code, view.runs, record().attempts) == (201, ["run"], 2)


def _success(view: Run) -> Any:
    answer = entry_point(view, mode=Lease(seconds=LEASE))()
    return answer if answer.status_code == 201 else None
