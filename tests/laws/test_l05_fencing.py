"""L5: an owner that lost its claim can change nothing."""

from __future__ import annotations

import os

import pytest
from django.db import transaction
from django.http import HttpResponse

from django_idempotency import engine, signals
from django_idempotency.engine.run import Run
from django_idempotency.maintenance.privacy import erase
from django_idempotency.models import IdempotencyRecord
from django_idempotency.stores import store_for
from django_idempotency.values.exceptions import (
    ClaimLost,
    StoreConflict,
    TerminalFailure,
)
from django_idempotency.values.outcomes import Keep, StoredResponse
from django_idempotency.values.policy import Atomic, Lease, Policy
from tests.support.callers import (
    claim,
    effects,
    entry_point,
    heard,
    is_replay,
    mode_of,
    operation,
    pay,
    paying,
    record,
    row,
    shift,
)
from tests.support.owner_process import AFTER_EFFECT, holding
from tests.support.proxy import Cut
from tests.support.sql import run_sql
from tests.support.threads import in_threads, just_before
from tests.support.views_of_laws import (
    COMPLETION,
    completed,
    in_both_modes,
    postgresql,
    row_locks,
    terminate,
)
from tests.support.waiting import eventually

pytestmark = pytest.mark.usefixtures("payer")


WRITES = {
    "complete": lambda store, stale: store.complete(stale, StoredResponse(200)),
    "fail": lambda store, stale: store.fail(stale, "late"),
    "hold": lambda store, stale: store.fail(stale, "late", on_hold=True),
    "release": lambda store, stale: store.release(stale),
    "renew": lambda store, stale: store.renew([stale]),
}


LOSSES = {
    "taken over": lambda store, stale: shift(locked_until=-1),
    "released and claimed anew": lambda store, stale: store.release(stale),
}


@in_both_modes
@pytest.mark.parametrize("lose", LOSSES.values(), ids=LOSSES)
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_l5_the_writes_of_a_lost_claim_are_rejected(mode, write, lose):
    policy = Policy(mode=mode_of(mode, takeover_grace=0))
    stale = claim(policy=policy)
    lose(store_for(policy), stale)
    assert claim(policy=policy).token != stale.token
    before = row()
    assert not write(store_for(policy), stale)
    assert row() == before


def test_l5_an_owner_overtaken_before_its_row_lock_does_not_run():
    policy = Policy(mode=Atomic(takeover_grace=0))
    overtaken, owner = claim(policy=policy), claim(policy=policy)
    with (
        heard(signals.claim_lost) as lost,
        heard(signals.stale_write_rejected) as rejected,
    ):
        with pytest.raises(ClaimLost), engine.execution(overtaken, policy):
            pay()
        engine.duplicate(operation(), policy)
        with engine.execution(owner, policy) as run:
            run.verdict = Keep(StoredResponse(201))
    assert ([sent["attempt"] for sent in lost], rejected, effects()) == (
        [overtaken.attempt],
        [],
        0,
    )
    assert record().response_status == 201


def stop_between_heartbeats(zombie):
    """Halfway, it would have its row locked for as long as it is stopped."""

    def has_no_lock():
        zombie.stop()
        rows = IdempotencyRecord.objects.select_for_update(skip_locked=True)
        with transaction.atomic():
            return list(rows.values_list("pk")) or zombie.resume()

    eventually(has_no_lock)


@row_locks
def test_l5_a_zombie_cannot_complete_what_another_took_over():
    with holding(mode=Lease(seconds=1)) as zombie:
        stop_between_heartbeats(zombie)
        owner = eventually(lambda: completed(entry_point(paying, mode="lease")()))
        before = row()
        zombie.resume()
        zombie.go_on()
        assert zombie.says() == AFTER_EFFECT
        zombie.go_on()
        # the owner's answer, not its own
        assert zombie.says() == [201, owner.content.decode()]
        assert row() | {"replays": 0, "last_replayed_at": None} == before


@row_locks
def test_l5_a_zombie_that_asks_before_its_effect_learns_that_it_lost():
    with holding(mode=Lease(seconds=1), renews=True) as zombie:
        stop_between_heartbeats(zombie)
        owner = eventually(lambda: completed(entry_point(paying, mode="lease")()))
        zombie.resume()
        zombie.go_on()
        assert zombie.says() == [201, owner.content.decode()]
    assert effects() == 1


