"""Reaping and cleaning up: what they take, what they pass over, and what a retry meets meanwhile."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from uuid import uuid4

import pytest
from django.db import OperationalError, connection, connections, transaction
from django.db.models import BooleanField
from django.db.models.expressions import RawSQL

from django_idempotency import engine, maintenance, signals
from django_idempotency.interventions import Done, release
from django_idempotency.maintenance import (
    cleaning,
    cleanup,
    drop_bodies,
    dropping_bodies,
    forget,
    reap,
    reaping,
)
from django_idempotency.models import IdempotencyRecord, Status
from django_idempotency.outcomes import Keep, StoredResponse
from django_idempotency.policy import Policy
from django_idempotency.stats import stats, totals
from django_idempotency.stores import store_for
from django_idempotency.stores.database import ahead
from tests.callers import SCOPE, claim, door, effects, is_replay, paying, record, row, shift
from tests.databases import database_url
from tests.threads import OtherThread, in_threads, just_after, just_before, wait_little_for_locks
from tests.waiting import eventually

pytestmark = pytest.mark.usefixtures("payer")
row_locks = pytest.mark.row_locks
postgresql = pytest.mark.postgresql

ROOT = Path(__file__).parent.parent
TABLE = IdempotencyRecord._meta.db_table
HOUR, DAY = 3600, 24 * 3600
HOLD = {"mode": "lease", "on_crash": "hold"}


def dead(key="k", *, since=HOUR, **policy):
    """A key whose holder went no further than its claim, and whose lease ran out so long ago."""
    claimed = claim(key, policy=Policy(**policy))
    shift(key, locked_at=-since - 60, locked_until=-since)
    return claimed


def done(key="k", *, purge_at=-HOUR, expires_at=-HOUR, **policy):
    """A key with an answer, whose times are so many seconds from now."""
    assert door(paying, **policy)(key).status_code == 201
    shift(key, expires_at=expires_at, purge_at=max(purge_at, expires_at))


def keys(**condition):
    return set(IdempotencyRecord.objects.filter(**condition).values_list("key", flat=True))


@pytest.fixture
def elsewhere():
    """Another thread, with a connection of its own."""
    thread = OtherThread()
    yield thread
    thread.close()


DELETING = r"DELETE|\s*WITH picked.*DELETE"
LOCKING = "SELECT .* FOR (NO KEY )?UPDATE"


@contextmanager
def heard(sent_by):
    sent = []

    def hear(**named):
        sent.append(named | {"committed": not connection.in_atomic_block})

    sent_by.connect(hear)
    try:
        yield sent
    finally:
        sent_by.disconnect(hear)


# --- The reaper ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["atomic", "lease"])
def test_a_key_whose_lease_ran_out_is_free_to_retry(mode):
    dead(mode=mode)
    reaped = reap()
    assert (reaped.failed, reaped.held, reaped.finished) == (1, 0, True)
    found = row()
    assert (found["status"], found["held"], found["token"], found["locked_until"]) == ("failed", False, None, None)
    assert door(paying, mode=mode)().status_code == 201
    assert record().attempts == 2


def test_a_key_that_was_accepted_but_never_begun_is_freed_too():
    dead(mode="lease")
    IdempotencyRecord.objects.update(status=Status.STARTED)
    assert reap().failed == 1


def test_a_key_with_on_crash_hold_is_held():
    dead(**HOLD)
    assert (reap().failed, record().held, record().reason) == (0, True, engine.CRASHED)
    assert door(paying, **HOLD)().status_code == 409
    assert effects() == 0


@pytest.mark.parametrize("policy", [{"mode": "lease"}, HOLD], ids=["retry", "hold"])
def test_what_was_live_does_not_expire_by_being_reaped(policy):
    """Its heartbeat kept it alive beyond its retention; a held key that were expired now would simply run again."""
    dead(**policy, retention=HOUR, audit=DAY)
    shift(locked_at=-10 * HOUR, expires_at=-9 * HOUR, purge_at=-9 * HOUR + DAY - HOUR)
    reap()
    kept = row()
    assert kept["expires_at"] - kept["updated_at"] == timedelta(hours=1)
    assert kept["purge_at"] - kept["updated_at"] == timedelta(days=1)


@pytest.mark.parametrize("mode", ["atomic", "lease"])
def test_a_lease_that_has_not_run_out_is_left_alone(mode):
    claim(policy=Policy(mode=mode))
    before = row()
    assert reap().failed == 0
    assert row() == before


def test_older_than_leaves_those_alone_that_ran_out_lately():
    dead("lately", since=60)
    dead("long-ago", since=HOUR)
    assert reap(older_than=600).failed == 1
    assert keys(status="failed") == {"long-ago"}


@row_locks
def test_a_live_holder_in_atomic_mode_is_passed_over_however_old(elsewhere):
    claimed = dead(since=DAY)
    with engine.execution(claimed, Policy()) as run:
        assert elsewhere(reap).failed == 0
        run.settle(Keep(StoredResponse(201)))
    assert record().status == "completed"


def test_an_answer_that_is_there_is_left_alone():
    done(expires_at=HOUR)
    before = row()
    assert reap().finished
    assert row() == before


@row_locks
def test_a_lease_can_not_be_renewed_between_the_look_and_the_move():
    """Else the holder would go on, believing that its lease is good, while a retry runs."""
    policy = Policy(mode="lease")
    claimed = dead(mode="lease")
    with ThreadPoolExecutor(1, initializer=connections.close_all) as pool:
        renewals = []

        def renew():
            try:
                return store_for(policy).renew([claimed], policy)
            finally:
                connections.close_all()

        def try_to_renew():
            renewals.append(pool.submit(renew))
            wait(renewals, timeout=0.5)  # long enough, were it let

        with just_before("UPDATE", try_to_renew):
            assert reap().failed == 1
        assert renewals[0].result() == set()


@row_locks
def test_a_lease_that_is_renewed_just_before_the_look_is_left_alone(elsewhere):
    policy = Policy(mode="lease")
    claimed = dead(mode="lease")
    with just_before(LOCKING, lambda: elsewhere(store_for(policy).renew, [claimed], policy)):
        assert reap().failed == 0
    assert record().token == claimed.token


@row_locks
def test_a_holder_that_comes_back_after_the_reaper_changes_nothing():
    policy = Policy(mode="lease")
    claimed = dead(mode="lease")
    reap()
    before = row()
    store = store_for(policy)
    assert not store.complete(claimed, StoredResponse(201), policy)
    assert not store.release(claimed, policy)
    assert not store.renew([claimed], policy)
    assert row() == before


def test_every_key_is_told_of_once_and_after_commit():
    dead("retry", mode="lease")
    dead("hold", **HOLD)
    with heard(signals.reaped) as sent:
        reap()
        reap()
    assert {(told["operation"].key, told["held"]) for told in sent} == {("retry", False), ("hold", True)}
    assert {told["operation"].id for told in sent} == set(IdempotencyRecord.objects.values_list("pk", flat=True))
    assert len(sent) == 2
    assert all(told["committed"] for told in sent)


def test_a_pass_goes_batch_by_batch_and_ends_in_time():
    for number in range(5):
        dead(f"k{number}", since=HOUR + number)
    assert [step.failed for step in reaping(batch=2)] == [2, 2, 1]
    for number in range(5):
        dead(f"m{number}")
    ended = reap(batch=2, max_seconds=0)
    assert (ended.failed, ended.finished) == (2, False)


@row_locks
def test_two_reapers_at_once_reap_each_key_once():
    for number in range(40):
        dead(f"k{number}", mode="lease")
    with heard(signals.reaped) as sent:
        reaped = in_threads(3, lambda _: reap(batch=3))
    assert sum(one.failed for one in reaped) == len(sent) == 40
    assert not any(one.bad for one in reaped)


BAD = "bad"
REFUSE = {  # a database that won't let this one row go
    "postgresql": (
        f"CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'refused'; END $$;"
        f"CREATE TRIGGER refuse BEFORE UPDATE ON {TABLE} FOR EACH ROW"
        f" WHEN (old.key LIKE '{BAD}%' AND new.status = 'failed') EXECUTE FUNCTION refuse()",
        f"DROP TRIGGER refuse ON {TABLE}; DROP FUNCTION refuse",
    ),
    "mysql": (
        f"CREATE TRIGGER refuse BEFORE UPDATE ON {TABLE} FOR EACH ROW"
        f" IF old.`key` LIKE '{BAD}%' AND new.status = 'failed' THEN"
        " SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'refused'; END IF",
        "DROP TRIGGER refuse",
    ),
    "sqlite": (
        f"CREATE TRIGGER refuse BEFORE UPDATE ON {TABLE}"
        f" WHEN old.key LIKE '{BAD}%' AND new.status = 'failed' BEGIN SELECT RAISE(ABORT, 'refused'); END",
        "DROP TRIGGER refuse",
    ),
}


def run_sql(sql):
    with connection.cursor() as cursor:
        cursor.execute(sql)


@pytest.fixture
def bad_rows(payer):
    refuse, allow = REFUSE[connection.vendor]
    run_sql(refuse)
    yield
    run_sql(allow)


@pytest.mark.usefixtures("bad_rows")
def test_a_bad_row_is_reported_and_does_not_stop_the_pass():
    for number in range(3):
        dead(f"{BAD}{number}", since=2 * HOUR)
    for number in range(5):
        dead(f"k{number}")
    with heard(signals.reaped) as sent:
        reaped = reap(batch=2)
    assert reaped.failed == len(sent) == 5
    assert reaped.finished
    assert set(reaped.bad) == {
        str(id) for id in IdempotencyRecord.objects.filter(status="processing").values_list("pk", flat=True)
    }
    assert all("refused" in error for error in reaped.bad.values())
    assert keys(status="processing") == {f"{BAD}{number}" for number in range(3)}


@row_locks
@pytest.mark.usefixtures("bad_rows")
def test_live_holders_before_a_bad_row_do_not_keep_the_pass_going_for_ever(elsewhere):
    live = dead("live", since=DAY)
    dead(BAD)
    dead("k")
    with engine.execution(live, Policy()) as run:
        assert elsewhere(lambda: [step.failed for step in reaping(batch=1)]) == [0, 1, 0]
        run.settle(Keep(StoredResponse(201)))


@postgresql
@pytest.mark.usefixtures("bad_rows")
def test_a_connection_lost_among_single_rows_is_an_error_and_makes_no_bad_row(proxy):
    for key in (BAD, "k1", "k2"):
        dead(key)
    updates = []

    def cut_the_second(execute, sql, *details):
        updates.append(sql.startswith("UPDATE"))
        if sum(updates) == 2:
            proxy.go_away()
        return execute(sql, *details)

    with connection.execute_wrapper(cut_the_second), pytest.raises(OperationalError):
        reap()
    proxy.come_back()


REAPER = """
import sys, django
django.setup()
from django.db import connection
from django_idempotency.maintenance import reap

