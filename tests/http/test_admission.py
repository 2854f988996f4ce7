"""Which keys a policy lets in, how many callers may wait for one, and when those that may not come back."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor, as_completed

import pytest
from django.db import connections

from django_idempotency import signals
from django_idempotency.decorators import idempotent
from django_idempotency.engine.waiting import waiters
from django_idempotency.http.problems import jittered
from django_idempotency.models import IdempotencyRecord
from django_idempotency.policy import Keys
from tests.support.callers import Gate, entry_point, heard, is_replay, paying
from tests.support.views import Runs, code
from tests.support.waiting import eventually

UUID = "8e03978e-40d5-43dd-bc93-6894a57f9324"


@pytest.mark.parametrize(
    ("policy", "fitting", "others"),
    [
        ({"keys": Keys(min_length=16)}, "k" * 16, ["k" * 15, "k"]),
        ({"keys": Keys(pattern="[0-9a-f-]{36}")}, UUID, [UUID + "0", "x" + UUID, "order-1", UUID.upper()]),
        ({"keys": Keys(pattern="a|b")}, "b", ["ab", "c"]),
    ],
    ids=str,
)
def test_a_key_that_does_not_fit_is_refused(call, policy, fitting, others):
    runs = Runs()
    view = idempotent(**policy)(runs.view)
    for key in others:
        refused = call(view, key=key)
        assert (refused.status_code, code(refused)) == (400, "idempotency_key_malformed")
        assert refused.json()["safe_new_key"] is False, "it may have been used before the policy was stated"
    assert (runs.count, IdempotencyRecord.objects.count()) == (0, 0)
    assert call(view, key=fitting).status_code == 200


def test_the_form_of_keys_may_be_a_setting(call, settings):
    settings.IDEMPOTENCY = {"KEYS": Keys(pattern="order-[0-9]+", min_length=8)}
    assert [call(idempotent(Runs().view), key=key).status_code for key in ("order-1", "order-12")] == [400, 200]


WAIT = {"mode": "lease", "wait": 30}


def one_waits(key="k"):
    try:
        return entry_point(paying, **WAIT)(key)
    finally:
        connections.close_all()


@pytest.mark.usefixtures("payer")
def test_callers_beyond_max_waiters_do_not_wait(settings):
    settings.IDEMPOTENCY = {**settings.IDEMPOTENCY, "MAX_WAITERS": 2}
    gate = Gate()
    with ThreadPoolExecutor(3) as pool:
        with gate.running(mode="lease") as first:
            waiting = [pool.submit(one_waits) for _ in range(2)]
            eventually(lambda: len(waiters) == 2)
            with heard(signals.request_rejected) as rejected:
                refused = one_waits()
            assert (refused.status_code, code(refused)) == (409, "idempotency_key_in_use")
            assert int(refused.headers["Retry-After"]) >= 1
            assert [named["reason"] for named in rejected] == ["in_flight"], "it did not wait"
            assert not any(caller.done() for caller in waiting)
        answers = [caller.result(30) for caller in waiting]
    assert [answer.content for answer in answers] == [first.result().content] * 2
    assert all(map(is_replay, answers))
    assert len(waiters) == 0


@pytest.mark.usefixtures("payer")
def test_two_keys_block_no_more_threads_than_may_wait():
    """Eight threads of a server; four stay free for other requests, whichever keys are sent again."""
    with ThreadPoolExecutor(8) as pool:
        with Gate().running(mode="lease"), Gate().running_with("other", mode="lease"):
            retries = [pool.submit(one_waits, key) for key in ("k", "other") * 4]
            refused = [retry.result(30) for retry in itertools.islice(as_completed(retries, timeout=30), 4)]
            assert {answer.status_code for answer in refused} == {409}
            assert len(waiters) == 4
            assert sum(not retry.done() for retry in retries) == 4
        assert sum(is_replay(retry.result(30)) for retry in retries) == 4
    assert len(waiters) == 0


@pytest.mark.usefixtures("payer")
@pytest.mark.parametrize("raised", [KeyboardInterrupt, LookupError])
def test_a_caller_that_is_interrupted_waits_no_more(monkeypatch, raised):
    def interrupt(seconds):
        assert len(waiters) == 1
        raise raised

    with Gate().running(mode="lease"):
        monkeypatch.setattr("django_idempotency.engine.waiting.time.sleep", interrupt)
        with pytest.raises(raised):
            entry_point(paying, **WAIT)()
    assert len(waiters) == 0


@pytest.mark.parametrize(("seconds", "latest"), [(1, 2), (2, 3), (7, 10), (30, 45)])
def test_callers_come_back_spread_out_within_bounds(seconds, latest):
    told = {jittered(seconds) for _draw in range(2000)}
    assert told == set(range(seconds, latest + 1))
