"""The laws, one engine behind one door: each test bears the number of its law. Over HTTP: ``test_laws_http.py``."""

from __future__ import annotations

import ast
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from uuid import uuid4

import pytest
from asgiref.sync import async_to_sync, sync_to_async
from django.contrib.auth.decorators import user_passes_test
from django.contrib.auth.models import AnonymousUser
from django.db import DatabaseError, OperationalError, connection, transaction
from django.http import HttpResponse, HttpResponseRedirect, StreamingHttpResponse
from django.template.response import SimpleTemplateResponse
from django.test import TestCase, override_settings
from psycopg import IsolationLevel
from rest_framework.views import APIView

import django_idempotency
from django_idempotency import engine, signals
from django_idempotency.consumers.base import Message, RetryLater, consume
from django_idempotency.decorators import idempotent
from django_idempotency.exceptions import ClaimInsideTransaction, ClaimLost, TerminalFailure
from django_idempotency.middleware import IdempotencyMiddleware
from django_idempotency.models import IdempotencyRecord, Status
from django_idempotency.outcomes import Keep, StoredResponse
from django_idempotency.policy import Policy
from django_idempotency.rest_framework import IdempotentMixin
from django_idempotency.stores import store_for
from django_idempotency.stores.database import DatabaseStore
from testproject.models import LedgerEntry
from tests.callers import (
    MODES,
    SCOPE,
    Gate,
    claim,
    door,
    effects,
    heard,
    is_replay,
    operation,
    pay,
    paying,
    post,
    record,
    row,
    shift,
)
from tests.holder import AFTER_EFFECT, holding
from tests.pgbouncer import free_port
from tests.proxy import Cut
from tests.threads import in_threads, just_before
from tests.waiting import eventually, someone_waits_for_a_lock

pytestmark = pytest.mark.usefixtures("payer")
row_locks = pytest.mark.row_locks
postgresql = pytest.mark.postgresql
in_both_modes = pytest.mark.parametrize("mode", MODES)

HOUR = 3600
OTHER_BODY = b'{"amount": 6}'


# --- L1: at most one execution per key ever commits its effects ------------------------------------------------------


@row_locks
@in_both_modes
@pytest.mark.parametrize("lock", ["nowait", "skip_locked"])
def test_l1_of_many_who_find_a_dead_holder_one_runs(mode, lock):
    policy = {"mode": mode, "lock": lock}
    claim(policy=Policy(**policy))
    shift(locked_at=-HOUR, locked_until=-HOUR)
    answers = in_threads(12, lambda _: door(paying, **policy)())
    assert effects() == 1
    assert {answer.status_code for answer in answers} <= {201, 409}
    assert len({answer.content for answer in answers if answer.status_code == 201}) == 1


@row_locks
@in_both_modes
def test_l1_of_many_who_find_an_expired_answer_one_runs(mode):
    door(paying, mode=mode)()
    shift(expires_at=-1, purge_at=HOUR)
    in_threads(12, lambda _: door(paying, mode=mode)())
    assert effects() == 2


@in_both_modes
def test_l1_up_to_the_end_of_the_retention_nothing_runs_again(mode):
    send = door(paying, mode=mode)
    first = send()
    shift(expires_at=2, purge_at=HOUR)
    assert send().content == first.content
    assert effects() == 1


@postgresql
@in_both_modes
def test_l1_a_claim_whose_answer_was_lost_is_still_the_callers_own(mode, proxy):
    proxy.cut = Cut.AFTER_CLAIM
    assert door(paying, mode=mode)().status_code == 201
    assert (effects(), record().attempts, proxy.cuts) == (1, 1, 1)


# --- L2: a replay is what the first caller got -----------------------------------------------------------------------

ANSWERS = {
    "json": lambda: HttpResponse(b'{"a":  1}', "application/json; charset=utf-8", status=201),
    "binary": lambda: HttpResponse(bytes(range(256)), "application/octet-stream"),
    "no content": lambda: HttpResponse(status=204),
    "redirect": lambda: HttpResponseRedirect("/receipts/1/"),
    "headers": lambda: HttpResponse(
        headers={"Location": "/1/", "X-Request-Cost": "3", "Vary": "Accept", "ETag": '"1"'}
    ),
    "terminal failure": lambda: HttpResponse(b"card declined", status=402),
    "conflict": lambda: HttpResponse("sold out", status=409),
}


@in_both_modes
@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
def test_l2_a_replay_has_the_status_the_bytes_and_the_headers_of_the_first_answer(mode, answer):
    send = door(lambda request: answer(), mode=mode)
    first, second = send(), send()
    assert not is_replay(first)
    assert is_replay(second)
    assert (second.status_code, second.content) == (first.status_code, first.content)
    assert dict(second.items()) == dict(first.items()) | {"Idempotent-Replayed": "true"}


