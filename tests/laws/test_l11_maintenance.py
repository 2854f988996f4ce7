"""L11: maintenance touches no live claim, and lets no duplicate through at the
boundary.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
from django.db import connections
from django.db.models import BooleanField
from django.db.models.expressions import RawSQL

from django_idempotency.maintenance import cleanup, reap
from django_idempotency.models import IdempotencyRecord, RecordQuerySet
from tests.support.callers import effects, entry_point, is_replay, paying, record, shift
from tests.support.maintained import HOUR, LOCKING, done, keys, postgresql, row_locks
from tests.support.sql import run_sql, value_of
from tests.support.threads import in_threads, just_after, just_before
from tests.support.views_of_laws import in_each_mode
from tests.support.waiting import eventually

pytestmark = pytest.mark.usefixtures("payer")

GATE = 4711


@pytest.fixture
def clean_up_while(other_thread, monkeypatch):
    """Clean up in a statement that has begun, and seen the rows as they are, when
    something is done to them.
    """

    waits = RawSQL(
        f"(SELECT true FROM pg_advisory_xact_lock_shared({GATE}))", (), BooleanField()
    )
    purgeable = RecordQuerySet.purgeable

    def clean_up(isolation):
        run_sql(f"SET default_transaction_isolation = '{isolation}'")
        try:
            return cleanup()
        finally:
            connections.close_all()

    def run(act, isolation="read committed"):
        other_thread(run_sql, f"SELECT pg_advisory_lock({GATE})")
        with monkeypatch.context() as patched, ThreadPoolExecutor(1) as pool:
            patched.setattr(
                RecordQuerySet, "purgeable", lambda rows: purgeable(rows).filter(waits)
            )
            cleaned = pool.submit(clean_up, isolation)
            try:
                eventually(lambda: waiting_at_the_gate() == 1)
                act()
            finally:
                other_thread(run_sql, f"SELECT pg_advisory_unlock({GATE})")
            return cleaned.result(60)

    return run


def waiting_at_the_gate():
    return value_of(
        "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted AND"
        " objid = %s AND database = (SELECT oid FROM pg_database WHERE datname ="
        " current_database())",
        [GATE],
    )


DELETING = r"DELETE|\s*WITH picked.*DELETE"


@row_locks
@in_each_mode
@pytest.mark.parametrize("cleans", [False, True], ids=["reused", "deleted"])
def test_l11_two_retries_as_the_key_expires_or_is_deleted_run_once(mode, cleans):
    for number in range(8):
        key = f"k{number}"
        done(key, mode=mode)
        before = effects()
        retry = partial(until_answered, entry_point(paying, mode=mode), key)
        work = [cleanup if cleans else reap, retry, retry, retry]
        _maintained, *answers = in_threads(4, lambda index, work=work: work[index]())
        assert effects() == before + 1
        assert sorted(map(is_replay, answers)) == [False, True, True]
        assert len({answer.content for answer in answers}) == 1


def until_answered(view, key):
    """What a client gets in the end that asks again as often as it is told to."""
    answer = eventually(lambda: (answer := view(key)).status_code != 409 and answer)
    assert answer.status_code == 201
    return answer


@row_locks
@pytest.mark.parametrize("lock", ["nowait", "skip_locked"], indirect=True)
def test_l11_a_record_deleted_before_its_reuse_runs_once(other_thread, lock):
    done()
    cleaned = []
    with just_before(LOCKING, lambda: cleaned.append(other_thread(cleanup).rows)):
        answer = entry_point(paying)()
    assert cleaned == [1]
    assert (answer.status_code, is_replay(answer), effects()) == (201, False, 2)
    assert record().attempts == 1


@row_locks
def test_l11_a_record_that_a_retry_has_taken_is_not_deleted(other_thread):
    done()
    cleaned = []
    with just_before("UPDATE", lambda: cleaned.append(other_thread(cleanup).rows)):
        answer = entry_point(paying)()
    assert cleaned == [0]
    assert (answer.status_code, effects()) == (201, 2)
    assert record().status == "completed"


@row_locks
def test_l11_a_retry_that_meets_cleanup_asks_again(other_thread):
    done()
    answers = []
    with just_after(
        DELETING, lambda: answers.append(other_thread(entry_point(paying)))
    ):
        assert cleanup().rows == 1
    assert (answers[0].status_code, effects()) == (409, 1)
    assert entry_point(paying)().status_code == 201
    assert effects() == 2


@postgresql
@pytest.mark.not_on_citus
@pytest.mark.parametrize(
    "isolation", ["read committed", "repeatable read", "serializable"]
)
@pytest.mark.parametrize(
    "act",
    [
        lambda: shift(expires_at=HOUR, purge_at=HOUR),
        lambda: entry_point(paying)(),
        lambda: IdempotencyRecord.objects.all().delete(),
    ],
    ids=["extended", "used again", "deleted"],
)
def test_l11_a_record_no_longer_due_once_it_is_locked_stays(
    clean_up_while, act, isolation
):
    done()
    left = []

    def act_and_look():
        act()
        left.extend(IdempotencyRecord.objects.values())

    cleaned = clean_up_while(act_and_look, isolation)
    assert (cleaned.rows, cleaned.finished) == (0, True)
    assert list(IdempotencyRecord.objects.values()) == left


@postgresql
@pytest.mark.not_on_citus
def test_a_record_changed_meanwhile_goes_with_the_next_pass(clean_up_while):
    done("changed")
    done("as-it-was")
    change = partial(IdempotencyRecord.objects.filter(key="changed").update, replays=1)
    assert clean_up_while(change).rows == 1
    assert keys() == {"changed"}
    assert cleanup().rows == 1
