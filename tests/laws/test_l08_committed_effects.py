"""L8: an effect that is committed stands."""

from __future__ import annotations

import io
import json
from contextlib import contextmanager
from functools import partial

import pytest
from django.db import DatabaseError, connection, transaction
from django.http import FileResponse, HttpResponse, StreamingHttpResponse
from django.template.response import SimpleTemplateResponse
from django.test import TestCase

from django_idempotency import engine, signals
from django_idempotency.models import IdempotencyRecord, Status
from django_idempotency.values.exceptions import TerminalFailure
from django_idempotency.values.policy import Atomic, Body, Lease, Policy
from tests.laws.test_lock_claims import once_rolled_back
from tests.support.callers import (
    claim,
    effects,
    entry_point,
    heard,
    is_replay,
    pay,
    paying,
    record,
    when,
)
from tests.support.proxy import Cut
from tests.support.sql import run_sql
from tests.support.threads import just_before
from tests.support.views import code
from tests.support.views_of_laws import (
    BY_LOCK,
    COMPLETION,
    fail,
    in_both_modes,
    in_each_mode,
    postgresql,
)
from tests.support.waiting import eventually

pytestmark = pytest.mark.usefixtures("payer")


@pytest.mark.parametrize("mode", ["atomic", BY_LOCK])
def test_l8_a_failing_commit_hook_keeps_the_response(mode):
    def view(request):
        transaction.on_commit(fail)
        return paying(request)

    send = entry_point(view, mode=mode)
    first, second = send(), send()
    assert (first.status_code, second.content, effects()) == (201, first.content, 1)


@in_both_modes
@pytest.mark.parametrize(
    "receiver", [fail, partial(fail)], ids=["function", "nameless"]
)
def test_l8_a_receiver_that_fails_does_not_take_the_response_back(mode, receiver):
    with when(signals.key_completed, receiver):
        first = entry_point(paying, mode=mode)()
    assert first.status_code == 201
    assert entry_point(paying, mode=mode)().content == first.content


KEPT = {"status": 201, "headers": {"X-Kept": "1", "ETag": '"e"'}}
UNSTORED = {
    "streamed": lambda: StreamingHttpResponse([b"a", b"b"], **KEPT),
    "file": lambda: FileResponse(
        io.BytesIO(b"ab"), as_attachment=True, filename="f.bin", **KEPT
    ),
    "oversize": lambda: HttpResponse(b"x" * 1001, **KEPT),
}


@in_each_mode
@pytest.mark.parametrize("answer", UNSTORED.values(), ids=UNSTORED)
def test_l8_a_response_that_cannot_be_kept_is_not_made_twice(mode, answer):
    def view(request):
        pay()
        return answer()

    send = entry_point(view, mode=mode, body=Body(limit=1000))
    first, second = send(), send()
    assert first.getvalue() == answer().getvalue()
    assert (second.status_code, code(second), is_replay(second)) == (
        201,
        "response_not_stored",
        True,
    )
    assert (
        effects(),
        json.loads(second.content)["status"],
        second.headers["X-Kept"],
    ) == (1, 201, "1")
    assert not {"ETag", "Content-Disposition"} & set(second.headers)


def test_l8_in_lease_mode_a_rendering_error_does_not_run_again():
    class Broken(SimpleTemplateResponse):
        rendered_content = property(fail)

    def view(request):
        pay()
        return Broken(None, status=201)

    send = entry_point(view, mode="lease")
    with pytest.raises(ArithmeticError):
        send()
    assert (send().status_code, effects()) == (201, 1)


@contextmanager
def constrained(condition):
    run_sql(
        "ALTER TABLE django_idempotency_record ADD CONSTRAINT narrow CHECK"
        f" ({condition})"
    )
    try:
        yield
    finally:
        run_sql("ALTER TABLE django_idempotency_record DROP CONSTRAINT narrow")


@postgresql
def test_l8_in_lease_mode_a_response_the_store_refuses_is_stored_without_its_body():
    send = entry_point(paying, mode="lease")
    with constrained("response_body IS NULL"):
        first, second = send(), send()
    assert len(first.content) == 32
    assert (first.status_code, second.status_code, effects()) == (201, 201, 1)
    assert b"response_not_stored" in second.content


@postgresql
def test_l8_lease_mode_writes_the_response_after_an_outage(proxy):
    def view(request):
        response = paying(request)
        proxy.go_away()
        return response

    with heard(signals.store_failed) as failures:
        first = entry_point(view, mode=Lease(seconds=1))()
    assert first.status_code == 201
    assert len(failures) == 1
    connection.close()
    proxy.come_back()
    assert eventually(lambda: record().status == Status.COMPLETED)
    assert entry_point(view, mode="lease")().content == first.content
    assert effects() == 1


