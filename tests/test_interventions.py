"""What a person decides about a key, what is refused, and that a holder that comes back changes nothing."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor, wait
from datetime import UTC, datetime, timedelta
from functools import partial
from types import SimpleNamespace

import pytest
from django.db import connection, connections, transaction

from django_idempotency import engine, signals
from django_idempotency.exceptions import ClaimLost
from django_idempotency.interventions import (
    Act,
    Done,
    Refusal,
    Refused,
    extend,
    fail,
    objection,
    release,
    resolve,
    version,
)
from django_idempotency.keys import record_id
from django_idempotency.maintenance import reap
from django_idempotency.models import IdempotencyRecord, Status
from django_idempotency.outcomes import Fail, Keep, StoredResponse
from django_idempotency.policy import Policy
from django_idempotency.stores import store_for
from tests.callers import SCOPE, claim, door, effects, heard, is_replay, paying, record, row, shift
from tests.threads import OtherThread, in_threads, just_before

pytestmark = pytest.mark.usefixtures("payer")
row_locks = pytest.mark.row_locks

HOUR = 3600
HOLD = {"mode": "lease", "on_crash": "hold"}
K = record_id(SCOPE, "k")
ANSWER = StoredResponse(201, (("Content-Type", "application/json"),), b'{"id": 7}')

ACTS = {
    Act.RELEASE: partial(release, K),
    Act.FAIL: partial(fail, K),
    Act.RESOLVE: partial(resolve, K, ANSWER),
    Act.EXTEND: partial(extend, K, 600),
}
ENDING = [Act.RELEASE, Act.FAIL, Act.RESOLVE]


@pytest.fixture
def elsewhere():
    """Another thread, with a connection of its own."""
    thread = OtherThread()
    yield thread
    thread.close()


def dead(**policy):
    """The key's holder went no further than its claim, and its lease ran out an hour ago."""
    claimed = claim(policy=Policy(**{"mode": "lease"} | policy))
    shift(locked_at=-HOUR - 60, locked_until=-HOUR)
    return claimed


def held(**policy):
    claimed = dead(**HOLD | policy)
    reap()
    assert record().held
    return claimed


def started():
    """Accepted, and nothing was run before its lease ran out an hour ago."""
    claimed = dead()
    IdempotencyRecord.objects.update(status=Status.STARTED)
    return claimed


def failed():
    policy = Policy(mode="lease")
    claimed = claim(policy=policy)
    with engine.execution(claimed, policy) as run:
        run.settle(Fail("ValueError"))


UNANSWERED = [held, dead, started, failed]


def refused(outcome):
    assert isinstance(outcome, Refused), outcome
    return outcome.why


def done(outcome):
    assert isinstance(outcome, Done), outcome
    return outcome.record


# --- What can be done, when ------------------------------------------------------------------------------------------

NOW = datetime(2026, 1, 1, tzinfo=UTC)
AHEAD, AGO = NOW + timedelta(minutes=1), NOW - timedelta(minutes=1)
RECORDS = {
    "live": {"status": Status.PROCESSING, "locked_until": AHEAD},
    "its lease runs out now": {"status": Status.PROCESSING, "locked_until": NOW},
    "started": {"status": Status.STARTED, "locked_until": AHEAD},
    "dead": {"status": Status.PROCESSING, "locked_until": AGO},
    "dead before it began": {"status": Status.STARTED, "locked_until": AGO},
    "atomic": {"status": Status.PROCESSING, "locked_until": AGO, "mode": "atomic"},
    "held": {"status": Status.FAILED, "held": True},
    "free to retry": {"status": Status.FAILED},
    "failed for good": {"status": Status.FAILED, "response_status": 409},
    "completed": {"status": Status.COMPLETED, "response_status": 201},
}
OBJECTIONS = {
    "live": dict.fromkeys(ENDING, Refusal.LIVE),
    "its lease runs out now": {},
    "started": dict.fromkeys(ENDING, Refusal.LIVE),
    "dead": {},
    "dead before it began": {},
    "atomic": {Act.EXTEND: Refusal.NO_LEASE},
    "held": {Act.EXTEND: Refusal.ENDED},
    "free to retry": {Act.RELEASE: Refusal.FREE, Act.EXTEND: Refusal.ENDED},
    "failed for good": dict.fromkeys(ENDING, Refusal.ANSWERED) | {Act.EXTEND: Refusal.ENDED},
    "completed": dict.fromkeys(ENDING, Refusal.ANSWERED) | {Act.EXTEND: Refusal.ENDED},
}


