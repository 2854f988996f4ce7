"""Transactions around views with an entry point: Django's, the view's own, and none
where the view wants none.
"""

from __future__ import annotations

import pytest
from django.core.handlers.base import BaseHandler
from django.db import connection, transaction
from django.http import HttpResponse
from django.urls import ResolverMatch
from django.utils.decorators import method_decorator
from django.views import View
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_POST

from django_idempotency.http.placement import idempotent
from django_idempotency.values.exceptions import ClaimInsideTransaction
from tests.support.callers import (
    SCOPE,
    behind_middleware,
    effects,
    entry_point,
    is_replay,
    pay,
    post,
    record,
)
from tests.support.views import api_class

pytestmark = pytest.mark.usefixtures("payer")


def ask(view, key="k"):
    """As Django's handler does."""
    request = post(key)
    if key is None:
        del request.META["HTTP_IDEMPOTENCY_KEY"]
    request.resolver_match = ResolverMatch(view, (), {})
    return BaseHandler().make_view_atomic(view)(request)


def told(request):
    return HttpResponse(
        b"in a transaction" if connection.in_atomic_block else b"in none"
    )


def new():
    """A view, a new one each time: Django marks views by attributes."""
    return lambda request: told(request)


async def atold(request):
    return told(request)


def drf():
    from rest_framework.response import Response

    return api_class(lambda request: Response(told(request).content.decode()))


NON_ATOMIC = {
    "below": lambda **policy: idempotent(**policy)(
        transaction.non_atomic_requests(new())
    ),
    "above": lambda **policy: transaction.non_atomic_requests(
        idempotent(**policy)(new())
    ),
    "class": (
        lambda **policy: idempotent(**policy)(
            method_decorator(transaction.non_atomic_requests, name="dispatch")(
                type("Told", (View,), {"post": lambda self, request: told(request)})
            )
        ).as_view()
    ),
    "around as_view": lambda **policy: idempotent(**policy)(
        transaction.non_atomic_requests(
            type(
                "Told", (View,), {"post": lambda self, request: told(request)}
            ).as_view()
        )
    ),
    "REST framework": (
        lambda **policy: idempotent(**policy)(
            method_decorator(transaction.non_atomic_requests, name="dispatch")(drf())
        ).as_view()
    ),
    "REST framework, around as_view": lambda **policy: idempotent(**policy)(
        transaction.non_atomic_requests(drf().as_view())
    ),
}
of_each_way = pytest.mark.parametrize("make", NON_ATOMIC.values(), ids=NON_ATOMIC)


def test_a_request_without_a_key_is_in_djangos_transaction_or_none(atomic_requests):
    expected = b"in a transaction" if atomic_requests else b"in none"
    assert (
        ask(new(), None).content
        == ask(idempotent(scope=SCOPE)(new()), None).content
        == expected
    )


def test_a_keyed_request_is_in_the_one_transaction_of_its_mode(atomic_requests):
    assert ask(idempotent(scope=SCOPE)(new())).content == b"in a transaction"
    leased = ask(idempotent(scope=SCOPE, mode="lease")(new()), "other").content
    assert leased == (b"in a transaction" if atomic_requests else b"in none")


@pytest.mark.drf
@of_each_way
@pytest.mark.parametrize("mode", ["atomic", "lease"])
def test_a_non_atomic_view_stays_without_a_transaction_if_a_key_is_absent(
    atomic_requests, make, mode
):
    assert b"in none" in rendered(ask(make(scope=SCOPE, mode=mode), None))


@pytest.mark.drf
@of_each_way
def test_a_non_atomic_view_stays_without_a_transaction_in_lease_mode(
    atomic_requests, make
):
    assert b"in none" in rendered(ask(make(scope=SCOPE, mode="lease")))


@pytest.mark.drf
@of_each_way
def test_the_claim_is_outside_the_views_transaction(atomic_requests, make):
    view = make(scope=SCOPE)
    assert b"in a transaction" in rendered(ask(view))
    assert is_replay(ask(view))


def test_an_entry_point_on_a_method_is_an_error_that_names_the_class(atomic_requests):
    on_post = method_decorator(idempotent(scope=SCOPE), name="post")
    view = on_post(
        type("Told", (View,), {"post": lambda self, request: told(request)})
    ).as_view()
    if not atomic_requests:
        assert ask(view).status_code == 200
        return
    with pytest.raises(
        ClaimInsideTransaction, match="except one on a method: put it on the class"
    ):
        ask(view)


def rendered(response):
    return (response.render() if hasattr(response, "render") else response).content


def paying(request, *args, **kwargs):
    return HttpResponse(pay().id.hex, status=201)


class Paying(View):
    def post(self, request):
        return paying(request)


OWN_TRANSACTION = {
    "function": lambda: transaction.atomic(paying),
    "called": lambda: transaction.atomic()(paying),
    "decorators around": lambda: csrf_exempt(transaction.atomic(require_POST(paying))),
    "around as_view": lambda: transaction.atomic(Paying.as_view()),
    "dispatch": (
        lambda: method_decorator(transaction.atomic, name="dispatch")(
            type("Own", (Paying,), {})
        ).as_view()
    ),
    "method": (
        lambda: method_decorator(transaction.atomic, name="post")(
            type("Own", (Paying,), {})
        ).as_view()
    ),
}


@pytest.mark.parametrize("make", OWN_TRANSACTION.values(), ids=OWN_TRANSACTION)
def test_the_middleware_stays_outside_of_a_views_own_transaction(settings, make):
    settings.IDEMPOTENCY = {"SCOPE": "public"}
    view = behind_middleware(make())
    answers = [view(post()) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [201, 201]
    assert (answers[0].content, is_replay(answers[1]), effects()) == (
        answers[1].content,
        True,
        1,
    )


@pytest.mark.parametrize("make", OWN_TRANSACTION.values(), ids=OWN_TRANSACTION)
def test_the_decorator_stays_outside_of_a_views_own_transaction(make):
    view = idempotent(scope=SCOPE)(make())
    assert [view(post()).status_code for _ in range(2)] == [201, 201]
    assert effects() == 1


def durable(request):
    with transaction.atomic(durable=True):
        pay()
    return HttpResponse(status=201)


def test_a_durable_block_in_a_keyed_view_is_refused():
    with pytest.raises(RuntimeError, match="durable") as raised:
        entry_point(durable)()
    (note,) = raised.value.__notes__
    assert 'mode="lease"' in note
    assert (effects(), record().status) == (0, "failed")


def test_an_error_of_the_views_own_is_left_without_a_note():
    def view(request):
        raise RuntimeError("asked for")

    with pytest.raises(RuntimeError) as raised:
        entry_point(view)()
    assert not hasattr(raised.value, "__notes__")
