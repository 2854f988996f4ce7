"""A caller that waits for the first one's response."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from django.db import connections
from django.http import HttpResponse

from django_idempotency import engine, signals
from django_idempotency.engine.waiting import waiters
from tests.support.callers import Gate, entry_point, heard, paying, row
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