@pytest.mark.parametrize("act", Act)
@pytest.mark.parametrize("name", RECORDS)
def test_what_can_be_done_to_a_record_as_it_stands(name, act):
    plain = {"mode": "lease", "held": False, "response_status": None, "locked_until": None}
    assert objection(SimpleNamespace(**plain | RECORDS[name]), act, NOW) == OBJECTIONS[name].get(act)


def test_every_refusal_says_why():
    assert all(str(refusal.label).endswith(".") for refusal in Refusal)


# --- Releasing -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [held, dead, started], ids=["held", "dead", "started"])
def test_a_released_key_runs_at_its_next_request(make):
    make()
    before = record()
    assert done(release(K)).status == before.status
    assert (record().status, record().held, record().token) == ("failed", False, None)
    assert door(paying, **HOLD)().status_code == 201
    assert effects() == 1


# --- Failing ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", UNANSWERED, ids=lambda make: make.__name__)
def test_a_key_marked_as_failed_never_runs_again_and_tells_every_retry(make):
    make()
    done(fail(K, detail="The bank refused it."))
    for _retry in range(2):
        answer = door(paying, **HOLD)()
        problem = json.loads(answer.content)
        assert (answer.status_code, is_replay(answer), effects()) == (410, True, 0)
        assert answer["Content-Type"] == "application/problem+json"
        told = (problem["code"], problem["detail"], problem["retryable"], problem["safe_new_key"])
        assert told == ("marked_failed", "The bank refused it.", False, False)
    assert (record().status, record().held) == ("failed", False)


def test_a_failure_has_the_status_it_is_given():
    held()
    done(fail(K, status=422))
    answer = door(paying, **HOLD)()
    assert answer.status_code == json.loads(answer.content)["status"] == 422


@pytest.mark.parametrize("status", [200, 399, 600])
def test_a_failure_with_a_status_that_is_no_errors_is_refused(status):
    with pytest.raises(ValueError, match=str(status)):
        fail(K, status=status)


# --- Resolving -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", UNANSWERED, ids=lambda make: make.__name__)
@pytest.mark.parametrize(("status", "becomes"), [(201, "completed"), (302, "completed"), (409, "failed")])
def test_a_resolved_key_replays_the_answer_it_is_given(make, status, becomes):
    make()
    done(resolve(K, StoredResponse(status, (("Content-Type", "text/plain"),), b"as if\r\nit had answered")))
    answer = door(paying, **HOLD)()
    assert (answer.status_code, answer.content, is_replay(answer)) == (status, b"as if\r\nit had answered", True)
    assert answer["Content-Type"] == "text/plain"
    assert (record().status, effects()) == (becomes, 0)


@pytest.mark.parametrize("status", [100, 199, 600])
def test_an_answer_with_a_status_that_is_none_is_refused(status):
    with pytest.raises(ValueError, match=str(status)):
        resolve(K, StoredResponse(status))


@pytest.mark.parametrize("status", [204, 205, 304])
def test_a_body_where_no_server_could_send_one_is_refused(status):
    held()
    before = row()
    with pytest.raises(ValueError, match=f"{status} has no body"):
        resolve(K, StoredResponse(status, body=b"{}"))
    assert row() == before
    for body in (b"", None):
        done(resolve(K, StoredResponse(status, body=body)))
        assert door(paying, **HOLD)().content == b""
        IdempotencyRecord.objects.all().delete()
        held()


@pytest.mark.parametrize("act", [Act.FAIL, Act.RESOLVE])
@pytest.mark.parametrize("make", [held, dead], ids=["held", "dead"])
def test_an_answer_is_kept_from_now_for_as_long_as_its_policy_says(act, make):
    """A held key waits however long; were its answer expired when it is given, the next request would run again."""
    make(retention=HOUR, audit=2 * HOUR)
    if record().held:
        shift(updated_at=-10 * HOUR, expires_at=-9 * HOUR, purge_at=-8 * HOUR)
    else:
        shift(locked_at=-10 * HOUR, expires_at=-9 * HOUR, purge_at=-8 * HOUR)
    done(ACTS[act]())
    kept = row()
    assert kept["expires_at"] - kept["updated_at"] == timedelta(hours=1)
    assert kept["purge_at"] - kept["updated_at"] == timedelta(hours=2)
    assert is_replay(door(paying, **HOLD)())