@pytest.mark.parametrize("store_cookies", [False, True])
def test_l2_cookies_are_replayed_if_the_policy_says_so(store_cookies):
    def view(request):
        response = HttpResponse()
        response.set_cookie("basket", "17", max_age=60, httponly=True, samesite="Lax")
        return response

    send = door(view, store_cookies=store_cookies)
    first, second = send(), send()
    assert is_replay(second)
    assert second.cookies.output() == (first.cookies.output() if store_cookies else "")


# --- L3: no phantom success ------------------------------------------------------------------------------------------


def paying_with_nobodys_money(request):
    """Its foreign key is deferred: it fails at COMMIT."""
    LedgerEntry.objects.create(kind="order", user_id=0, amount=5, currency="EUR", reference="r")
    return HttpResponse(status=201)


@postgresql
def test_l3_a_constraint_that_fails_at_commit_leaves_no_answer():
    with pytest.raises(Exception, match="foreign key"):
        door(paying_with_nobodys_money)()
    assert (record().status, record().response_status) == (Status.FAILED, None)
    assert door(paying)().status_code == 201
    assert effects() == 1


@postgresql
def test_l3_a_serialization_failure_at_commit_leaves_no_answer(monkeypatch):
    connection.close()
    monkeypatch.setitem(connection.settings_dict, "OPTIONS", {"isolation_level": IsolationLevel.SERIALIZABLE})

    def view(request):
        seen = effects()
        if seen == 0 and request.idempotency.attempt == 1:
            in_threads(1, write_what_was_read)
        return paying(request)

    def write_what_was_read(_index):
        with transaction.atomic():
            assert effects() == 0
            pay()

    with pytest.raises(OperationalError, match="serialize"):
        door(view)()
    assert effects() == 1
    assert record().response_status is None
    assert door(view)().status_code == 201
    assert effects() == 2
    connection.close()


@postgresql
def test_l3_a_backend_that_dies_in_the_view_leaves_no_answer():
    def view(request):
        response = paying(request)
        if request.idempotency.attempt == 1:
            terminate(connection.connection.info.backend_pid)
        return response

    answer = door(view)()
    assert (answer.status_code, effects(), record().response_status) == (503, 0, None)
    assert door(view)().status_code == 201
    assert effects() == 1


def terminate(*pids):
    """End these backends as an administrator, or a failover, would; returns once they are gone."""

    def from_elsewhere(_index):
        with connection.cursor() as cursor:
            for pid in pids:
                cursor.execute("SELECT pg_terminate_backend(%s, 5000)", [pid])
                assert cursor.fetchone() == (True,)

    in_threads(1, from_elsewhere)


@postgresql
@pytest.mark.parametrize("requests_before", [0, 6])  # what the third and later ones say is prepared
@pytest.mark.parametrize("limit", ["idle_in_transaction_session_timeout", "transaction_timeout"])
def test_l3_a_view_that_was_idle_or_lasted_for_too_long_leaves_no_answer(limit, requests_before, other_thread):
    """Before PostgreSQL 17 there is only the first of these limits."""

    def view(request):
        response = paying(request)
        if request.idempotency.attempt == 1:
            with connection.cursor() as cursor:
                cursor.execute("SELECT 1 FROM pg_settings WHERE name = %s", [limit])
                known = limit if cursor.fetchone() else "idle_in_transaction_session_timeout"
                cursor.execute(f"SET LOCAL {known} = 1")
            backend = connection.connection.info.backend_pid
            eventually(lambda: other_thread(lambda: is_gone(backend)))
        return response

    for number in range(requests_before):
        assert door(paying)(key=f"earlier-{number}").status_code == 201
    answer = door(view)()
    assert (answer.status_code, effects(), record().response_status) == (503, requests_before, None)
    assert door(view)().status_code == 201
    assert effects() == requests_before + 1


def is_gone(backend):
    with connection.cursor() as cursor:
        cursor.execute("SELECT 1 FROM pg_stat_activity WHERE pid = %s", [backend])
        return not cursor.fetchone()


@postgresql
def test_l3_a_connection_that_breaks_before_commit_is_no_success(proxy):
    def view(request):
        proxy.cut = Cut.BEFORE_COMMIT
        return paying(request)

    answer = door(view)()
    assert (answer.status_code, effects(), proxy.cuts) == (503, 0, 1)
    assert b'"safe_new_key": true' in answer.content
    assert door(paying)().status_code == 201
    assert effects() == 1


def test_l3_a_2xx_from_a_transaction_marked_for_rollback_is_refused():
    def view(request):
        response = paying(request)
        transaction.set_rollback(request.idempotency.attempt == 1)
        return response

    with pytest.raises(transaction.TransactionManagementError, match="marked for rollback"):
        door(view)()
    assert (effects(), record().response_status) == (0, None)
    assert door(view)().status_code == 201
    assert effects() == 1


# --- L4: no lost success ---------------------------------------------------------------------------------------------


