"""What an operator decides about a key, what is refused, and that an owner that comes
back changes nothing.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from functools import partial

import pytest
from django.db import connection

from django_idempotency import engine, signals
from django_idempotency.engine.digests import response_digest
from django_idempotency.maintenance import history
from django_idempotency.maintenance.decisions import (
    Act,
    Refusal,
    allow_retry,
    extend,
    fail,
    objection_to,
    resolve,
    version,
)
from django_idempotency.maintenance.reaper import have_it_watched, reap
from django_idempotency.models import IdempotencyRecord, Status
from django_idempotency.stores import store_for, stored_response
from django_idempotency.values.exceptions import ClaimLost
from django_idempotency.values.keys import record_id
from django_idempotency.values.outcomes import Fail, Keep, StoredResponse
from django_idempotency.values.policy import Lease, Policy
from django_idempotency.values.scopes import is_own, user_scope
from tests.support.callers import (
    SCOPE,
    claim,
    effects,
    entry_point,
    heard,
    is_replay,
    paying,
    record,
    row,
    shift,
)
from tests.support.maintained import (
    HOLD,
    HOUR,
    renewed_before_the_update,
    row_locks,
    settled,
)
from tests.support.threads import in_threads, just_before

pytestmark = pytest.mark.usefixtures("payer")

K = record_id(SCOPE, "k")
RESPONSE = StoredResponse(201, (("Content-Type", "application/json"),), b'{"id": 7}')

ACTS = {
    Act.ALLOW_RETRY: partial(allow_retry, K),
    Act.FAIL: partial(fail, K),
    Act.RESOLVE: partial(resolve, K, RESPONSE),
    Act.EXTEND: partial(extend, K, 600),
}
ENDING = [Act.ALLOW_RETRY, Act.FAIL, Act.RESOLVE]


def dead(**policy):
    """The key's owner went no further than its claim, and its lease ran out an hour
    ago.
    """
    claimed = claim(policy=Policy(**{"mode": "lease"} | policy))
    shift(locked_at=-HOUR, locked_until=-HOUR)
    return claimed


def on_hold(**policy):
    claimed = dead(**HOLD | policy)
    reap()
    assert record().on_hold
    return claimed


def started():
    """Accepted, and nothing was run before its lease ran out an hour ago."""
    claimed = dead()
    IdempotencyRecord.objects.update(status=Status.STARTED)
    return claimed


def failed():
    settled("k", Fail("ValueError"), mode="lease")


UNANSWERED = [on_hold, dead, started, failed]


def refused(outcome):
    assert isinstance(outcome, Refusal), outcome
    return outcome


def done(outcome):
    assert not isinstance(outcome, Refusal), outcome
    return outcome


NOW = datetime(2026, 1, 1, tzinfo=UTC)
AHEAD, AGO = NOW + timedelta(minutes=1), NOW - timedelta(minutes=1)
# when it was claimed: a lease that expired ends there
LONG_AGO = NOW - timedelta(minutes=2)
RECORDS = {
    "live": {"status": Status.PROCESSING, "locked_until": AHEAD},
    "its lease lapses now": {"status": Status.PROCESSING, "locked_until": NOW},
    # the store may have been away
    "its lease lapsed": {"status": Status.PROCESSING, "locked_until": AGO},
    "started": {"status": Status.STARTED, "locked_until": AHEAD},
    "dead": {"status": Status.PROCESSING, "locked_until": LONG_AGO},
    "dead before it began": {"status": Status.STARTED, "locked_until": LONG_AGO},
    "atomic": {"status": Status.PROCESSING, "locked_until": AGO, "mode": "atomic"},
    "on_hold": {"status": Status.FAILED, "on_hold": True},
    "free to retry": {"status": Status.FAILED},
    "failed for good": {"status": Status.FAILED, "response_status": 409},
    "completed": {"status": Status.COMPLETED, "response_status": 201},
}
OBJECTIONS = {
    "live": dict.fromkeys(ENDING, Refusal.LIVE),
    "its lease lapses now": dict.fromkeys(ENDING, Refusal.LAPSED),
    "its lease lapsed": dict.fromkeys(ENDING, Refusal.LAPSED),
    "started": dict.fromkeys(ENDING, Refusal.LIVE),
    "dead": {},
    "dead before it began": {},
    "atomic": {Act.EXTEND: Refusal.NO_LEASE},
    "on_hold": {Act.EXTEND: Refusal.ENDED},
    "free to retry": {Act.ALLOW_RETRY: Refusal.FREE, Act.EXTEND: Refusal.ENDED},
    "failed for good": (
        dict.fromkeys(ENDING, Refusal.HAS_RESPONSE) | {Act.EXTEND: Refusal.ENDED}
    ),
    "completed": (
        dict.fromkeys(ENDING, Refusal.HAS_RESPONSE) | {Act.EXTEND: Refusal.ENDED}
    ),
}


@pytest.mark.parametrize("act", Act)
@pytest.mark.parametrize("name", RECORDS)
def test_the_state_of_a_record_decides_which_actions_are_refused(name, act):
    plain = {
        "mode": "lease",
        "on_hold": False,
        "response_status": None,
        "locked_at": LONG_AGO,
        "locked_until": None,
    }
    record = IdempotencyRecord(**plain | RECORDS[name])
    record.now, record.locked, record._state.db = NOW, False, "default"
    assert objection_to(act, record) == OBJECTIONS[name].get(act)


INVALID = {
    "status": [
        *(partial(fail, K, status=status) for status in (200, 399, 600)),
        *(partial(resolve, K, StoredResponse(status)) for status in (100, 199, 600)),
    ],
    "seconds": [
        partial(extend, K, seconds) for seconds in (0, -1, float("inf"), float("nan"))
    ],
    "header": [
        partial(resolve, K, StoredResponse(200, (header,), b""))
        for header in [
            ("X-A", "1\r\nX-B: 2"),
            ("X A", "1"),
            ("X-A", "\0"),
            ("X-A", "€"),
            (":encrypted", "0"),
        ]
    ],
}


@pytest.mark.parametrize("what", INVALID)
def test_an_invalid_decision_is_refused(what):
    on_hold()
    before = row()
    for decide in INVALID[what]:
        with pytest.raises(ValueError, match=what):
            decide()
    assert row() == before


@pytest.mark.parametrize(
    "make", [on_hold, dead, started], ids=["on_hold", "dead", "started"]
)
def test_a_released_key_runs_at_its_next_request(make):
    make()
    before = record()
    assert done(allow_retry(K)).status == before.status
    assert (record().status, record().on_hold, record().token) == (
        "failed",
        False,
        None,
    )
    assert entry_point(paying, **HOLD)().status_code == 201
    assert effects() == 1


@pytest.mark.parametrize("make", UNANSWERED, ids=lambda make: make.__name__)
def test_a_key_marked_as_failed_never_runs_again(make):
    make()
    done(fail(K, detail="The bank refused it."))
    for _retry in range(2):
        answer = entry_point(paying, **HOLD)()
        problem = json.loads(answer.content)
        assert (answer.status_code, is_replay(answer), effects()) == (410, True, 0)
        assert answer["Content-Type"] == "application/problem+json"
        told = (
            problem["code"],
            problem["detail"],
            problem["retryable"],
            problem["safe_new_key"],
        )
        assert told == ("marked_failed", "The bank refused it.", False, False)
    assert (record().status, record().on_hold) == ("failed", False)


@pytest.mark.parametrize("make", UNANSWERED, ids=lambda make: make.__name__)
@pytest.mark.parametrize(
    ("status", "becomes"), [(201, "completed"), (302, "completed"), (409, "failed")]
)
def test_a_resolved_key_replays_the_response_it_is_given(make, status, becomes):
    make()
    done(
        resolve(
            K,
            StoredResponse(
                status, (("Content-Type", "text/plain"),), b"as if\r\nit had answered"
            ),
        )
    )
    answer = entry_point(paying, **HOLD)()
    assert (answer.status_code, answer.content, is_replay(answer)) == (
        status,
        b"as if\r\nit had answered",
        True,
    )
    assert answer["Content-Type"] == "text/plain"
    assert (record().status, effects()) == (becomes, 0)


@pytest.mark.parametrize("status", [204, 205, 304])
def test_a_body_is_refused_under_a_status_that_has_none(status):
    on_hold()
    before = row()
    with pytest.raises(ValueError, match=f"{status} has no body"):
        resolve(K, StoredResponse(status, body=b"{}"))
    assert row() == before
    for body in (b"", None):
        done(resolve(K, StoredResponse(status, body=body)))
        assert entry_point(paying, **HOLD)().content == b""
        IdempotencyRecord.objects.all().delete()
        on_hold()


@pytest.mark.parametrize("act", [Act.FAIL, Act.RESOLVE])
@pytest.mark.parametrize("make", [on_hold, dead], ids=["on_hold", "dead"])
def test_a_response_is_kept_from_now_for_as_long_as_its_policy_says(act, make):
    """A key on hold waits however long; with an expired response the next request would
    run again.
    """
    make(retention=HOUR, audit_retention=2 * HOUR)
    if record().on_hold:
        shift(updated_at=-10 * HOUR, expires_at=-9 * HOUR, purge_at=-8 * HOUR)
    else:
        shift(
            locked_at=-10 * HOUR,
            locked_until=-10 * HOUR,
            expires_at=-9 * HOUR,
            purge_at=-8 * HOUR,
        )
    done(ACTS[act]())
    kept = row()
    assert kept["expires_at"] - kept["updated_at"] == timedelta(hours=1)
    assert kept["purge_at"] - kept["updated_at"] == timedelta(hours=2)
    assert is_replay(entry_point(paying, **HOLD)())


@pytest.mark.parametrize("make", [on_hold, dead], ids=["on_hold", "dead"])
def test_a_response_is_kept_for_good_if_its_policy_says_so(make):
    make(retention=None)
    done(fail(K))
    assert row()["expires_at"] == row()["purge_at"]
    assert IdempotencyRecord.objects.kept_for_good().exists()


def test_an_extended_lease_is_not_taken_over():
    policy = Policy(mode="lease")
    claimed = dead()
    done(extend(K, 600))
    assert entry_point(paying, mode="lease")().status_code == 409
    assert reap().done["failed"] == 0
    assert store_for(policy).complete(claimed, RESPONSE)
    assert entry_point(paying, mode="lease")().content == RESPONSE.body


def test_a_lease_is_never_shortened():
    claim(policy=Policy(mode=Lease(seconds=HOUR)))
    before = row()
    done(extend(K, 60))
    assert row() == before


@row_locks
@pytest.mark.parametrize("act", Act)
def test_a_live_owner_is_never_interfered_with(other_thread, act):
    """In atomic mode, however old its claim: the lock of its row is the proof of
    life.
    """
    claimed = dead(mode="atomic")
    with engine.execution(claimed, Policy()) as run:
        before = row()
        assert refused(other_thread(ACTS[act])) == Refusal.BUSY
        assert row() == before
        run.verdict = Keep(RESPONSE)
    assert record().status == "completed"


@row_locks
@pytest.mark.parametrize("act", ENDING)
def test_a_lease_renewed_just_before_the_row_is_locked_is_seen(other_thread, act):
    policy = Policy(mode="lease")
    claimed = dead()
    with just_before(
        "SELECT .* FOR (NO KEY )?UPDATE",
        lambda: other_thread(store_for(policy).renew, [claimed]),
    ):
        assert refused(ACTS[act]()) == Refusal.LIVE
    assert record().token == claimed.token


@row_locks
@pytest.mark.parametrize("act", ENDING)
def test_a_lease_can_not_be_renewed_between_the_row_lock_and_the_change(act):
    """Else its owner would go on, believing that its lease is good."""
    policy = Policy(mode="lease")
    with renewed_before_the_update(dead(), policy) as renewals:
        done(ACTS[act]())
    assert renewals[0].result() == set()


def test_an_owner_that_has_ended_meanwhile_is_not_watched():
    failed()
    assert have_it_watched(record()) == 0


@pytest.mark.parametrize("act", ENDING)
@pytest.mark.parametrize("late", [None, "retried"])
def test_l5_an_owner_that_comes_back_after_a_decision(act, late):
    policy = Policy(mode="lease")
    claimed = dead()
    done(ACTS[act]())
    if late:
        entry_point(paying, mode="lease")()
    before = row()
    store = store_for(policy)
    assert not store.complete(claimed, StoredResponse(201, body=b"late"))
    assert not store.fail(claimed, "late")
    assert not store.release(claimed)
    assert not store.renew([claimed])
    assert row() == before


@pytest.mark.parametrize("act", ENDING)
def test_l5_the_effects_of_a_late_owner_in_atomic_mode_are_undone(act):
    claimed = dead(mode="atomic")
    done(ACTS[act]())
    before = row()
    with pytest.raises(ClaimLost):
        complete_late(claimed)
    assert (row(), effects()) == (before, 0)


def complete_late(claimed):
    with engine.execution(claimed, Policy()) as run:
        paying(None)
        run.verdict = Keep(StoredResponse(201, body=b"late"))


@row_locks
def test_of_several_decisions_at_once_one_is_taken():
    """And a released key is released to one run."""
    for _round in range(5):
        on_hold()
        works = [
            partial(resolve, K, RESPONSE),
            partial(fail, K),
            partial(allow_retry, K),
            partial(allow_retry, K),
        ]
        outcomes = in_threads(4, lambda index, works=works: works[index]())
        taken = [outcome for outcome in outcomes if not isinstance(outcome, Refusal)]
        after_release = not (
            isinstance(outcomes[2], Refusal) and isinstance(outcomes[3], Refusal)
        )
        # What is released has no response still, and somebody may give it one.
        assert len(taken) == 1 or (len(taken) == 2 and after_release)
        assert isinstance(outcomes[0], Refusal) or isinstance(outcomes[1], Refusal)
        IdempotencyRecord.objects.all().delete()


@row_locks
@pytest.mark.parametrize("act", ENDING)
def test_a_decision_and_a_retry_at_once_never_both_have_their_way(act):
    for _round in range(5):
        dead()
        before = effects()
        outcome, answer = in_threads(
            2, lambda i: [ACTS[act], lambda: entry_point(paying, mode="lease")()][i]()
        )
        ran = effects() - before
        if act != Act.ALLOW_RETRY and not isinstance(outcome, Refusal):
            assert ran == 0
            assert answer.status_code == 409 or is_replay(answer)
        else:
            assert ran <= 1
        IdempotencyRecord.objects.all().delete()


@pytest.mark.parametrize("act", ENDING)
def test_a_decision_on_a_record_that_changed_since_it_was_seen_is_refused(act):
    """It was on hold, somebody released it, it ran, and it is on hold again: that is
    another decision.
    """
    on_hold()
    seen = version(record())
    done(allow_retry(K))
    on_hold()
    before = row()
    assert refused(ACTS[act](as_seen=seen)) == Refusal.CHANGED
    assert row() == before
    done(ACTS[act](as_seen=version(record())))


def test_replays_and_renewals_leave_the_version_alone():
    claimed = claim(policy=Policy(mode="lease"))
    seen = version(record())
    store = store_for(Policy(mode="lease"))
    store.renew([claimed])
    store.count_replays({K: 3})
    done(extend(K, 600, as_seen=seen))


@pytest.mark.parametrize("act", Act)
def test_a_record_that_is_gone_is_said_to_be_gone(act):
    assert refused(ACTS[act]()) == Refusal.ABSENT


@pytest.mark.parametrize("act", Act)
@pytest.mark.parametrize("note", ["", " \n", "\u200b", "\u2800", "…"])
def test_without_a_required_note_nothing_is_done(act, note, settings):
    settings.IDEMPOTENCY = {"DECISIONS": ["note"]}
    dead()
    before = row()
    assert refused(ACTS[act](note=note)) == Refusal.NO_NOTE
    assert row() == before
    done(ACTS[act](note="asked the bank"))


@pytest.mark.parametrize("act", Act)
@pytest.mark.parametrize("tenant", ["", "acme/"])
def test_nobody_decides_about_a_key_of_their_own(act, tenant, django_user_model):
    owner, other = (
        django_user_model.objects.create_user(name) for name in ("owner", "other")
    )
    dead()
    IdempotencyRecord.objects.update(scope=f"{tenant}{user_scope(owner, None)}")
    before = row()
    assert refused(ACTS[act](by=owner)) == Refusal.OWN_KEY
    assert row() == before
    done(ACTS[act](by=other))


@pytest.mark.parametrize(
    "scope", ["auth.user:70", "auth.user:", "custom:auth.user:7", "auth.user:7/"]
)
def test_a_key_is_ones_own_only_in_ones_own_scope(scope, django_user_model):
    assert is_own("auth.user:7", django_user_model(pk=7))
    assert not is_own(scope, django_user_model(pk=7))
    assert not is_own(scope, django_user_model())
    assert not is_own(scope, "7")


@pytest.mark.parametrize("act", Act)
def test_an_error_of_the_history_undoes_the_decision(
    act, monkeypatch, django_user_model
):
    dead()
    before = row()
    wrote = []

    def fail_to_write(record, user, message):
        wrote.append((record.key, connection.in_atomic_block))
        raise LookupError

    monkeypatch.setattr(history, "write_entry", fail_to_write)
    with pytest.raises(LookupError), heard(signals.operator_decided) as sent:
        ACTS[act](by=django_user_model.objects.create_user("anna"))
    assert (row(), wrote, sent) == (before, [("k", True)], [])


@pytest.mark.parametrize("act", Act)
def test_a_signal_tells_what_was_done_by_whom_and_a_digest_of_the_response(act):
    dead()
    with heard(signals.operator_decided) as sent:
        done(ACTS[act](by="bob"))
    (told,) = sent
    stored = stored_response(record())
    assert (stored is not None) == (act in (Act.FAIL, Act.RESOLVE))
    digest = response_digest(stored) if stored else ""
    assert (told["act"], told["operation"].key, told["by"], told["digest"]) == (
        act,
        "k",
        "bob",
        digest,
    )