# --- Extending -------------------------------------------------------------------------------------------------------


def test_nobody_takes_over_before_an_extended_lease_ends_and_its_holder_completes():
    policy = Policy(mode="lease")
    claimed = dead()
    done(extend(K, 600))
    assert door(paying, mode="lease")().status_code == 409
    assert reap().failed == 0
    assert store_for(policy).complete(claimed, ANSWER, policy)
    assert door(paying, mode="lease")().content == ANSWER.body


def test_a_lease_is_never_shortened():
    claim(policy=Policy(mode="lease", lease=HOUR))
    before = row()
    done(extend(K, 60))
    assert row() == before


@pytest.mark.parametrize("seconds", [0, -1, float("inf"), float("nan")])
def test_an_extension_that_can_not_be_meant_is_refused(seconds):
    with pytest.raises(ValueError, match="seconds"):
        extend(K, seconds)


# --- Who is alive ----------------------------------------------------------------------------------------------------


@row_locks
@pytest.mark.parametrize("act", Act)
def test_a_live_holder_is_never_interfered_with(elsewhere, act):
    """In atomic mode, however old its claim: the lock of its row is the proof of life."""
    claimed = dead(mode="atomic")
    before = row()
    with engine.execution(claimed, Policy()) as run:
        assert refused(elsewhere(ACTS[act])) == Refusal.BUSY
        assert row() == before
        run.settle(Keep(ANSWER))
    assert record().status == "completed"


@pytest.mark.parametrize("act", ENDING)
def test_a_holder_whose_lease_has_not_run_out_is_not_interfered_with(act):
    claim(policy=Policy(mode="lease"))
    before = row()
    assert refused(ACTS[act]()) == Refusal.LIVE
    assert row() == before


@row_locks
@pytest.mark.parametrize("act", ENDING)
def test_a_lease_renewed_just_before_the_look_is_seen(elsewhere, act):
    policy = Policy(mode="lease")
    claimed = dead()
    with just_before("SELECT .* FOR (NO KEY )?UPDATE", lambda: elsewhere(store_for(policy).renew, [claimed], policy)):
        assert refused(ACTS[act]()) == Refusal.LIVE
    assert record().token == claimed.token


@row_locks
@pytest.mark.parametrize("act", ENDING)
def test_a_lease_can_not_be_renewed_between_the_look_and_the_change(act):
    """Else its holder would go on, believing that its lease is good."""
    policy = Policy(mode="lease")
    claimed = dead()
    renewals = []
    with ThreadPoolExecutor(1) as pool:

        def renew():
            try:
                return store_for(policy).renew([claimed], policy)
            finally:
                connections.close_all()

        def try_to_renew():
            renewals.append(pool.submit(renew))
            wait(renewals, timeout=0.5)  # long enough, were it let

        with just_before("UPDATE", try_to_renew):
            done(ACTS[act]())
        assert renewals[0].result() == set()


@pytest.mark.parametrize("act", ENDING)
@pytest.mark.parametrize("late", [None, "retried"])
def test_l5_a_holder_that_comes_back_after_a_person_decided_changes_nothing(act, late):
    policy = Policy(mode="lease")
    claimed = dead()
    done(ACTS[act]())
    if late:
        door(paying, mode="lease")()
    before = row()
    store = store_for(policy)
    assert not store.complete(claimed, StoredResponse(201, body=b"late"), policy)
    assert not store.fail(claimed, "late", policy)
    assert not store.release(claimed, policy)
    assert not store.renew([claimed], policy)
    assert row() == before


@pytest.mark.parametrize("act", ENDING)
def test_l5_a_holder_in_atomic_mode_that_comes_back_leaves_no_effect(act):
    claimed = dead(mode="atomic")
    done(ACTS[act]())
    before = row()
    with pytest.raises(ClaimLost):
        complete_late(claimed)
    assert (row(), effects()) == (before, 0)


def complete_late(claimed):
    with engine.execution(claimed, Policy()) as run:
        paying(None)
        run.settle(Keep(StoredResponse(201, body=b"late")))