def test_l5_the_response_of_an_overtaken_owner_is_not_stored_after_an_erasure():
    """Its caller's data would be back, and be replayed to them until it expires."""

    def view(request):
        shift(locked_until=-1)
        assert completed(entry_point(paying, mode="lease")("k"))
        assert erase(key="k").done["erased"] == 1
        return HttpResponse("name and address", status=201)

    with heard(signals.stale_write_rejected) as rejected:
        late = entry_point(view, mode="lease")("k")
    assert (late.status_code, len(rejected)) == (409, 1)
    assert not IdempotencyRecord.objects.exists()


@postgresql
def test_l5_the_effects_of_a_zombie_in_atomic_mode_are_rejected():
    with holding() as zombie:
        zombie.stop()
        terminate(*holders_of_row_locks())
        owner = entry_point(paying)()
        before = row()
        zombie.resume()
        zombie.go_on()
        assert zombie.says()[0] >= 500
        assert row() == before
    assert (owner.status_code, effects()) == (201, 1)


def holders_of_row_locks():
    found = run_sql(
        "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND"
        " state = 'idle in transaction'"
    )
    return [pid for (pid,) in found]


@postgresql
@pytest.mark.parametrize(
    ("mode", "attempts"),
    [
        (Atomic(takeover_grace=0), 2),
        pytest.param(Atomic(claim="lock"), 1, marks=pytest.mark.not_on_citus),
    ],
)
def test_l5_an_owner_cut_off_before_commit_and_overtaken_sends_the_winners_response(
    proxy, mode, attempts
):
    won = []

    def rival(_index):
        return eventually(lambda: completed(entry_point(paying, mode=mode)()))

    def view(request):
        proxy.cut, proxy.meanwhile = (
            Cut.BEFORE_COMMIT,
            lambda: won.extend(in_threads(1, rival)),
        )
        return paying(request)

    with heard(signals.stale_write_rejected) as rejected:
        lost = entry_point(view, mode=mode)()
    assert is_replay(lost)
    assert lost.content == won[0].content
    assert (effects(), len(rejected), record().attempts) == (1, 1, attempts)


@postgresql
def test_l5_a_cut_before_commit_without_a_record_may_retry(proxy):
    def view(request):
        proxy.cut = Cut.BEFORE_COMMIT
        proxy.meanwhile = lambda: in_threads(
            1, lambda _: IdempotencyRecord.objects.all().delete()
        )
        return paying(request)

    with heard(signals.stale_write_rejected) as rejected:
        assert entry_point(view)().status_code == 409
    assert (effects(), len(rejected)) == (0, 1)


@row_locks
@in_both_modes
@pytest.mark.parametrize("leaves", ["by SystemExit", "with a response"])
def test_l5_a_child_of_the_view_does_not_end_the_run_of_its_parent(mode, leaves):
    parent = os.getpid()

    def view(request):
        child = os.fork()
        if child == 0 and leaves == "by SystemExit":
            raise SystemExit
        if child:
            os.waitpid(child, 0)
            pay()
        return HttpResponse("parent" if child else "child", status=201)

    send = entry_point(view, mode=mode)
    try:
        answer = send()
    finally:
        if os.getpid() != parent:
            os._exit(0)
    assert (answer.status_code, answer.content, effects()) == (201, b"parent", 1)
    assert send().content == b"parent"


@row_locks
def test_l5_a_lost_claims_terminal_failure_yields_to_the_winner():
    """Between the rollback of its effects and its own writing, its record is
    anybody's.
    """

    def view(request):
        raise TerminalFailure(HttpResponse("declined", status=402))

    def rival():
        in_threads(1, lambda _: entry_point(paying, mode=Atomic(takeover_grace=0))())

    with just_before(COMPLETION, rival):
        answer = entry_point(view)()
    assert (answer.status_code, is_replay(answer), effects()) == (201, True, 1)


@pytest.mark.parametrize(("times", "status"), [(1, 402), (1000, 503)])
def test_l2_a_terminal_failure_is_not_sent_before_it_is_stored(
    monkeypatch, times, status
):
    """Another transaction may be in the way; told all the same, it would not be what a
    retry gets.
    """
    conflicts, write = iter(range(times)), Run.write

    def in_the_way(run, verdict):
        if next(conflicts, None) is not None:
            raise StoreConflict("could not serialize access")
        write(run, verdict)

    def view(request):
        raise TerminalFailure(HttpResponse("declined", status=402))

    monkeypatch.setattr(Run, "write", in_the_way)
    assert entry_point(view)().status_code == status
