"""``request.idempotency``: there for every view, false without a claim."""

from __future__ import annotations

from functools import wraps
from uuid import UUID

import pytest
from django.http import HttpResponse

from django_idempotency.http.placement import idempotency_exempt, idempotent
from tests.support.callers import SCOPE, post
from tests.support.views import AsyncOrder, Order, Runs, api_class, class_with

pytestmark = pytest.mark.django_db
MIDDLEWARE = "django_idempotency.middleware.IdempotencyMiddleware"


def api(runs, *bases):
    from rest_framework.response import Response

    return api_class(lambda request: Response(runs.view(request).content), *bases)


VIEWS = {
    "without an entry point": lambda runs: idempotency_exempt(
        lambda request: runs.view(request)
    ),
    "middleware": lambda runs: runs.view,
    "function": lambda runs: idempotent(runs.view),
    "async function": lambda runs: idempotent(mode="lease")(runs.aview),
    "class": lambda runs: idempotent(class_with(Order, runs)).as_view(),
    "async class": lambda runs: idempotent(mode="lease")(
        class_with(AsyncOrder, runs)
    ).as_view(),
}
OF_REST_FRAMEWORK = {
    "view of REST framework": lambda runs: api(runs).as_view(),
    "protected view of REST framework": lambda runs: idempotent(api(runs)).as_view(),
}


@pytest.mark.parametrize(
    "make",
    [
        *(pytest.param(make, id=name) for name, make in VIEWS.items()),
        *(
            pytest.param(make, id=name, marks=pytest.mark.drf)
            for name, make in OF_REST_FRAMEWORK.items()
        ),
    ],
)
@pytest.mark.parametrize("send", ["__call__", "asgi"])
def test_a_view_with_an_optional_key_is_written_once(make, send, call):
    call.settings.MIDDLEWARE = [*call.settings.MIDDLEWARE, MIDDLEWARE]
    call.settings.IDEMPOTENCY = {"SCOPE": SCOPE}
    sent = []

    def pay(request):
        seen = request.idempotency
        sent.append([bool(seen), *(seen.child_key(name) for name in "aab")])
        if not seen:
            seen.renew()
        return HttpResponse(seen.key)

    view = make(Runs(pay))
    for key in (None, None, "k"):
        assert getattr(call, send)(view, key=key).status_code == 200
    (_claimed, bank, again, book), other, keyed = sent
    assert (bank, again, book) == (bank, bank, book)
    assert bank != book
    assert str(UUID(bank)) == bank != other[1], "each request has its own"
    assert sent[0][0] is other[0] is False
    assert keyed[0] is (make is not VIEWS["without an entry point"])


def test_code_around_an_entry_point_sees_the_same_child_keys(call):
    around = []

    def sending(view):
        @wraps(view)
        def wrapper(request):
            around.append(request.idempotency.child_key("a"))
            return view(request)

        return wrapper

    view = sending(
        idempotent(lambda request: HttpResponse(request.idempotency.child_key("a")))
    )
    assert call(view, key=None).content.decode() == around[0]


def test_a_second_run_of_a_request_sees_nothing_of_the_first():
    view = idempotent(scope=SCOPE)(lambda request: HttpResponse(status=201))
    seen = []
    request = post()
    view(request)
    del request.META["HTTP_IDEMPOTENCY_KEY"]
    idempotent(lambda request: HttpResponse(seen.append(request.idempotency)))(request)
    assert not seen[0]