def test_an_answer_that_no_server_could_send_is_refused():
    """It would be an error at every retry."""
    held()
    before = row()
    for header in [("X-A", "1\r\nX-B: 2"), ("X A", "1"), ("X-A", "\0"), ("X-A", "€"), (":encrypted", "0")]:
        with pytest.raises(ValueError, match="header"):
            resolve(K, StoredResponse(200, (header,), b""))
    assert row() == before


# --- Who was quicker -------------------------------------------------------------------------------------------------


@row_locks
def test_of_several_decisions_at_once_one_is_taken():
    """And a released key is released to one run."""
    for _round in range(5):
        held()
        works = [partial(resolve, K, ANSWER), partial(fail, K), partial(release, K), partial(release, K)]
        outcomes = in_threads(4, lambda index, works=works: works[index]())
        taken = [outcome for outcome in outcomes if isinstance(outcome, Done)]
        after_release = isinstance(outcomes[2], Done) or isinstance(outcomes[3], Done)
        # What is released has no answer still, and somebody may give it one.
        assert len(taken) == 1 or (len(taken) == 2 and after_release)
        assert not (isinstance(outcomes[0], Done) and isinstance(outcomes[1], Done))
        IdempotencyRecord.objects.all().delete()


@row_locks
@pytest.mark.parametrize("act", ENDING)
def test_a_decision_and_a_retry_at_once_never_both_have_their_way(act):
    for _round in range(5):
        dead()
        before = effects()
        outcome, answer = in_threads(2, lambda i: [ACTS[act], lambda: door(paying, mode="lease")()][i]())
        ran = effects() - before
        if act != Act.RELEASE and isinstance(outcome, Done):
            assert ran == 0
            assert answer.status_code == 409 or is_replay(answer)
        else:
            assert ran <= 1
        IdempotencyRecord.objects.all().delete()


@pytest.mark.parametrize("act", ENDING)
def test_what_has_changed_since_it_was_looked_at_is_left_alone(act):
    """It was held, somebody released it, it ran, and it is held again: that is another decision."""
    held()
    seen = version(record())
    done(release(K))
    held()
    before = row()
    assert refused(ACTS[act](as_seen=seen)) == Refusal.CHANGED
    assert row() == before
    done(ACTS[act](as_seen=version(record())))


def test_replays_and_renewals_change_no_version():
    claimed = claim(policy=Policy(mode="lease"))
    seen = version(record())
    store = store_for(Policy(mode="lease"))
    store.renew([claimed], Policy(mode="lease"))
    store.count_replays({K: 3}, Policy())
    done(extend(K, 600, as_seen=seen))


@pytest.mark.parametrize("act", Act)
def test_a_record_that_is_gone_is_said_to_be_gone(act):
    assert refused(ACTS[act]()) == Refusal.ABSENT


# --- Who is told -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("act", Act)
def test_a_witness_is_called_in_the_transaction_and_its_error_undoes_it(act):
    dead()
    before = row()
    witnessed = []

    def witness(found):
        witnessed.append((found.key, connection.in_atomic_block))
        raise LookupError

    with pytest.raises(LookupError), heard(signals.intervened) as sent:
        ACTS[act](witness=witness)
    assert (row(), witnessed, sent) == (before, [("k", True)], [])


def test_nobody_witnesses_what_is_not_done():
    claim(policy=Policy(mode="lease"))
    refused(release(K, witness=pytest.fail))


@pytest.mark.parametrize("act", Act)
def test_a_signal_tells_what_was_done(act):
    dead()
    with heard(signals.intervened) as sent:
        done(ACTS[act]())
        ACTS[act]()
    assert {(told["act"], told["operation"].key) for told in sent[:1]} == {(act, "k")}
    assert len(sent) == (2 if act == Act.EXTEND else 1)


@pytest.mark.parametrize("act", Act)
def test_the_log_tells_what_was_done(act, caplog):
    dead()
    caplog.set_level("INFO", "django_idempotency")
    done(ACTS[act]())
    (said,) = caplog.records
    assert (said.event, said.record_id) == ("intervened", str(K))
    assert said.getMessage().endswith(f"by hand: {act}")


def test_a_decision_inside_a_transaction_is_refused():
    with transaction.atomic(), pytest.raises(RuntimeError, match="durable"):
        release(K)
