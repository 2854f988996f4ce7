"""L8: an effect that is committed stands."""

from __future__ import annotations

from functools import partial

import pytest
from django.db import DatabaseError, connection, transaction
from django.http import HttpResponse, StreamingHttpResponse
from django.template.response import SimpleTemplateResponse

from django_idempotency import engine, signals
from django_idempotency.exceptions import TerminalFailure
from django_idempotency.models import IdempotencyRecord, Status
from django_idempotency.policy import Policy
from tests.support.callers import (
    claim,
    effects,
    entry_point,
    heard,
    is_replay,
    pay,
    paying,
    record,
)
from tests.support.threads import just_before
from tests.support.views_of_laws import COMPLETION, fail, in_both_modes, postgresql
from tests.support.waiting import eventually

pytestmark = pytest.mark.usefixtures("payer")


def test_l8_a_failing_commit_hook_keeps_the_response():
    def view(request):
        transaction.on_commit(fail)
        return paying(request)

    send = entry_point(view)
    first, second = send(), send()
    assert (first.status_code, second.content, effects()) == (201, first.content, 1)


@in_both_modes
@pytest.mark.parametrize("receiver", [fail, partial(fail)], ids=["function", "nameless"])
def test_l8_a_receiver_that_fails_does_not_take_the_response_back(mode, receiver):
    signals.key_completed.connect(receiver)
    try:
        first = entry_point(paying, mode=mode)()
    finally:
        signals.key_completed.disconnect(receiver)
    assert first.status_code == 201
    assert entry_point(paying, mode=mode)().content == first.content


UNSTORED = {
    "streamed": lambda: StreamingHttpResponse([b"a", b"b"], status=201),
    "oversize": lambda: HttpResponse(b"x" * 2000, status=201),
}


@in_both_modes
@pytest.mark.parametrize("answer", UNSTORED.values(), ids=UNSTORED)
def test_l8_a_response_that_cannot_be_kept_is_not_made_twice(mode, answer):
    def view(request):
        pay()
        return answer()

    send = entry_point(view, mode=mode, max_body_size=1000)
    first, second = send(), send()
    assert first.getvalue() == answer().getvalue()
    assert (second.status_code, is_replay(second), effects()) == (201, True, 1)
    assert b"response_not_stored" in second.content


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


@postgresql
def test_l8_in_lease_mode_a_refused_answer_is_stored_without_its_body():
    with connection.cursor() as cursor:
        cursor.execute(
            f"ALTER TABLE {IdempotencyRecord._meta.db_table} ADD CONSTRAINT bodiless CHECK (response_body IS NULL)"
        )
        try:
            send = entry_point(paying, mode="lease")
            first, second = send(), send()
        finally:
            cursor.execute(f"ALTER TABLE {IdempotencyRecord._meta.db_table} DROP CONSTRAINT bodiless")
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
        first = entry_point(view, mode="lease", lease=1)()
    assert first.status_code == 201
    assert len(failures) == 1
    connection.close()
    proxy.come_back()
    assert eventually(lambda: record().status == Status.COMPLETED)
    assert entry_point(view, mode="lease")().content == first.content
    assert effects() == 1


@postgresql
def test_l8_a_terminal_failure_that_is_not_kept_is_sent(proxy):
    def view(request):
        pay()
        raise TerminalFailure(HttpResponse("declined", status=402))

    with heard(signals.store_failed) as failures, just_before(COMPLETION, proxy.go_away):
        answer = entry_point(view)()
    assert (answer.status_code, len(failures)) == (402, 1)
    proxy.come_back()
    connection.close()
    assert effects() == 0


@postgresql
@in_both_modes
def test_a_views_error_is_not_hidden_by_the_stores(mode):
    with connection.cursor() as cursor:
        cursor.execute("ALTER TABLE django_idempotency_record ADD CONSTRAINT refused CHECK (status <> 'failed')")
        try:
            with heard(signals.store_failed) as failures, pytest.raises(ArithmeticError):
                entry_point(fail, mode=mode)()
        finally:
            cursor.execute("ALTER TABLE django_idempotency_record DROP CONSTRAINT refused")
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
CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'asked for'; END $$;
CREATE TRIGGER refuse BEFORE DELETE ON django_idempotency_record EXECUTE FUNCTION refuse()
"""


@postgresql
def test_a_failed_release_is_an_error():
    with connection.cursor() as cursor:
        cursor.execute(REFUSE_DELETE)
        try:
            with pytest.raises(DatabaseError, match="asked for"):
                entry_point(lambda request: HttpResponse(status=422), mode="lease")()
        finally:
            cursor.execute("DROP FUNCTION refuse CASCADE")


@in_both_modes
def test_a_run_without_an_outcome_commits_nothing(mode):
    policy = Policy(mode=mode)
    with pytest.raises(RuntimeError, match="without a verdict"), engine.execution(claim(policy=policy), policy):
        pass
    assert record().response_status is None