def test_l5_a_record_that_was_lost_and_claimed_by_another_attempt_is_not_written():
    def view(request):
        if (
            request.idempotency.attempt == 1
            and not IdempotencyRecord.objects.filter(reason="rival").exists()
        ):
            IdempotencyRecord.objects.all().delete()
            claim("k", policy=Policy(mode="lease"))
            IdempotencyRecord.objects.update(reason="rival")
        return HttpResponse(status=201)

    assert entry_point(view, mode="lease")("k").status_code == 409
    assert record("k").response_status is None


@postgresql
@pytest.mark.parametrize(
    "claim", ["record", pytest.param("lock", marks=pytest.mark.not_on_citus)]
)
def test_l2_a_terminal_failure_that_could_not_be_stored_is_not_sent(proxy, claim):
    """Nothing has committed, and a retry may get another response."""
    responses = iter([402, 201])

    def view(request):
        pay()
        status = next(responses)
        if status == 402:
            raise TerminalFailure(HttpResponse("declined", status=402))
        return HttpResponse(status=status)

    send = entry_point(view, mode=Atomic(claim=claim, takeover_grace=0))
    written = once_rolled_back if claim == "lock" else partial(just_before, COMPLETION)
    with heard(signals.store_failed) as failures, written(proxy.go_away):
        answer = send()
    assert (answer.status_code, len(failures)) == (503, 1)
    proxy.come_back()
    connection.close()
    assert (send().status_code, effects()) == (201, 1)


@postgresql
@in_both_modes
def test_a_views_error_is_not_hidden_by_the_stores(mode):
    with (
        constrained("status <> 'failed'"),
        heard(signals.store_failed) as failures,
        pytest.raises(ArithmeticError),
    ):
        entry_point(fail, mode=mode)()
    assert len(failures) == 1


def test_an_interruption_after_commit_keeps_the_response():
    def interrupt():
        raise KeyboardInterrupt

    def view(request):
        transaction.on_commit(interrupt)
        return paying(request)

    with pytest.raises(KeyboardInterrupt):
        entry_point(view)()
    assert is_replay(entry_point(view)())
    assert effects() == 1


REFUSE_DELETE = """
CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql
    AS $$ BEGIN RAISE 'asked for'; END $$;
CREATE TRIGGER refuse BEFORE DELETE ON django_idempotency_record
    EXECUTE FUNCTION refuse()
"""


@postgresql
@pytest.mark.not_on_citus
def test_a_failed_release_is_an_error():
    run_sql(REFUSE_DELETE)
    try:
        with pytest.raises(DatabaseError, match="asked for"):
            entry_point(lambda request: HttpResponse(status=422), mode="lease")()
    finally:
        run_sql("DROP FUNCTION refuse CASCADE")


@in_both_modes
def test_a_run_without_an_outcome_commits_nothing(mode):
    policy = Policy(mode=mode)
    with (
        pytest.raises(RuntimeError, match="without a verdict"),
        engine.execution(claim(policy=policy), policy),
    ):
        pass
    assert record().response_status is None


def test_a_hook_that_raises_does_not_stop_the_next(caplog):
    ran = []

    def view(request):
        for hook in (partial(ran.append, 1), fail, partial(ran.append, 2)):
            transaction.on_commit(hook)
        transaction.on_commit(fail, robust=True)
        transaction.on_commit(partial(ran.append, 3))
        return paying(request)

    answer = entry_point(view)()
    assert (answer.status_code, ran, effects()) == (201, [1, 2, 3], 1)
    assert [told.event for told in caplog.records] == ["committed_with_error"] * 2
    assert is_replay(entry_point(view)())
    assert ran == [1, 2, 3]


@pytest.mark.postgresql
@pytest.mark.parametrize("status", [201, 409, 422])
def test_hooks_run_once_after_a_lost_commit_response(proxy, status):
    ran = []

    def view(request):
        transaction.on_commit(fail)
        transaction.on_commit(lambda: ran.append(connection.in_atomic_block))
        proxy.cut = Cut.AFTER_COMMIT
        pay()
        return HttpResponse(status=status)

    assert entry_point(view)().status_code == status
    assert (ran, effects(), proxy.cuts) == ([False], 1, 1)


@pytest.mark.parametrize(("status", "runs"), [(500, []), (503, []), (422, [1])])
def test_hooks_run_where_the_view_is_not_rolled_back(status, runs):
    ran = []

    def view(request):
        transaction.on_commit(lambda: ran.append(1))
        return HttpResponse(status=status)

    entry_point(view)()
    assert ran == runs


class InATestCase(TestCase):
    def test_hooks_can_be_captured_as_usual(self):
        def view(request):
            transaction.on_commit(fail)
            return HttpResponse()

        with self.captureOnCommitCallbacks() as callbacks:
            entry_point(view)()
        assert callbacks == [fail]
