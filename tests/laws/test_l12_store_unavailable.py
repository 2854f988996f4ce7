"""L12: no store, no run."""

from __future__ import annotations

import json
from functools import partial
from uuid import uuid4

import pytest
from asgiref.sync import sync_to_async
from django.db import connection
from django.http import HttpResponse

from django_idempotency import signals
from django_idempotency.http.placement import idempotent
from django_idempotency.messages import Ack, Message, RetryLater, consume
from django_idempotency.messages.message import AwaitsStore
from django_idempotency.models import IdempotencyRecord
from django_idempotency.values.policy import Atomic, Policy
from tests.support.callers import (
    SCOPE,
    effects,
    entry_point,
    heard,
    pay,
    paying,
    post,
    record,
    shift,
    when,
)
from tests.support.loops import run
from tests.support.threads import just_before
from tests.support.views import api_class, code
from tests.support.views_of_laws import (
    COMPLETION,
    fail,
    in_both_modes,
    in_each_mode,
    postgresql,
)
from tests.support.waiting import eventually

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


def assert_refused(answer):
    assert (answer.status_code, code(answer)) == (503, "idempotency_store_unavailable")
    assert (
        answer.headers["Retry-After"] in ("1", "2"),
        json.loads(answer.content)["safe_new_key"],
    ) == (True, False)


@postgresql
@in_each_mode
def test_l12_when_the_store_cannot_be_reached_the_request_is_refused(mode, proxy):
    proxy.go_away()
    runs = []
    assert_refused(entry_point(runs.append, mode=mode)())
    assert runs == []


def plain(runs):
    return idempotent(scope=SCOPE)(runs.append)


def rest_framework(runs):
    view = idempotent(scope=SCOPE)(api_class(runs.append)).as_view()
    return lambda request: view(request).render()


@postgresql
@pytest.mark.parametrize(
    "protected", [plain, pytest.param(rest_framework, marks=pytest.mark.drf)]
)
def test_l12_a_request_whose_store_is_lost_before_the_row_lock_does_not_run(
    protected, proxy
):
    runs = []
    with when(signals.key_claimed, lambda **_named: proxy.go_away()):
        answer = protected(runs)(post())
    assert_refused(answer)
    assert runs == []
    proxy.come_back()
    assert record().status == "processing"


@postgresql
def test_l12_a_request_whose_store_is_lost_while_it_renews_its_lease_is_refused(proxy):
    """Then no new key is safe."""
    effects = []

    def view(request):
        effects.append(request)
        proxy.go_away()
        request.idempotency.renew()

    async def aview(request):
        await sync_to_async(view)(request)

    assert_refused(entry_point(view, mode="lease")())
    proxy.come_back()
    assert_refused(
        run(lambda: idempotent(scope=SCOPE, mode="lease")(aview)(post("async")))
    )
    assert len(effects) == 2


def taken_over():
    shift(locked_at=-120, locked_until=-60)
    IdempotencyRecord.objects.update(token=uuid4())


@postgresql
@in_both_modes
def test_l12_a_late_owner_that_cannot_read_what_came_of_its_claim_is_refused(
    mode, proxy, other_thread
):
    """The view has run; its claim is another's by now, and what came of that one can't
    be read.
    """

    def view(request):
        if mode == "lease":
            other_thread(taken_over)
        return HttpResponse(status=201)

    def steal(**_named):
        if mode == "atomic":
            other_thread(taken_over)

    lose = lambda **_named: proxy.go_away()  # noqa: E731
    with (
        when(signals.key_claimed, steal),
        when(signals.claim_lost, lose),
        when(signals.stale_write_rejected, lose),
    ):
        assert_refused(entry_point(view, mode=mode)())


@postgresql
@in_each_mode
def test_l12_fail_open_runs_unprotected(mode, proxy):
    proxy.go_away()
    send = entry_point(
        lambda request: HttpResponse(request.idempotency.child_key("a"), status=201),
        mode=mode,
        fail_open=True,
    )
    assert send().content == send().content, "another service gets the same key"


@postgresql
@in_both_modes
def test_l12_a_message_is_left_to_a_redelivery(mode, proxy):
    proxy.go_away()
    delivery = consume(Message("queue", "1"), fail, policy=Policy(mode=mode))
    assert isinstance(delivery, RetryLater)


CLAIMS = pytest.mark.parametrize("claim", ["record", "lock"])


@postgresql
@CLAIMS
def test_l12_a_request_whose_store_is_lost_before_its_response_is_written_is_refused(
    claim, proxy
):
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
def test_l12_a_store_lost_before_the_write_is_not_a_failure_of_the_handler(
    claim, raises, proxy
):
    def handle(message, context):
        pay()
        proxy.go_away()
        if raises:
            connection.cursor().execute("SELECT 1")

    delivery = consume(
        Message("queue", "1"),
        handle,
        policy=Policy(mode=Atomic(claim=claim)),
        max_attempts=1,
    )
    assert isinstance(delivery, AwaitsStore)
    proxy.come_back()
    assert effects() == 0
    delivered_again = partial(consume, Message("queue", "1"), lambda *_: pay() and None)
    # The server may still hold the lock of the session that was cut.
    eventually(
        lambda: isinstance(
            delivered_again(policy=Policy(mode=Atomic(claim=claim))), Ack
        )
    )
    assert effects() == 1