updates = []

def wait_in_the_second(execute, sql, *details):
    result = execute(sql, *details)
    if sql.startswith("UPDATE"):
        updates.append(sql)
        if len(updates) == 2:
            print("updated", flush=True)
            sys.stdin.readline()
    return result

with connection.execute_wrapper(wait_in_the_second):
    reap(batch=2)
"""


@pytest.mark.server
@row_locks
def test_a_reaper_killed_in_the_middle_of_a_pass_loses_nothing():
    for number in range(5):
        dead(f"k{number}", mode="lease")
    with real_process("-c", REAPER, stdin=subprocess.PIPE) as process:
        assert process.stdout.readline() == "updated\n"
        assert len(keys(status="failed")) == 2
        process.kill()
        assert process.wait() == -signal.SIGKILL
    # The server may take a moment to notice that the process is gone, and the locks with it.
    assert eventually(lambda: len(keys(status="failed")) + reap().failed == 5)
    assert len(keys(status="failed")) == 5


@contextmanager
def real_process(*arguments, **options):
    url = database_url(connection.settings_dict, connection.settings_dict["NAME"])
    environment = os.environ | {"DATABASE_URL": url, "DJANGO_SETTINGS_MODULE": "testproject.settings", "DEBUG": "1"}
    process = subprocess.Popen(
        [sys.executable, *arguments], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, **options
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def test_maintenance_inside_a_transaction_is_refused():
    for work in (reap, cleanup, drop_bodies):
        with transaction.atomic(), pytest.raises(RuntimeError, match="durable"):
            work()


# --- Cleaning up -----------------------------------------------------------------------------------------------------


def test_only_what_is_past_its_audit_time_is_deleted():
    done("purged")
    done("in-retention", expires_at=HOUR)
    done("in-audit", expires_at=-HOUR, purge_at=HOUR)
    dead("processing")
    shift("processing", expires_at=-DAY, purge_at=-DAY)
    dead("started", mode="lease")
    IdempotencyRecord.objects.filter(key="started").update(
        status=Status.STARTED, expires_at=ahead(-DAY), purge_at=ahead(-DAY)
    )
    assert cleanup().rows == 1
    assert keys() == {"in-retention", "in-audit", "processing", "started"}


def test_failures_are_deleted_but_held_keys_wait_for_a_person():
    dead("retry", mode="lease")
    dead("hold", **HOLD)
    reap()
    for key in ("retry", "hold"):
        shift(key, expires_at=-2, purge_at=-1)
    assert cleanup().rows == 1
    assert door(paying, **HOLD)("hold").status_code == 409
    assert isinstance(release(record("hold").pk), Done)
    assert cleanup().rows == 1


def fill(count, *, purge_at):
    """So many answers, the oldest of them due in ``purge_at`` seconds, the others a second apart."""
    IdempotencyRecord.objects.bulk_create(
        IdempotencyRecord(
            id=uuid4(),
            scope="s",
            key=f"k{number}",
            fingerprint=bytes(32),
            mode="atomic",
            status=Status.COMPLETED,
            created_at=ahead(-DAY),
            updated_at=ahead(-DAY),
            expires_at=ahead(purge_at + number),
            purge_at=ahead(purge_at + number),
            response_status=200,
            response_headers=[],
        )
        for number in range(count)
    )


def test_it_goes_batch_by_batch_oldest_first_and_says_how_far_behind_it_is():
    fill(10, purge_at=-1000)
    steps = cleaning(batch=4, pause=0)
    first = next(steps)
    assert (first.rows, first.finished) == (4, False)
    assert 995 <= first.lag <= 1010
    assert keys() == {f"k{number}" for number in range(4, 10)}
    assert [(step.rows, step.finished) for step in steps] == [(4, False), (2, True)]
    assert stats().lag == 0


def test_it_ends_in_time_and_the_next_pass_goes_on():
    fill(5, purge_at=-1000)
    ended = cleanup(batch=2, pause=0, max_seconds=0)
    assert (ended.rows, ended.finished) == (2, False)
    assert stats().due == 3
    rest = cleanup(batch=2, pause=0)
    assert (rest.rows, rest.lag, rest.finished) == (3, 0, True)
    assert rest.rate == rest.rows / rest.seconds


def test_it_pauses_between_batches(settings):
    fill(3, purge_at=-1000)
    settings.IDEMPOTENCY = {"CLEANUP_BATCH": 1, "CLEANUP_PAUSE": 0.05}
    assert cleanup().seconds >= 3 * 0.05


def test_each_batch_is_a_transaction_of_its_own(elsewhere):
    fill(4, purge_at=-1000)
    steps = cleaning(batch=2, pause=0)
    next(steps)
    assert elsewhere(IdempotencyRecord.objects.count) == 2
    assert not connection.in_atomic_block


@row_locks
def test_a_record_that_somebody_has_locked_is_passed_over(elsewhere):
    fill(3, purge_at=-1000)
    with transaction.atomic():
        IdempotencyRecord.objects.select_for_update().get(key="k0")
        elsewhere(wait_little_for_locks)
        assert elsewhere(cleanup).rows == 2
    assert cleanup().rows == 1


@row_locks
def test_two_at_once_delete_everything_once():
    fill(100, purge_at=-1000)
    deleted = sum(one.rows for one in in_threads(3, lambda _: cleanup(batch=7, pause=0)))
    # On MariaDB one can pass over a row that another has locked and, as a deadlock's victim, lets go again.
    assert 93 < deleted <= 100
    assert deleted + cleanup().rows == 100
    assert keys() == set()


@pytest.mark.parametrize("work", [reap, cleanup, drop_bodies])
def test_a_batch_of_nothing_is_refused(work):
    with pytest.raises(ValueError, match="at least 1"):
        work(batch=0)


@pytest.mark.parametrize(
    ("work", "make", "done_to"),
    [
        (reap, dead, {"status": "failed"}),
        (cleanup, done, {"key": ""}),
        (drop_bodies, partial(done, purge_at=HOUR), {"response_body": None}),
        (partial(forget, SCOPE), done, {"key": ""}),
    ],
    ids=["reap", "cleanup", "drop_bodies", "forget"],
)
def test_however_large_a_batch_no_statement_has_more_parameters_than_the_database_takes(
    work, make, done_to, monkeypatch
):
    for number in range(70):
        make(f"{number}")
    monkeypatch.setattr(connection.features, "max_query_params", 60)
    sent = []

    def count(execute, sql, params, *details):
        sent.append(len(params or ()))
        return execute(sql, params, *details)

    with connection.execute_wrapper(count):
        work(batch=1000)
    at_once = connection.vendor == "postgresql" and work in (cleanup, drop_bodies)  # these send no ids
    assert max(sent) <= 60
    assert at_once or max(sent) >= 10
    assert not IdempotencyRecord.objects.exclude(**done_to).exists()


# --- Two tiers -------------------------------------------------------------------------------------------------------


def test_bodies_are_dropped_once_expired_and_the_record_stays_for_audit():
    done("expired", expires_at=-HOUR, purge_at=DAY)
    done("in-retention", expires_at=HOUR, purge_at=DAY)
    done("without-audit")
    assert drop_bodies().rows == 1
    assert drop_bodies().rows == 0
    expired = row("expired")
    assert (expired["response_status"], expired["response_body"]) == (201, None)
    assert expired["response_headers"] is not None
    assert row("in-retention")["response_body"]
    again = door(paying)("in-retention")
    assert is_replay(again)
    assert again.content


def test_a_key_whose_body_was_dropped_is_a_new_operation():
    done(expires_at=-HOUR, purge_at=DAY)
    drop_bodies()
    answer = door(paying)()
    assert (answer.status_code, is_replay(answer), effects()) == (201, False, 2)


# --- L11: the boundary -----------------------------------------------------------------------------------------------


@row_locks
@pytest.mark.parametrize("mode", ["atomic", "lease"])
@pytest.mark.parametrize("cleans", [False, True], ids=["reused", "deleted"])
def test_l11_two_retries_as_the_key_expires_or_is_deleted_run_once(mode, cleans):
    for number in range(8):
        key = f"k{number}"
        done(key, mode=mode)
        before = effects()
        retry = partial(until_answered, door(paying, mode=mode), key)
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
@pytest.mark.parametrize("lock", ["nowait", "skip_locked"])
def test_l11_a_record_deleted_under_a_retry_that_was_about_to_reuse_it_runs_once(elsewhere, lock):
    done()
    cleaned = []
    with just_before(LOCKING, lambda: cleaned.append(elsewhere(cleanup).rows)):
        answer = door(paying, lock=lock)()
    assert cleaned == [1]
    assert (answer.status_code, is_replay(answer), effects()) == (201, False, 2)
    assert record().attempts == 1


@row_locks
def test_l11_a_record_that_a_retry_has_taken_is_not_deleted(elsewhere):
    done()
    cleaned = []
    with just_before("UPDATE", lambda: cleaned.append(elsewhere(cleanup).rows)):
        answer = door(paying)()
    assert cleaned == [0]
    assert (answer.status_code, effects()) == (201, 2)
    assert record().status == "completed"


@row_locks
def test_l11_a_retry_that_meets_cleanup_at_its_record_is_told_to_ask_again(elsewhere):
    done()
    answers = []
    with just_after(DELETING, lambda: answers.append(elsewhere(door(paying)))):
        assert cleanup().rows == 1
    assert (answers[0].status_code, effects()) == (409, 1)
    assert door(paying)().status_code == 201
    assert effects() == 2


# --- What changes while PostgreSQL sweeps ----------------------------------------------------------------------------

GATE = 4711


@pytest.fixture
def clean_up_while(elsewhere, monkeypatch):
    """Clean up in a statement that has begun, and seen the rows as they are, when something is done to them."""

    waits = RawSQL(f"(SELECT true FROM pg_advisory_xact_lock_shared({GATE}))", (), BooleanField())
    purgeable = maintenance.purgeable

    def clean_up(isolation):
        run_sql(f"SET default_transaction_isolation = '{isolation}'")
        try:
            return cleanup()
        finally:
            connections.close_all()

    def run(act, isolation="read committed"):
        elsewhere(run_sql, f"SELECT pg_advisory_lock({GATE})")
        with monkeypatch.context() as patched, ThreadPoolExecutor(1) as pool:
            patched.setattr(maintenance, "purgeable", lambda using: purgeable(using=using).filter(waits))
            cleaned = pool.submit(clean_up, isolation)
            try:
                eventually(lambda: waiting_at_the_gate() == 1)
                act()
            finally:
                elsewhere(run_sql, f"SELECT pg_advisory_unlock({GATE})")
            return cleaned.result(60)

    return run


def waiting_at_the_gate():
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted AND objid = %s", [GATE]
        )
        return cursor.fetchone()[0]


@postgresql
@pytest.mark.parametrize("isolation", ["read committed", "repeatable read", "serializable"])
@pytest.mark.parametrize(
    "act",
    [
        lambda: shift(expires_at=HOUR, purge_at=HOUR),
        lambda: door(paying)(),
        lambda: IdempotencyRecord.objects.all().delete(),
    ],
    ids=["extended", "used again", "deleted"],
)
def test_l11_what_is_not_due_any_more_when_it_is_locked_stays(clean_up_while, act, isolation):
    done()
    left = []

    def act_and_look():
        act()
        left.extend(IdempotencyRecord.objects.values())

    cleaned = clean_up_while(act_and_look, isolation)
    assert (cleaned.rows, cleaned.finished) == (0, True)
    assert list(IdempotencyRecord.objects.values()) == left


@postgresql
def test_a_record_that_was_changed_meanwhile_and_is_due_all_the_same_goes_with_the_next_pass(clean_up_while):
    done("changed")
    done("as-it-was")
    change = partial(IdempotencyRecord.objects.filter(key="changed").update, replays=1)
    assert clean_up_while(change).rows == 1
    assert keys() == {"changed"}
    assert cleanup().rows == 1


# --- How things stand ------------------------------------------------------------------------------------------------


def test_stats_tell_what_is_pending_stuck_and_due():
    for number in range(10):
        claim(f"live{number}", policy=Policy(mode="lease"))
        shift(f"live{number}", locked_at=-number)
    dead("stuck", since=HOUR)
    fill(3, purge_at=-500)
    found = stats()
    assert (found.pending, found.stuck, found.due) == (11, 1, 3)
    assert 4 <= found.pending_p50 <= found.pending_p95 <= found.pending_p99
    assert HOUR <= found.pending_p99 <= HOUR + 120
    assert 500 <= found.lag <= 520


def test_totals_look_at_every_record():
    done("a", expires_at=HOUR)
    IdempotencyRecord.objects.update(replays=3)
    dead("retry", mode="lease")
    dead("hold", **HOLD)
    reap()
    found = totals()
    assert (found.completed, found.failed, found.retryable, found.held, found.replays) == (1, 2, 1, 1, 3)
    assert found.deduplicated == 3 / 6


@postgresql
def test_stats_know_the_size_of_the_table():
    fill(200, purge_at=HOUR)
    run_sql(f"ANALYZE {TABLE}")
    assert stats().rows == 200
    assert stats().bytes > 8192


# --- Plans -----------------------------------------------------------------------------------------------------------

LIVE, DUE, STUCK = 10_000, 10_000, 100
FILL = f"""
INSERT INTO {TABLE} (
    id, scope, key, method, path, fingerprint, mode, created_at, status, token, locked_at, locked_until, updated_at,
    expires_at, purge_at, response_status, response_headers, response_body
)
SELECT gen_random_uuid(), 's', i, 'POST', '/', ''::bytea, 'lease', now(), 'processing', gen_random_uuid(), now(),
    now() + CASE WHEN i <= {STUCK} THEN interval '-1 hour' ELSE interval '1 hour' END, now(), now() + interval '1 day',
    now() + interval '1 day', NULL, NULL::jsonb, NULL::bytea