@postgresql
def test_l4_an_answer_lost_at_commit_is_found_again(proxy, caplog):
    def view(request):
        proxy.cut = Cut.AFTER_COMMIT
        return paying(request)

    first = door(view)()
    assert (first.status_code, is_replay(first), effects(), proxy.cuts) == (201, False, 1, 1)
    assert door(view)().content == first.content
    assert effects() == 1
    (told,) = caplog.records
    assert (told.levelname, told.event, told.attempt) == ("ERROR", "committed_with_error", 1)
    assert told.record_id == str(record().id) in told.getMessage()
    assert told.exc_info


@postgresql
@pytest.mark.parametrize("lock", ["nowait", "skip_locked"])
def test_l4_it_is_found_once_whoever_has_the_record_locked_lets_go_of_it(proxy, lock, monkeypatch, other_thread):
    """As the server does that is not done with the transaction."""
    let_go, sleep = threading.Event(), time.sleep
    lockers = ThreadPoolExecutor(1)

    def let_go_and_sleep(seconds):
        let_go.set()
        sleep(seconds)

    def lock_the_record():
        with transaction.atomic(), connection.cursor() as cursor:
            cursor.execute(f"SELECT 1 FROM {IdempotencyRecord._meta.db_table} FOR UPDATE")
            assert let_go.wait(10)
        connection.close()

    def view(request):
        locked.append(lockers.submit(lock_the_record))
        eventually(lambda: other_thread(someone_waits_for_a_lock))
        proxy.cut = Cut.AFTER_COMMIT
        return paying(request)

    locked = []
    monkeypatch.setattr(engine.time, "sleep", let_go_and_sleep)
    first = door(view, lock=lock)()
    assert (first.status_code, is_replay(first), effects(), proxy.cuts) == (201, False, 1, 1)
    locked[0].result(10)
    lockers.shutdown()


class Clock:
    """In the place of ``time``: sleeping takes no time."""

    now = 0.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


@postgresql
def test_l4_while_nobody_knows_whether_commit_took_place_no_new_key_is_safe(proxy, monkeypatch):
    clock = Clock()
    monkeypatch.setattr(engine, "time", clock)

    def view(request):
        proxy.cut, proxy.away_once_cut = Cut.AFTER_COMMIT, True
        return paying(request)

    unsure = door(view)()
    assert (unsure.status_code, unsure.headers["Retry-After"]) == (503, "1")
    assert b'"safe_new_key": false' in unsure.content
    assert 5 <= clock.now < 5.1
    proxy.come_back()
    assert is_replay(door(view)())
    assert effects() == 1


def test_l4_effects_whose_answer_cannot_be_stored_are_not_committed():
    def view(request):
        IdempotencyRecord.objects.update(token=uuid4())
        return paying(request)

    assert door(view)().status_code == 409
    assert effects() == 0


@row_locks
def test_l4_a_process_killed_after_its_effect_has_committed_neither_effect_nor_answer():
    with holding() as holder:
        holder.go_on()
        assert holder.says() == AFTER_EFFECT
        holder.kill()
    assert effects() == 0
    assert eventually(lambda: completed(door(paying)())).content
    assert effects() == 1


def completed(answer):
    return answer if answer.status_code == 201 else None


# --- L5: a holder that lost its claim can change nothing -------------------------------------------------------------

WRITES = {
    "complete": lambda store, stale, policy: store.complete(stale, StoredResponse(200), policy),
    "fail": lambda store, stale, policy: store.fail(stale, "late", policy),
    "hold": lambda store, stale, policy: store.fail(stale, "late", policy, held=True),
    "release": lambda store, stale, policy: store.release(stale, policy),
    "renew": lambda store, stale, policy: store.renew([stale], policy),
}


@in_both_modes
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_l5_no_write_of_a_lost_claim_reaches_the_record(mode, write):
    policy = Policy(mode=mode, grace=0)
    stale = claim(policy=policy)
    shift(locked_until=-1)
    claim(policy=policy)  # takes it over
    before = row()
    assert not write(store_for(policy), stale, policy)
    assert row() == before


@in_both_modes
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_l5_a_key_released_and_claimed_anew_is_nobody_elses(mode, write):
    policy = Policy(mode=mode)
    stale = claim(policy=policy)
    assert store_for(policy).release(stale, policy)
    claim(policy=policy)
    before = row()
    assert not write(store_for(policy), stale, policy)
    assert row() == before


def test_l5_whoever_is_overtaken_before_the_row_lock_does_not_run():
    policy = Policy(grace=0)
    overtaken, owner = claim(policy=policy), claim(policy=policy)
    with pytest.raises(ClaimLost), engine.execution(overtaken, policy):
        pay()
    assert effects() == 0
    with engine.execution(owner, policy) as run:
        run.settle(Keep(StoredResponse(201)))
    assert record().response_status == 201


@row_locks
def test_l5_a_zombie_cannot_complete_what_another_took_over():
    with holding(mode="lease", lease=1) as zombie:
        zombie.stop()
        owner = eventually(lambda: completed(door(paying, mode="lease")()))
        before = row()
        zombie.resume()
        zombie.go_on()
        assert zombie.says() == AFTER_EFFECT
        zombie.go_on()
        assert zombie.says() == [201, owner.content.decode()]  # the owner's answer, not its own
        assert row() | {"replays": 0, "last_replayed_at": None} == before


