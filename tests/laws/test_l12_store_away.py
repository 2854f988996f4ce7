"""L12: no store, no run."""

from __future__ import annotations

import pytest
from django.db import connection
from django.http import HttpResponse

from django_idempotency import signals
from django_idempotency.messages import Ack, Message, RetryLater, consume
from django_idempotency.messages.message import StoreAway
from django_idempotency.policy import Atomic, Policy
from tests.support.callers import effects, entry_point, heard, pay, paying
from tests.support.threads import just_before
from tests.support.views_of_laws import COMPLETION, fail, in_both_modes, in_each_mode, postgresql

pytestmark = pytest.mark.usefixtures("payer")


@postgresql
@in_both_modes
def test_l12_a_store_error_does_not_hide_the_views_error(mode, proxy):
    send = entry_point(fail, mode=mode)
    with (
        heard(signals.store_failed) as failures,
        just_before(COMPLETION, proxy.go_away),
        pytest.raises(ArithmeticError),
    ):
        send()
    assert len(failures) == 1


def refused_without_store(mode):
    runs = []

    def view(request):
        runs.append(request)
        return HttpResponse(status=201)

    answer = entry_point(view, mode=mode)()
    assert runs == []
    return answer


@postgresql
@in_each_mode
def test_l12_when_the_store_cannot_be_reached_the_request_is_refused(mode, proxy):
    proxy.go_away()
    answer = refused_without_store(mode)
    assert (answer.status_code, answer.headers["Retry-After"] in ("1", "2")) == (503, True)
    assert b"idempotency_store_unavailable" in answer.content
    assert b'"safe_new_key": false' in answer.content


@postgresql
def test_l12_a_store_lost_before_the_row_lock(proxy):
    def go_away(**_named):
        proxy.go_away()

    signals.key_claimed.connect(go_away)
    try:
        answer = refused_without_store("atomic")
    finally:
        signals.key_claimed.disconnect(go_away)
    assert (answer.status_code, b'"safe_new_key": false' in answer.content) == (503, True)


@postgresql
@in_each_mode
def test_l12_fail_open_runs_unprotected(mode, proxy):
    proxy.go_away()
    send = entry_point(lambda request: HttpResponse(str(request.idempotency), status=201), mode=mode, fail_open=True)
    assert [send().content, send().content] == [b"None", b"None"]


@postgresql
@in_both_modes
def test_l12_a_message_is_left_to_a_redelivery(mode, proxy):
    proxy.go_away()
    delivery = consume(Message("queue", "1"), fail, policy=Policy(mode=mode))
    assert isinstance(delivery, RetryLater)


@postgresql
@in_both_modes
def test_l12_a_connection_gone_stale_is_not_an_unavailable_store(mode, proxy):
    send = entry_point(paying, mode=mode)
    pay("so that there is a connection")
    proxy.go_away()
    proxy.come_back()
    assert send().status_code == 201
    assert effects() == 1


CLAIMS = pytest.mark.parametrize("claim", ["record", "lock"])


@postgresql
@CLAIMS
def test_l12_a_request_whose_store_is_lost_before_its_response_is_written_is_refused(claim, proxy):
    def view(request):
        response = paying(request)
        proxy.go_away()
        return response

    send = entry_point(view, mode=Atomic(claim=claim))
    assert send().status_code == 503
    proxy.come_back()
    assert effects() == 0


@postgresql
@CLAIMS
@pytest.mark.parametrize("raises", [False, True], ids=["returns", "raises"])
def test_l12_a_store_lost_before_the_result_is_written_is_no_failure_of_the_handler(claim, raises, proxy):
    def handle(message, context):
        pay()
        proxy.go_away()
        if raises:
            connection.cursor().execute("SELECT 1")

    delivery = consume(Message("queue", "1"), handle, policy=Policy(mode=Atomic(claim=claim)), max_attempts=1)
    assert isinstance(delivery, StoreAway)
    proxy.come_back()
    assert effects() == 0
    assert isinstance(
        consume(Message("queue", "1"), lambda *_: pay() and None, policy=Policy(mode=Atomic(claim=claim))), Ack
    )
    assert effects() == 1
