"""An exception that another middleware turns into a response is a response like any
other.
"""

from __future__ import annotations

import pytest
from asgiref.sync import iscoroutinefunction, markcoroutinefunction, sync_to_async
from django.http import HttpResponse
from django.views import View

from django_idempotency.conf import suspensions
from django_idempotency.http.placement import idempotent
from tests.support.callers import is_replay, references
from tests.support.views import Runs, api_class, book

OURS = "django_idempotency.middleware.IdempotencyMiddleware"
MODULE = "tests.http.test_exceptions_by_middleware"


class Expired(Exception):
    pass


class Answering:
    """Turns ``Expired`` into a response, and remembers every exception."""

    sync_capable = async_capable = True
    status = 410
    writes = False
    asked: list[str] = []

    def __init__(self, get_response):
        self.get_response = get_response
        if iscoroutinefunction(get_response):
            markcoroutinefunction(self)

    def __call__(self, request):
        return self.get_response(request)

    def process_exception(self, request, exception):
        self.asked.append(type(exception).__name__)
        if self.writes:
            book(request, "by middleware")
        return (
            HttpResponse("answered", status=self.status)
            if isinstance(exception, Expired)
            else None
        )


@pytest.fixture(autouse=True)
def answering(monkeypatch, settings, call):
    monkeypatch.setattr(Answering, "asked", [])
    settings.MIDDLEWARE = [
        *(path for path in settings.MIDDLEWARE if path != OURS),
        f"{MODULE}.Answering",
        OURS,
    ]
    call.client.raise_request_exception = False


class Writes(Runs):
    async def aview(self, request):
        return await sync_to_async(self.view)(request)


def raising(error=Expired):
    def answer(request):
        book(request, "by view")
        raise error

    return Writes(answer)


def posting(handler):
    return type("Posting", (View,), {"post": lambda self, request: handler(request)})


def rest_framework(runs):
    from rest_framework.authentication import SessionAuthentication

    return api_class(
        runs.view, authentication_classes=[SessionAuthentication]
    ).as_view()


VIEWS = {
    "middleware, function": lambda runs: runs.view,
    "middleware, class": lambda runs: posting(runs.view).as_view(),
    "middleware, async": lambda runs: runs.aview,
    "decorator, function": lambda runs: idempotent(runs.view),
    "decorator, class": lambda runs: idempotent(posting(runs.view)).as_view(),
    "decorator, lease": lambda runs: idempotent(mode="lease")(runs.view),
    "decorator, async": lambda runs: idempotent(mode="lease")(runs.aview),
    "REST framework": rest_framework,
}
SENT = pytest.mark.parametrize("send", ["__call__", "asgi"])
MADE = pytest.mark.parametrize(
    "make",
    [
        pytest.param(make, marks=[pytest.mark.drf] * ("REST" in name))
        for name, make in VIEWS.items()
    ],
    ids=VIEWS,
)


@SENT
@MADE
def test_the_response_is_stored_with_the_effects(call, make, send):
    runs = raising()
    first, second = (getattr(call, send)(make(runs)) for _time in range(2))
    assert [(each.status_code, each.content) for each in (first, second)] == [
        (410, b"answered")
    ] * 2
    assert (is_replay(first), is_replay(second)) == (False, True)
    assert (runs.count, references(), Answering.asked) == (
        1,
        ["by view"],
        ["Expired"],
    )


@SENT
@MADE
def test_a_released_status_leaves_the_effects_and_the_key(
    call, make, send, monkeypatch
):
    monkeypatch.setattr(Answering, "status", 429)
    runs = raising()
    assert [getattr(call, send)(make(runs)).status_code for _time in range(2)] == [
        429,
        429,
    ]
    assert (runs.count, references()) == (2, ["by view"] * 2)


@SENT
@MADE
def test_an_exception_without_a_response_is_asked_about_once(call, make, send):
    runs = raising(LookupError)
    assert getattr(call, send)(make(runs)).status_code == 500
    assert Answering.asked == ["LookupError"]


@SENT
@MADE
def test_writes_of_a_middleware_about_an_exception_it_does_not_handle_stay(
    call, make, send, monkeypatch
):
    monkeypatch.setattr(Answering, "writes", True)
    assert getattr(call, send)(make(raising(LookupError))).status_code == 500
    assert references().count("by middleware") == 1


@SENT
@pytest.mark.parametrize("key", ["k", None], ids=["key", "no key"])
def test_suspended_entry_points_leave_the_exception_to_django(
    call, settings, monkeypatch, send, key
):
    monkeypatch.setattr(suspensions, "_items", [lambda: True])
    settings.IDEMPOTENCY = {}
    response = getattr(call, send)(raising().view, key=key)
    assert (response.status_code, Answering.asked) == (410, ["Expired"])


@pytest.mark.parametrize("key", ["k", None], ids=["key", "no key"])
def test_effects_before_a_handled_exception_stay_unless_atomic_requests_undoes_them(
    call, atomic_requests, key
):
    runs = raising()
    assert call(idempotent(runs.view), key=key).status_code == 410
    assert references() == ([] if atomic_requests else ["by view"])