@row_locks
def test_l5_a_zombie_that_asks_before_its_effect_learns_that_it_lost():
    with holding(mode="lease", lease=1, renews=True) as zombie:
        zombie.stop()
        owner = eventually(lambda: completed(door(paying, mode="lease")()))
        zombie.resume()
        zombie.go_on()
        assert zombie.says() == [201, owner.content.decode()]
    assert effects() == 1


@postgresql
def test_l5_the_effects_of_a_zombie_in_atomic_mode_are_rejected():
    with holding() as zombie:
        zombie.stop()
        terminate(*holders_of_row_locks())
        owner = door(paying)()
        before = row()
        zombie.resume()
        zombie.go_on()
        assert zombie.says()[0] >= 500
        assert row() == before
    assert (owner.status_code, effects()) == (201, 1)


def holders_of_row_locks():
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND state = 'idle in transaction'"
        )
        return [pid for (pid,) in cursor.fetchall()]


@postgresql
def test_l5_whoever_is_cut_off_before_its_commit_and_overtaken_answers_as_the_winner_did(proxy):
    won = []

    def rival(_index):
        return eventually(lambda: completed(door(paying, grace=0)()))

    def view(request):
        proxy.cut, proxy.meanwhile = Cut.BEFORE_COMMIT, lambda: won.extend(in_threads(1, rival))
        return paying(request)

    with heard(signals.stale_write_rejected) as rejected:
        lost = door(view)()
    assert is_replay(lost)
    assert lost.content == won[0].content
    assert (effects(), len(rejected), record().attempts) == (1, 1, 2)


@postgresql
def test_l5_whoever_is_cut_off_before_its_commit_and_has_no_record_any_more_is_told_to_ask_again(proxy):
    def view(request):
        proxy.cut = Cut.BEFORE_COMMIT
        proxy.meanwhile = lambda: in_threads(1, lambda _: IdempotencyRecord.objects.all().delete())
        return paying(request)

    with heard(signals.stale_write_rejected) as rejected:
        assert door(view)().status_code == 409
    assert (effects(), len(rejected)) == (0, 1)


COMPLETION = r"\s*UPDATE .?django_idempotency_record"


@row_locks
def test_l5_a_terminal_failure_whose_claim_was_lost_gives_way_to_the_winners_answer():
    """Between the rollback of its effects and its own writing, its record is anybody's."""

    def view(request):
        raise TerminalFailure(HttpResponse("declined", status=402))

    def rival():
        in_threads(1, lambda _: door(paying, grace=0)())

    with just_before(COMPLETION, rival):
        answer = door(view)()
    assert (answer.status_code, is_replay(answer), effects()) == (201, True, 1)


# --- L6: a live holder is never taken over, a dead one at once -------------------------------------------------------


@row_locks
def test_l6_in_atomic_mode_a_live_holder_is_never_taken_over_however_old_its_claim():
    gate, policy = Gate(), {"grace": 0}

    def grow_old(**_named):
        shift(locked_at=-HOUR, locked_until=-HOUR)

    signals.claimed.connect(grow_old)
    try:
        with gate.running(**policy) as answer:
            duplicates = in_threads(10, lambda _: door(paying, **policy)())
        assert {duplicate.status_code for duplicate in duplicates} == {409}
        assert answer.result().status_code == 201
    finally:
        signals.claimed.disconnect(grow_old)
    assert effects() == 1


@row_locks
def test_l6_a_process_that_is_stopped_in_atomic_mode_is_alive():
    with holding(lease=1, grace=0) as holder:
        holder.stop()
        duplicates = in_threads(5, lambda _: door(paying, lease=1, grace=0)().status_code)
        holder.resume()
        holder.go_on()
        assert holder.says() == AFTER_EFFECT
        holder.go_on()
        assert holder.says()[0] == 201
    assert duplicates == [409] * 5
    assert effects() == 1


@row_locks
def test_l6_in_atomic_mode_a_dead_holder_is_taken_over_at_once():
    with holding(lease=HOUR) as holder:
        assert door(paying)().status_code == 409
        holder.kill()
    answer = eventually(lambda: completed(door(paying)()))  # once the database sees that it is gone
    assert not is_replay(answer)
    assert record().attempts == 2


@row_locks
def test_l6_in_lease_mode_a_dead_holder_is_taken_over_once_its_lease_ran_out():
    with holding(mode="lease", lease=HOUR) as holder:
        holder.kill()
    refused = door(paying, mode="lease")()
    assert refused.status_code == 409
    assert HOUR - 60 < int(refused.headers["Retry-After"]) <= HOUR
    shift(locked_until=-1)
    assert door(paying, mode="lease")().status_code == 201


