"""A request with a key that protects nothing is an event, wherever that happens."""

from __future__ import annotations

import logging
from functools import wraps

import pytest
from django.contrib.auth.decorators import login_required
from django.http import HttpResponse, HttpResponseRedirect
from django.views import View

from django_idempotency import signals
from django_idempotency.http.placement import idempotency_exempt, idempotent
from django_idempotency.values.exceptions import StoreUnavailable
from django_idempotency.values.outcomes import Unprotected
from testproject.models import LedgerEntry
from tests.support.callers import is_replay, when
from tests.support.views import AsyncOrder, Order, Runs, api_class, class_with

pytestmark = pytest.mark.django_db
MIDDLEWARE = "django_idempotency.middleware.IdempotencyMiddleware"
SENDS = pytest.mark.parametrize("send", ["__call__", "asgi"])


@pytest.fixture
def events():
    """The events so far: reason, view and entry point. Its receiver may query."""
    sent = []

    def receive(operation, reason, **_named):
        LedgerEntry.objects.count()
        sent.append((reason, operation.view.rpartition(".")[2], operation.entry_point))

    with when(signals.request_unprotected, receive):
        yield sent


@pytest.fixture
def covered(call, settings):
    if MIDDLEWARE not in settings.MIDDLEWARE:
        settings.MIDDLEWARE = [*settings.MIDDLEWARE, MIDDLEWARE]
    return call


def by_api_key(view):
    """As healthchecks has it: neither ``request.user`` nor ``request.auth`` is set."""

    @wraps(view)
    def wrapper(request):
        if request.headers.get("X-Api-Key") != "secret":
            return HttpResponse(status=401)
        return view(request)

    return wrapper


def answering(view):
    """A decorator that does not call the view."""

    @wraps(view)
    def wrapper(request):
        return HttpResponse("done") if request.method == "POST" else view(request)

    return wrapper


class Redirecting(View):
    target = "/done/?of=/view/7"

    def dispatch(self, request):
        getattr(self, "post", None)
        return HttpResponseRedirect(self.target)

    def post(self, request):
        raise AssertionError


UNPROTECTED = {
    "API key": (
        lambda runs: by_api_key(runs.view),
        (Unprotected.NO_SCOPE, "view", "middleware"),
    ),
    "async": (lambda runs: runs.aview, (Unprotected.NO_SCOPE, "aview", "middleware")),
    "class": (
        lambda runs: class_with(Order, runs).as_view(),
        (Unprotected.NO_SCOPE, "post", "middleware"),
    ),
    "async class": (
        lambda runs: class_with(AsyncOrder, runs).as_view(),
        (Unprotected.NO_SCOPE, "post", "middleware"),
    ),
    "ignored by its policy": (
        lambda runs: idempotent(anonymous="ignore")(runs.view),
        (Unprotected.NO_SCOPE, "view", "decorator"),
    ),
    "decorator in its place": (
        lambda runs: answering(runs.view),
        (Unprotected.NO_HANDLER, "view", "middleware"),
    ),
    "decorator in the place of its own": (
        lambda runs: answering(idempotent(runs.view)),
        (Unprotected.NO_HANDLER, "view", "middleware"),
    ),
    "dispatch in the place of its own": (
        lambda runs: answering(idempotent(class_with(Order, runs)).as_view()),
        (Unprotected.NO_HANDLER, "post", "middleware"),
    ),
    "redirect after the work": (
        lambda runs: idempotent(Redirecting).as_view(),
        (Unprotected.NO_HANDLER, "Redirecting", "decorator"),
    ),
    "view of REST framework": (
        lambda runs: api_class(runs.view).as_view(),
        (Unprotected.NO_SCOPE, "Posted", "middleware"),
    ),
}


@SENDS
@pytest.mark.parametrize(
    ("make", "event"),
    [
        pytest.param(*each, id=name, marks=[pytest.mark.drf] if "REST" in name else [])
        for name, each in UNPROTECTED.items()
    ],
)
def test_a_key_that_protects_nothing_is_one_event(make, event, send, covered, events):
    covered.client.logout()
    view = make(Runs())
    respond = getattr(covered, send)
    for key in ("k", "k", None):
        response = respond(view, key=key, headers={"X-Api-Key": "secret"})
        assert response.status_code < 400
    assert events == [event] * 2, "one for each request with a key"


PROTECTED = {
    "run, replay and refusal": lambda runs: runs.view,
    "own entry point": lambda runs: idempotent(runs.view),
    "class": lambda runs: idempotent(class_with(Order, runs)).as_view(),
    "own entry point, for another method": lambda runs: answering(
        idempotent(methods=("PUT",))(runs.view)
    ),
    "exempt, with its own entry point": lambda runs: idempotency_exempt(
        answering(idempotent(runs.view))
    ),
    "exempt": lambda runs: idempotency_exempt(answering(runs.view)),
    "error": lambda runs: wraps(runs.view)(lambda request: HttpResponse(status=400)),
    "redirect to the login": lambda runs: login_required(runs.view),
    "redirect of a class": lambda runs: idempotent(
        type("Login", (Redirecting,), {"target": "/login/?next=/view/%3Fa%3D1"})
    ).as_view(),
}


@SENDS
@pytest.mark.parametrize("make", PROTECTED.values(), ids=PROTECTED)
def test_protected_and_refused_requests_are_not_reported(
    make, send, covered, events, alice
):
    view, respond = make(Runs()), getattr(covered, send)
    if "login" in str(make.__code__.co_names):
        covered.client.logout()
    respond(view, {"amount": 1})
    respond(view, {"amount": 1})
    respond(view, {"amount": 2})
    respond(view, key=None)
    assert events == []


def test_fail_open_is_an_event_of_the_records(covered, events, monkeypatch, caplog):
    def away(*_arguments):
        raise StoreUnavailable("it is away")

    monkeypatch.setattr("django_idempotency.engine.begin", away)
    view = idempotent(fail_open=True)(Runs().view)
    for _time in range(2):
        assert not is_replay(covered(view))
    assert events == [(Unprotected.FAIL_OPEN, "view", "decorator")] * 2
    (said,) = [each for each in caplog.records if each.event == "request_unprotected"]
    assert (said.levelno, said.reason) == (logging.ERROR, "fail_open")
    assert said.record_id


def test_an_unprotected_view_is_logged_once_a_minute_with_the_fix(covered, caplog):
    covered.client.logout()
    caplog.set_level(logging.WARNING, "django_idempotency")
    runs, others = Runs(), Runs(lambda request: HttpResponse())
    for key in "abc":
        covered(by_api_key(runs.view), key=key, headers={"X-Api-Key": "secret"})
        covered(class_with(Order, others).as_view(), key=key)
    said = [each for each in caplog.records if each.event == "request_unprotected"]
    assert [each.view.rpartition(".")[2] for each in said] == ["view", "post"]
    assert all("set a scope in the view's policy" in each.getMessage() for each in said)
    assert all(each.record_id is None for each in said), "there is no record"