FROM generate_series(1, {LIVE}) AS i
UNION ALL
SELECT gen_random_uuid(), 's', i, 'POST', '/', ''::bytea, 'lease', now(), 'completed', NULL, NULL, NULL, now(),
    now() + make_interval(secs => i - {DUE}), now() + make_interval(secs => i - {DUE} + (i % 2)), 200, '[]',
    'body'
FROM (SELECT i FROM generate_series(1, 2 * {DUE}) AS i ORDER BY random()) AS shuffled (i)
"""


@pytest.fixture
def large_table(payer):
    run_sql(f"VACUUM {TABLE}")  # what earlier tests have left
    run_sql(FILL)
    run_sql(f"ANALYZE {TABLE}")


def plans(work):
    """The plan of each statement on the table that ``work`` sends."""
    found = []

    def explain(execute, sql, params, *details):
        if TABLE in sql:
            with connection.connection.cursor() as cursor:
                cursor.execute("SAVEPOINT explained")
                cursor.execute(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {sql}", params)
                found.append(cursor.fetchone()[0][0]["Plan"])
                cursor.execute("ROLLBACK TO explained")
        return execute(sql, params, *details)

    with connection.execute_wrapper(explain):
        work()
    return found


def nodes(plan):
    yield plan
    for child in plan.get("Plans", ()):
        yield from nodes(child)


def indexes(plan):
    """Those by which the table is read, or how else it is."""
    scans = [node for node in nodes(plan) if "Scan" in node["Node Type"]]
    return {node.get("Index Name", node["Node Type"]) for node in scans} - {"Bitmap Heap Scan", "CTE Scan"}


def buffers(plan):
    return plan["Shared Hit Blocks"] + plan["Shared Read Blocks"]


@postgresql
@pytest.mark.plain_table  # it names the indexes; test_partitions has the like
@pytest.mark.usefixtures("large_table")
def test_the_reaper_reads_only_its_rows_by_the_partial_index_and_writes_by_primary_key():
    look, write = plans(lambda: next(reaping(batch=STUCK)))
    assert indexes(look) == {"idempotency_record_reap"}
    assert indexes(write) == {f"{TABLE}_pkey"}
    assert look["Actual Rows"] == STUCK
    assert buffers(look) < 10 * STUCK
    assert buffers(look) + buffers(write) < 30 * STUCK


@postgresql
@pytest.mark.plain_table
@pytest.mark.usefixtures("large_table")
@pytest.mark.parametrize(
    ("steps", "index", "most"),
    [(cleaning, "idempotency_record_purge", 6), (dropping_bodies, "idempotency_record_bodies", 20)],
)
def test_a_sweep_is_one_statement_that_finds_its_rows_by_the_partial_index_and_changes_them_in_place(
    steps, index, most
):
    (sweep,) = plans(lambda: next(steps(batch=100)))
    assert indexes(sweep) == {index, "Tid Scan"}
    assert [node["Actual Rows"] for node in nodes(sweep) if node["Node Type"] == "LockRows"] == [100]
    assert buffers(sweep) < most * 100


@postgresql
@pytest.mark.usefixtures("large_table")
def test_a_later_batch_does_not_wade_through_what_the_earlier_ones_deleted(elsewhere):
    """While somebody's old snapshot keeps the dead rows, each batch would walk all of those before it."""
    elsewhere(take_a_snapshot)
    steps = cleaning(batch=1000, pause=0)
    (first,) = plans(lambda: next(steps))
    for _ in range(6):
        next(steps)
    (last,) = plans(lambda: next(steps))
    assert buffers(last) < 1.5 * buffers(first)


def take_a_snapshot():
    """And keep it for as long as this thread's connection is open."""
    connection.set_autocommit(False)
    run_sql("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
    assert IdempotencyRecord.objects.exists()


@postgresql
def test_the_index_of_bodies_is_empty_without_an_audit_tier():
    fill(50, purge_at=HOUR)
    IdempotencyRecord.objects.update(response_body=b"body")
    run_sql(f"VACUUM {TABLE}")
    with connection.cursor() as cursor:
        cursor.execute("SELECT reltuples FROM pg_class WHERE relname = 'idempotency_record_bodies'")
        assert cursor.fetchone() == (0,)