@row_locks
def test_l6_a_heartbeat_keeps_the_lease_of_a_view_that_outlasts_it():
    lease = timedelta(seconds=2)
    with Gate().running(mode="lease", lease=lease.seconds) as answer:
        first = record()
        eventually(lambda: record().locked_until > first.locked_until + lease)
        assert door(paying, mode="lease")().status_code == 409
    assert answer.result().status_code == 201
    assert effects() == 1


@row_locks
def test_l6_a_heartbeat_keeps_the_lease_of_an_async_view_too():
    async def view(request):
        claimed = await sync_to_async(record)()
        await sync_to_async(eventually)(lambda: record().locked_until > claimed.locked_until)
        return HttpResponse(status=201)

    async def send():
        return await door(view, mode="lease", lease=1)()

    assert async_to_sync(send)().status_code == 201


@row_locks
def test_l6_a_twin_does_not_overtake_a_claim_on_its_way_to_the_row_lock(monkeypatch):
    first, looked, sleep = claim(policy=Policy()), threading.Event(), time.sleep

    def look_and_sleep(seconds):
        looked.set()
        sleep(seconds)

    monkeypatch.setattr(engine.time, "sleep", look_and_sleep)
    with ThreadPoolExecutor(1) as pool:
        twin = pool.submit(in_threads, 1, lambda _: door(paying, grace=10)())
        assert looked.wait(5)
        with engine.execution(first, Policy()) as run:
            assert twin.result(5)[0].status_code == 409
            run.settle(Keep(StoredResponse(201)))
    assert effects() == 0


def test_l6_a_crash_in_lease_mode_can_be_left_to_a_person():
    policy = {"mode": "lease", "on_crash": "hold"}
    claim(policy=Policy(**policy))
    shift(locked_until=-1)
    for _attempt in range(2):
        answer = door(paying, **policy)()
        assert answer.status_code == 409
        assert b'"held"' in answer.content
    assert effects() == 0
    assert (record().status, record().held) == (Status.FAILED, True)


@pytest.mark.parametrize(
    ("error", "on_crash", "held"),
    [(KeyboardInterrupt, "hold", True), (KeyboardInterrupt, "retry", False), (ArithmeticError, "hold", False)],
)
def test_l6_only_what_was_interrupted_is_left_to_a_person_and_only_where_that_is_asked_for(error, on_crash, held):
    def view(request):
        raise error

    with pytest.raises(error):
        door(view, mode="lease", on_crash=on_crash)()
    assert (record().status, record().held, record().reason) == (Status.FAILED, held, error.__name__)


# --- L7: a stored answer is for who may come in now, and for its scope alone -----------------------------------------


class Doorkeeper:
    """Whoever the view asks before it lets anybody in."""

    lets_in = True

    def has_permission(self, request, view):
        return self.lets_in


@pytest.fixture
def doorkeeper(monkeypatch):
    monkeypatch.setattr(Doorkeeper, "lets_in", True)  # undone after the test, whatever it set
    return Doorkeeper


def behind_the_mixin():
    class Entry(IdempotentMixin, APIView):
        authentication_classes = ()
        permission_classes = (Doorkeeper,)
        idempotency = Policy(scope=SCOPE)

        def post(self, request):
            return paying(request)

    return Entry.as_view()


def behind_the_decorator():
    return user_passes_test(lambda user: Doorkeeper.lets_in)(idempotent(scope=SCOPE)(paying))


def behind_the_middleware():
    guarded = user_passes_test(lambda user: Doorkeeper.lets_in)(paying)
    middleware = IdempotencyMiddleware(paying)
    return lambda request: middleware.process_view(request, guarded, (), {})


@override_settings(IDEMPOTENCY={"SCOPE": SCOPE})
@pytest.mark.parametrize("door_to", [behind_the_mixin, behind_the_decorator, behind_the_middleware])
def test_l7_who_is_turned_away_now_gets_no_stored_answer(door_to, doorkeeper):
    view = door_to()
    first = view(by_nobody(post()))
    doorkeeper.lets_in = False
    refused = view(by_nobody(post()))
    assert (first.status_code, is_replay(refused)) == (201, False)
    assert refused.status_code in (302, 403)
    doorkeeper.lets_in = True
    assert is_replay(view(by_nobody(post())))
    assert effects() == 1


def by_nobody(request):
    request.user = AnonymousUser()
    return request


def test_l7_the_same_key_in_another_scope_is_another_operation():
    tenants = iter(["tenant 1", "tenant 2", "tenant 1"])
    send = door(paying, scope=lambda request: next(tenants))
    first, second, third = send(), send(), send()
    assert first.content == third.content != second.content
    assert effects() == 2


# --- L8: an effect that is committed stands --------------------------------------------------------------------------


def test_l8_a_hook_that_fails_after_commit_does_not_take_the_answer_back():
    def view(request):
        transaction.on_commit(fail)
        return paying(request)

    send = door(view)
    first, second = send(), send()
    assert (first.status_code, second.content, effects()) == (201, first.content, 1)


def fail(*_args, **_named):
    raise ArithmeticError("asked for")


