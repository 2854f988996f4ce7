"""Which keys a policy lets in, how many callers may wait for one, and when those that
may not come back.
"""

from __future__ import annotations

import itertools
import os
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial

import pytest
from django.db import connections
from django.http import HttpResponse

from django_idempotency import engine, signals
from django_idempotency.engine.waiting import waiters
from django_idempotency.http.placement import idempotent
from django_idempotency.models import IdempotencyRecord
from django_idempotency.values.policy import Key, Lease, Policy
from django_idempotency.values.problems import jittered
from tests.support.callers import (
    Gate,
    entry_point,
    heard,
    is_replay,
    mode_of,
    operation,
    paying,
    row,
    shift,
)
from tests.support.views import Runs, code
from tests.support.views_of_laws import in_both_modes, row_locks
from tests.support.waiting import eventually

UUID = "8e03978e-40d5-43dd-bc93-6894a57f9324"


@pytest.mark.parametrize(
    ("policy", "fitting", "others"),
    [
        ({"key": Key(min_length=16)}, "k" * 16, ["k" * 15, "k"]),
        (
            {"key": Key(pattern="[0-9a-f-]{36}")},
            UUID,
            [UUID + "0", "x" + UUID, "order-1", UUID.upper()],
        ),
        ({"key": Key(pattern="a|b")}, "b", ["ab", "c"]),
    ],
    ids=str,
)
def test_a_key_that_does_not_fit_is_refused(call, policy, fitting, others):
    runs = Runs()
    view = idempotent(**policy)(runs.view)
    for key in others:
        refused = call(view, key=key)
        assert (refused.status_code, code(refused)) == (
            400,
            "idempotency_key_malformed",
        )
        assert refused.json()["safe_new_key"] is False, (
            "it may have been used before the policy was stated"
        )
    assert (runs.count, IdempotencyRecord.objects.count()) == (0, 0)
    assert call(view, key=fitting).status_code == 200


def test_the_form_of_keys_may_be_a_setting(call, settings):
    settings.IDEMPOTENCY = {"KEY": Key(pattern="order-[0-9]+", min_length=8)}
    assert [
        call(idempotent(Runs().view), key=key).status_code
        for key in ("order-1", "order-12")
    ] == [400, 200]


WAIT = {"mode": "lease", "wait": 60}


def in_thread(view, key="k", **policy):
    try:
        return entry_point(view, **policy)(key)
    finally:
        connections.close_all()


one_waits = partial(in_thread, paying, **WAIT)


def in_a_child(work):
    """What ``work`` returns in a fork of this process, as a status."""
    if (child := os.fork()) == 0:
        os._exit(work())
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.usefixtures("payer")
def test_callers_beyond_max_waiters_do_not_wait(settings):
    settings.IDEMPOTENCY = {**settings.IDEMPOTENCY, "MAX_WAITERS": 2}
    gate = Gate()
    with ThreadPoolExecutor(3) as pool:
        with gate.running(mode="lease") as first:
            waiting = [pool.submit(one_waits) for _ in range(2)]
            eventually(lambda: waiters.waiting == 2)
            with heard(signals.request_rejected) as rejected:
                refused = one_waits()
            assert (refused.status_code, code(refused)) == (
                409,
                "idempotency_key_in_use",
            )
            assert int(refused.headers["Retry-After"]) >= 1
            assert [named["reason"] for named in rejected] == ["in_flight"], (
                "it did not wait"
            )
            assert not any(caller.done() for caller in waiting)
            assert in_a_child(lambda: waiters.waiting) == 0, "they wait in this process"
        answers = [caller.result(60) for caller in waiting]
    assert [answer.content for answer in answers] == [first.result().content] * 2
    assert all(map(is_replay, answers))
    assert waiters.waiting == 0


@pytest.mark.usefixtures("payer")
def test_two_keys_block_only_as_many_threads_as_may_wait():
    """Eight threads of a server; four stay free for other requests, whichever keys are
    sent again.
    """
    with ThreadPoolExecutor(8) as pool:
        with Gate().running(mode="lease"), Gate().running_with("other", mode="lease"):
            retries = [pool.submit(one_waits, key) for key in ("k", "other") * 4]
            refused = [
                retry.result(60)
                for retry in itertools.islice(as_completed(retries, timeout=60), 4)
            ]
            assert {answer.status_code for answer in refused} == {409}
            assert waiters.waiting == 4
            assert sum(not retry.done() for retry in retries) == 4
        assert sum(is_replay(retry.result(60)) for retry in retries) == 4
    assert waiters.waiting == 0


@pytest.mark.usefixtures("payer")
@pytest.mark.parametrize("raised", [KeyboardInterrupt, LookupError])
def test_an_interrupted_caller_stops_waiting(monkeypatch, raised):
    def interrupt(seconds):
        assert waiters.waiting == 1
        raise raised

    with Gate().running(mode="lease"):
        monkeypatch.setattr("django_idempotency.engine.waiting.time.sleep", interrupt)
        with pytest.raises(raised):
            entry_point(paying, **WAIT)()
    assert waiters.waiting == 0


@pytest.mark.parametrize(("seconds", "latest"), [(1, 2), (2, 3), (7, 10), (30, 45)])
def test_callers_come_back_spread_out_within_bounds(seconds, latest):
    told = {jittered(seconds) for _draw in range(2000)}
    assert told == set(range(seconds, latest + 1))


@pytest.mark.usefixtures("payer")
def test_retry_after_grows_with_the_running_time_and_is_capped():
    def told_after(seconds):
        """``None`` if it was so slow to ask that the run had become older."""
        begun = time.monotonic()
        shift(locked_at=-seconds, locked_until=60)
        told = engine.claim(operation(), Policy(mode=Lease(seconds=60))).retry_after
        return told if time.monotonic() - begun < 1 else None

    with Gate().running(mode=Lease(seconds=60)):
        told = [
            eventually(partial(told_after, seconds))
            for seconds in (0, 1, 4, 9, 16, 30, 59, 600)
        ]
    assert told == sorted(told), "before it is spread out"
    assert (told[0], told[1]) == (1, 1)
    assert 2 <= told[3] <= 9, "never longer than it has run so far"
    assert max(told) == told[-1] <= 60 / 4


@pytest.mark.usefixtures("payer")
@row_locks
@in_both_modes
def test_a_waiter_gives_up_in_time_and_it_is_counted(mode):
    mode = mode_of(mode, lease=600)  # no heartbeat meanwhile
    with (
        Gate().running(mode=mode) as first,
        heard(signals.request_rejected) as timeouts,
    ):
        before = row()
        answer = entry_point(paying, mode=mode, wait=0.2)()
        assert row() == before, "the claim is not taken along"
    assert (answer.status_code, [sent["reason"] for sent in timeouts]) == (
        409,
        ["wait_timeout"],
    )
    assert first.result().status_code == 201


@pytest.mark.usefixtures("payer")
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


@pytest.mark.usefixtures("payer")
@row_locks
@in_both_modes
def test_a_waiter_runs_once_the_owner_has_failed(mode):
    def fail(request):
        gate(request)
        return HttpResponse(status=500)

    gate = Gate()
    with ThreadPoolExecutor(2) as pool:
        owner = pool.submit(in_thread, fail, mode=mode)
        assert gate.entered.wait(60)
        waiter = pool.submit(in_thread, paying, mode=mode, wait=60)
        eventually(lambda: waiters.waiting == 1)
        gate.let_go.set()
        assert [owner.result(60).status_code, waiter.result(60).status_code] == [
            500,
            201,
        ]
    assert waiters.waiting == 0
