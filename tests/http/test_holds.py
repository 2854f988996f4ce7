"""``raise Hold(reason)`` puts the key on hold wherever it is raised, and ``current()``
is what the running code has as its context.
"""

from __future__ import annotations

import pytest
from asgiref.sync import sync_to_async
from django.http import HttpResponse
from rest_framework.response import Response
from rest_framework.views import exception_handler

from django_idempotency import Hold, Message, Policy, consume, current, idempotent
from django_idempotency.maintenance.decisions import allow_retry
from django_idempotency.messages import AwaitsOperator
from django_idempotency.models import IdempotencyRecord
from tests.http.test_rest_framework import answering
from tests.support.callers import effects
from tests.support.views import Runs, book, code
from tests.support.views_of_laws import in_each_mode

pytestmark = pytest.mark.drf
REASON = "the bank says maybe"


def swallow(error, context):
    return exception_handler(error, context) or Response({}, status=500)


def drf(runs, mode):
    view = answering(runs.answer, idempotency_policy=Policy(mode=mode))
    runs.contexts = view[0].contexts
    return view[1]


VIEWS = {
    "plain": lambda runs, mode: idempotent(mode=mode)(runs.view),
    "REST framework": drf,
    "async": lambda runs, mode: idempotent(mode="lease")(sync_to_async(runs.view)),
}


@in_each_mode
@pytest.mark.parametrize("view_of", VIEWS.values(), ids=VIEWS)
def test_an_operation_that_may_have_happened_is_put_on_hold(
    call, settings, mode, view_of
):
    """Even below an exception handler that makes a response of everything."""

    def answer(request):
        book(request)
        if len(runs.contexts) == 1:
            raise Hold(REASON)
        return Response({}, status=201) if view_of is drf else HttpResponse(status=201)

    settings.REST_FRAMEWORK = {
        **settings.REST_FRAMEWORK,
        "EXCEPTION_HANDLER": f"{__name__}.swallow",
    }
    runs = Runs(answer)
    view = view_of(runs, mode)
    first, second = call(view), call(view)
    record = IdempotencyRecord.objects.get()
    assert (code(first), code(second)) == ("idempotency_key_on_hold",) * 2
    assert (record.on_hold, record.reason, runs.count) == (True, REASON, 1)
    is_async = view_of is VIEWS["async"]
    assert effects() == (1 if mode == "lease" or is_async else 0)

    allow_retry(record.pk)
    assert call(view).status_code == 201


@in_each_mode
@pytest.mark.parametrize("reason", ["maybe\0", "maybe\ud800", ValueError("maybe")])
def test_a_reason_may_quote_anything(call, mode, reason):
    """It was lost, with the hold: PostgreSQL can't store a NUL."""

    def answer(request):
        raise Hold(reason)

    view = idempotent(mode=mode)(Runs(answer).view)
    assert code(call(view)) == code(call(view)) == "idempotency_key_on_hold"
    assert IdempotencyRecord.objects.get().reason.startswith("maybe")


@pytest.mark.usefixtures("transactional_db")
@in_each_mode
def test_a_message_that_may_have_been_handled_is_put_on_hold(mode):
    def handle(message, context):
        raise Hold(REASON)

    for _delivery in range(2):
        delivery = consume(Message("q", "1"), handle, policy=Policy(mode=mode))
        assert delivery == AwaitsOperator(60, REASON)


def test_without_a_key_there_is_nothing_to_hold(call):
    def answer(request):
        raise Hold(REASON)

    with pytest.raises(Hold, match=REASON):
        call(idempotent(Runs(answer).view), key=None)


@pytest.mark.parametrize("key", [None, "k"])
def test_code_deep_inside_a_view_finds_its_context(call, key):
    def deep(request):
        inner = idempotent(scope="public")(Runs(lambda _request: found(request)).view)
        return HttpResponse(str(found(request) and inner(request).status_code == 200))

    def found(request):
        assert current() is request.idempotency
        assert bool(current()) == (key is not None)
        return HttpResponse()

    for view in (
        idempotent(mode="lease")(Runs(deep).view),
        idempotent(mode="lease")(sync_to_async(Runs(deep).view)),
    ):
        assert call(view, key=key).content == b"True"
        assert not current()
        assert current() is not current()
        key = key and "another"