@in_both_modes
@pytest.mark.parametrize("receiver", [fail, partial(fail)], ids=["function", "nameless"])
def test_l8_a_receiver_that_fails_does_not_take_the_answer_back(mode, receiver):
    signals.completed.connect(receiver)
    try:
        first = door(paying, mode=mode)()
    finally:
        signals.completed.disconnect(receiver)
    assert first.status_code == 201
    assert door(paying, mode=mode)().content == first.content


UNSTORED = {
    "streamed": lambda: StreamingHttpResponse([b"a", b"b"], status=201),
    "oversize": lambda: HttpResponse(b"x" * 2000, status=201),
}


@in_both_modes
@pytest.mark.parametrize("answer", UNSTORED.values(), ids=UNSTORED)
def test_l8_an_answer_that_cannot_be_kept_is_not_made_twice(mode, answer):
    def view(request):
        pay()
        return answer()

    send = door(view, mode=mode, max_body=1000)
    first, second = send(), send()
    assert first.getvalue() == answer().getvalue()
    assert (second.status_code, is_replay(second), effects()) == (201, True, 1)
    assert b"response_not_stored" in second.content


def test_l8_in_lease_mode_an_answer_that_cannot_be_rendered_is_not_made_twice():
    class Broken(SimpleTemplateResponse):
        rendered_content = property(fail)

    def view(request):
        pay()
        return Broken(None, status=201)

    send = door(view, mode="lease")
    with pytest.raises(ArithmeticError):
        send()
    assert (send().status_code, effects()) == (201, 1)


@postgresql
def test_l8_in_lease_mode_an_answer_that_the_database_refuses_is_stored_without_its_body():
    with connection.cursor() as cursor:
        cursor.execute(
            f"ALTER TABLE {IdempotencyRecord._meta.db_table} ADD CONSTRAINT bodiless CHECK (response_body IS NULL)"
        )
        try:
            send = door(paying, mode="lease")
            first, second = send(), send()
        finally:
            cursor.execute(f"ALTER TABLE {IdempotencyRecord._meta.db_table} DROP CONSTRAINT bodiless")
    assert len(first.content) == 32
    assert (first.status_code, second.status_code, effects()) == (201, 201, 1)
    assert b"response_not_stored" in second.content


@postgresql
def test_l8_in_lease_mode_an_answer_the_store_was_away_for_is_written_once_it_is_back(proxy):
    def view(request):
        response = paying(request)
        proxy.go_away()
        return response

    with heard(signals.store_failed) as failures:
        first = door(view, mode="lease", lease=1)()
    assert first.status_code == 201
    assert len(failures) == 1
    connection.close()
    proxy.come_back()
    assert eventually(lambda: record().status == Status.COMPLETED)
    assert door(view, mode="lease")().content == first.content
    assert effects() == 1


@postgresql
def test_l8_a_terminal_failure_that_can_not_be_kept_is_answered_and_told_of(proxy):
    def view(request):
        pay()
        raise TerminalFailure(HttpResponse("declined", status=402))

    with heard(signals.store_failed) as failures, just_before(COMPLETION, proxy.go_away):
        answer = door(view)()
    assert (answer.status_code, len(failures)) == (402, 1)
    proxy.come_back()
    connection.close()
    assert effects() == 0


@postgresql
@in_both_modes
def test_l12_a_views_error_is_not_hidden_by_that_of_a_store_that_is_away(mode, proxy):
    send = door(fail, mode=mode)
    with (
        heard(signals.store_failed) as failures,
        just_before(COMPLETION, proxy.go_away),
        pytest.raises(ArithmeticError),
    ):
        send()
    assert len(failures) == 1


@postgresql
@in_both_modes
def test_a_views_error_is_not_hidden_by_that_of_a_table_that_refuses_to_note_it(mode):
    with connection.cursor() as cursor:
        cursor.execute("ALTER TABLE django_idempotency_record ADD CONSTRAINT refused CHECK (status <> 'failed')")
        try:
            with heard(signals.store_failed) as failures, pytest.raises(ArithmeticError):
                door(fail, mode=mode)()
        finally:
            cursor.execute("ALTER TABLE django_idempotency_record DROP CONSTRAINT refused")
    assert len(failures) == 1


def test_an_interruption_after_commit_is_passed_on_and_the_answer_stays():
    def interrupt():
        raise KeyboardInterrupt

    def view(request):
        transaction.on_commit(interrupt)
        return paying(request)

    with pytest.raises(KeyboardInterrupt):
        door(view)()
    assert is_replay(door(view)())
    assert effects() == 1


REFUSE_DELETE = """
CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'asked for'; END $$;
CREATE TRIGGER refuse BEFORE DELETE ON django_idempotency_record EXECUTE FUNCTION refuse()
"""


@postgresql
def test_a_key_that_the_database_does_not_release_is_an_error_that_says_so():
    with connection.cursor() as cursor:
        cursor.execute(REFUSE_DELETE)
        try:
            with pytest.raises(DatabaseError, match="asked for"):
                door(lambda request: HttpResponse(status=422), mode="lease")()
        finally:
            cursor.execute("DROP FUNCTION refuse CASCADE")


