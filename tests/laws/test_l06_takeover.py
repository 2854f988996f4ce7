"""L6: a live owner is never taken over, a dead one at once."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from asgiref.sync import async_to_sync, sync_to_async
from django.http import HttpResponse

from django_idempotency import engine, signals
from django_idempotency.models import Status
from django_idempotency.values.outcomes import Keep, StoredResponse
from django_idempotency.values.policy import Atomic, Lease, Policy
from tests.support.callers import (
    Gate,
    claim,
    effects,
    entry_point,
    is_replay,
    paying,
    record,
    shift,
    when,
)
from tests.support.owner_process import AFTER_EFFECT, holding
from tests.support.proxy import Cut
from tests.support.threads import in_threads
from tests.support.views_of_laws import HOUR, completed, row_locks
from tests.support.waiting import eventually

pytestmark = pytest.mark.usefixtures("payer")


@row_locks
def test_l6_in_atomic_mode_a_live_owner_is_never_taken_over():
    gate, policy = Gate(), {"mode": Atomic(takeover_grace=0)}

    def grow_old(**_named):
        shift(locked_at=-HOUR, locked_until=-HOUR)

    with when(signals.key_claimed, grow_old), gate.running(**policy) as answer:
        duplicates = in_threads(10, lambda _: entry_point(paying, **policy)())
    assert {duplicate.status_code for duplicate in duplicates} == {409}
    assert (answer.result().status_code, effects()) == (201, 1)


@row_locks
def test_l6_a_process_that_is_stopped_in_atomic_mode_is_alive():
    with holding(mode=Atomic(takeover_grace=0)) as owner:
        owner.stop()
        duplicates = in_threads(
            5,
            lambda _: entry_point(paying, mode=Atomic(takeover_grace=0))().status_code,
        )
        owner.resume()
        owner.go_on()
        assert owner.says() == AFTER_EFFECT
        owner.go_on()
        assert owner.says()[0] == 201
    assert duplicates == [409] * 5
    assert effects() == 1


@row_locks
def test_l6_in_atomic_mode_a_dead_owner_is_taken_over_at_once():
    with holding() as owner:
        assert entry_point(paying)().status_code == 409
        owner.kill()
    # once the database sees that it is gone
    answer = eventually(lambda: completed(entry_point(paying)()))
    assert not is_replay(answer)
    assert record().attempts == 2


@row_locks
def test_l6_a_heartbeat_keeps_the_lease_of_an_async_view():
    async def view(request):
        claimed = await sync_to_async(record)()
        await sync_to_async(eventually)(
            lambda: record().locked_until > claimed.locked_until
        )
        return HttpResponse(status=201)

    async def send():
        return await entry_point(view, mode=Lease(seconds=1))()

    assert async_to_sync(send)().status_code == 201


@row_locks
def test_l6_a_duplicate_leaves_a_claim_time_to_lock_its_row(monkeypatch):
    first, looked, sleep = claim(policy=Policy()), threading.Event(), time.sleep

    def look_and_sleep(seconds):
        looked.set()
        sleep(seconds)

    monkeypatch.setattr(engine.waiting.time, "sleep", look_and_sleep)
    with ThreadPoolExecutor(1) as pool:
        twin = pool.submit(
            in_threads,
            1,
            lambda _: entry_point(paying, mode=Atomic(takeover_grace=60))(),
        )
        assert looked.wait(60)
        with engine.execution(first, Policy()) as run:
            assert twin.result(60)[0].status_code == 409
            run.verdict = Keep(StoredResponse(201))
    assert effects() == 0


@pytest.mark.parametrize(
    ("error", "on_crash", "on_hold"),
    [
        (KeyboardInterrupt, "hold", True),
        (KeyboardInterrupt, "retry", False),
        (ArithmeticError, "hold", False),
    ],
)
def test_l6_only_an_interrupted_run_is_put_on_hold_and_only_if_asked(
    error, on_crash, on_hold
):
    def view(request):
        raise error

    with pytest.raises(error):
        entry_point(view, mode=Lease(on_crash=on_crash))()
    assert (record().status, record().on_hold, record().reason) == (
        Status.FAILED,
        on_hold,
        error.__name__,
    )


def test_l6_a_run_that_ends_by_a_plain_error_is_not_put_on_hold():
    """It was not interrupted, whoever ends it: without a verdict, too."""
    policy = Policy(mode=Lease(on_crash="hold"))
    with pytest.raises(ArithmeticError), engine.execution(claim(policy=policy), policy):
        raise ArithmeticError
    assert (record().status, record().on_hold) == (Status.FAILED, False)


@pytest.mark.postgresql
@pytest.mark.parametrize("on_crash", ["retry", "hold"])
def test_l6_a_takeover_whose_commit_gets_no_reply_runs_anyway(proxy, on_crash):
    """Nobody else would run it: the record has the token of this attempt."""
    statuses = iter([500, 201])

    def view(_request):
        return HttpResponse(status=next(statuses))

    policy = {"mode": Lease(on_crash=on_crash)}
    assert entry_point(view, **policy)().status_code == 500
    proxy.cut = Cut.AFTER_COMMIT
    assert entry_point(view, **policy)().status_code == 201
    assert proxy.cuts == 1
    assert is_replay(entry_point(view, **policy)())