@in_both_modes
def test_a_run_that_settles_on_nothing_is_an_error_and_commits_nothing(mode):
    policy = Policy(mode=mode)
    with pytest.raises(RuntimeError, match="without a verdict"), engine.execution(claim(policy=policy), policy):
        pass
    assert record().response_status is None


# --- L9: time is the database's clock --------------------------------------------------------------------------------


@pytest.fixture(params=[-HOUR, HOUR], ids=["an hour behind", "an hour ahead"])
def clock(request, monkeypatch):
    """The application's clock, jumped: whatever Python, Django and the package can read it by."""
    real_time, jump = time.time, timedelta(seconds=request.param)

    class Jumped(datetime):
        @classmethod
        def now(cls, tz=None):
            return datetime.now(tz) + jump

        @classmethod
        def utcnow(cls):
            return cls.now(None)

    monkeypatch.setattr(time, "time", lambda: real_time() + request.param)
    monkeypatch.setattr("django.utils.timezone.datetime", Jumped)
    for module in (django_idempotency.engine, django_idempotency.outcomes):
        monkeypatch.setattr(module, "datetime", Jumped)


@row_locks
@pytest.mark.usefixtures("clock")
@in_both_modes
def test_l9_an_application_clock_that_jumped_changes_nothing(mode):
    gate, policy = Gate(), {"mode": mode, "lease": 60, "retention": 60}
    with gate.running(**policy) as answer:
        assert door(paying, **policy)().status_code == 409
    first = answer.result()
    assert door(paying, **policy)().content == first.content
    shift(expires_at=-1, purge_at=-1)
    assert not is_replay(door(paying, **policy)())
    assert effects() == 2


@pytest.mark.usefixtures("clock")
def test_l9_a_lease_runs_out_by_the_databases_clock():
    policy = {"mode": "lease", "lease": 60}
    claim(policy=Policy(**policy))
    refused = door(paying, **policy)()
    assert refused.status_code == 409
    assert 50 <= int(refused.headers["Retry-After"]) <= 60
    shift(locked_until=-1)
    assert door(paying, **policy)().status_code == 201


def test_l9_nothing_in_the_package_reads_the_applications_clock():
    root = Path(django_idempotency.__file__).parent
    readers = [path.name for path in root.rglob("*.py") if path.name != "admin.py" and reads_clock(path)]
    assert readers == []


def reads_clock(path):
    """Calls such as ``time.time()``, ``datetime.now()`` and ``timezone.now()``; monotonic clocks don't jump."""
    calls = (node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))
    return any(ast.unparse(call).endswith(("time.time", "time_ns", ".now", ".utcnow", ".today")) for call in calls)


# --- L10: a mismatch is answered first, and changes nothing ----------------------------------------------------------


def dead_holder(mode):
    claim(policy=Policy(mode=mode))
    shift(locked_at=-HOUR, locked_until=-HOUR)


def failed(mode):
    store_for(Policy()).fail(claim(policy=Policy(mode=mode)), "refused", Policy())


def held(mode):
    store_for(Policy()).fail(claim(policy=Policy(mode=mode)), "crashed", Policy(), held=True)


def crashed_and_to_be_held(mode):
    claim(policy=Policy(mode="lease", on_crash="hold"))
    shift(locked_until=-HOUR)


STATES = {
    "claimed just now": lambda mode: claim(policy=Policy(mode=mode)),
    "dead holder": dead_holder,
    "crashed and to be held": crashed_and_to_be_held,
    "failed": failed,
    "held": held,
    "completed": lambda mode: door(paying, mode=mode)(),
}


@in_both_modes
@pytest.mark.parametrize("state", STATES.values(), ids=STATES)
def test_l10_a_mismatch_is_answered_in_every_state_and_changes_no_record(mode, state):
    state(mode)
    before = row()
    answer = door(paying, mode=mode)(body=OTHER_BODY)
    assert answer.status_code == 422
    assert b"fingerprint_mismatch" in answer.content
    assert row() == before


@row_locks
@in_both_modes
def test_l10_a_mismatch_is_answered_while_a_live_holder_runs(mode):
    with Gate().running(mode=mode) as answer:
        assert door(paying, mode=mode)(body=OTHER_BODY).status_code == 422
    assert answer.result().status_code == 201


# --- L12: no store, no run -------------------------------------------------------------------------------------------


def refused_without_store(mode):
    runs = []

    def view(request):
        runs.append(request)
        return HttpResponse(status=201)

    answer = door(view, mode=mode)()
    assert runs == []
    return answer


@postgresql
@in_both_modes
def test_l12_when_the_store_cannot_be_reached_the_request_is_refused(mode, proxy):
    proxy.go_away()
    answer = refused_without_store(mode)
    assert (answer.status_code, answer.headers["Retry-After"]) == (503, "1")
    assert b"store_unavailable" in answer.content
    assert b'"safe_new_key": true' in answer.content


@postgresql
@in_both_modes
def test_l12_a_store_that_nobody_listens_for_is_refused_too(mode, proxy, monkeypatch):
    with monkeypatch.context() as patch:  # ended before the proxy's own
        patch.setitem(connection.settings_dict, "PORT", free_port())
        assert refused_without_store(mode).status_code == 503


@postgresql
def test_l12_a_store_lost_between_the_claim_and_the_row_lock_is_refused_too(proxy):
    def go_away(**_named):
        proxy.go_away()

    signals.claimed.connect(go_away)
    try:
        answer = refused_without_store("atomic")
    finally:
        signals.claimed.disconnect(go_away)
    assert (answer.status_code, b'"safe_new_key": true' in answer.content) == (503, True)


@postgresql
@in_both_modes
def test_l12_fail_open_runs_unprotected(mode, proxy):
    proxy.go_away()
    send = door(lambda request: HttpResponse(str(request.idempotency), status=201), mode=mode, fail_open=True)
    assert [send().content, send().content] == [b"None", b"None"]


@postgresql
@in_both_modes
def test_l12_a_message_is_left_to_a_redelivery(mode, proxy):
    proxy.go_away()
    delivery = consume(Message("queue", "1"), fail, policy=Policy(mode=mode))
    assert isinstance(delivery, RetryLater)


@postgresql
@in_both_modes
def test_l12_a_connection_gone_stale_is_not_a_store_that_is_away(mode, proxy):
    send = door(paying, mode=mode)
    pay("so that there is a connection")
    proxy.go_away()
    proxy.come_back()
    assert send().status_code == 201
    assert effects() == 1


# --- What the laws rest on -------------------------------------------------------------------------------------------


@row_locks
@in_both_modes
def test_a_waiter_gets_the_answer_and_waits_in_no_transaction(mode, monkeypatch):
    gate, seen, sleep = Gate(), [], time.sleep

    def look_and_sleep(seconds):
        seen.append(connection.in_atomic_block)
        if connection.vendor == "postgresql":
            seen.append(bool(connection.connection.info.transaction_status))
        gate.let_go.set()
        sleep(seconds)

    with gate.running(mode=mode) as first:
        monkeypatch.setattr(engine.time, "sleep", look_and_sleep)
        answer = door(paying, mode=mode, in_flight="wait", wait=30)()
    assert answer.content == first.result().content
    assert is_replay(answer)
    assert seen
    assert not any(seen)


@row_locks
@in_both_modes
def test_a_waiter_gives_up_in_time_and_it_is_counted(mode):
    with Gate().running(mode=mode) as first, heard(signals.pending_timeout) as timeouts:
        answer = door(paying, mode=mode, in_flight="wait", wait=0.2)()
    assert (answer.status_code, len(timeouts)) == (409, 1)
    assert first.result().status_code == 201


@row_locks
def test_a_waiter_asks_less_and_less_often_but_four_times_a_second_at_least(monkeypatch):
    pauses = []
    with Gate().running(mode="lease"):
        monkeypatch.setattr(engine.time, "sleep", pauses.append)
        door(paying, mode="lease", in_flight="wait", wait=0.2)()
    assert pauses[:6] == [0.02, 0.04, 0.08, 0.16, 0.25, 0.25]


def test_a_claim_inside_somebody_elses_transaction_is_an_error_that_says_what_to_do():
    with transaction.atomic(), pytest.raises(ClaimInsideTransaction, match="outside the transaction"):
        door(paying)()
    assert effects() == 0


def test_a_claimed_operation_is_not_run_inside_somebody_elses_transaction():
    claimed = claim(policy=Policy())
    with transaction.atomic(), pytest.raises(RuntimeError, match="durable"), engine.execution(claimed, Policy()):
        pass
    assert effects() == 0


class TestInsideDjangosTestCase(TestCase):
    """A project's own ``TestCase`` holds a transaction open; the doors work in it all the same."""

    def test_a_request_is_run_once_and_replayed(self):
        for mode in MODES:
            send = door(lambda request: HttpResponse(str(uuid4()), status=201), mode=mode)
            assert send(key=mode).content == send(key=mode).content
            assert send(key=mode, body=OTHER_BODY).status_code == 422

    @postgresql
    def test_a_store_that_only_reads_is_told_as_elsewhere(self):
        connection.cursor().execute("SET TRANSACTION READ ONLY")
        answer = door(paying)()
        assert (answer.status_code, b"store_unavailable" in answer.content) == (503, True)
        assert store_for(Policy()).reconnect(Policy()) is False

    def test_a_record_that_comes_while_it_is_looked_for_does_not_cost_the_transaction(self):
        store, wanted = DatabaseStore(), operation()
        store.claim(wanted, uuid4(), Policy())
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(store, "read", lambda *_: None)  # it was not there yet
            assert store.claim(wanted, uuid4(), Policy()) is None
        assert store.read(wanted.id, Policy()).key == wanted.key
