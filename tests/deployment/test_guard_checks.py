"""W021: what lets callers in, or refuses them, inside of an entry point. A replay is
sent before it is asked.
"""

from __future__ import annotations

from functools import update_wrapper, wraps

import pytest
from django.contrib.auth.decorators import (
    login_required,
    permission_required,
    user_passes_test,
)
from django.contrib.auth.mixins import LoginRequiredMixin
from django.db import transaction
from django.http import HttpResponse
from django.urls import path
from django.utils.decorators import method_decorator
from django.views.decorators.http import require_POST

from django_idempotency.forms import idempotent_form
from django_idempotency.http.placement import idempotent
from django_idempotency.middleware import IdempotencyMiddleware
from tests.deployment.wrong import Page, aview, view
from tests.support import checks
from tests.support.callers import is_replay
from tests.support.views import Runs

OURS = f"{IdempotencyMiddleware.__module__}.{IdempotencyMiddleware.__qualname__}"
MIDDLEWARE = ["django.contrib.sessions.middleware.SessionMiddleware"]


class Guarded(LoginRequiredMixin, Page):
    pass


def timed(view):
    @wraps(view)
    def run(request):
        return view(request)

    return run


class Opaque:
    """A decorator that the middleware can't get inside of."""

    def __init__(self, view):
        self.view = view
        update_wrapper(self, view)

    def __call__(self, request):
        return self.view(request)


@pytest.fixture
def found(settings):
    settings.MIDDLEWARE = MIDDLEWARE

    def check(view, **changed):
        for name, value in changed.items():
            setattr(settings, name, value)
        settings.ROOT_URLCONF = (path("view/", view),)
        return checks.ids_found("W021")

    return check


def on(name, *decorators, view=Page):
    return method_decorator(decorators, name=name)(
        type("Decorated", (view,), dict(vars(view)))
    )


permitted = permission_required("shop.add_payment", raise_exception=True)
once = idempotent(mode="lease")
WRONG = {
    "login_required": lambda: idempotent(login_required(view)),
    "user_passes_test": lambda: idempotent(user_passes_test(bool)(view)),
    "permission_required": lambda: idempotent(permitted(view)),
    "further inside": lambda: timed(idempotent(timed(require_POST(permitted(view))))),
    "async": lambda: once(permitted(aview)),
    "a form": lambda: idempotent_form(permitted(view)),
    "one method": lambda: on("post", idempotent, permitted).as_view(),
    "dispatch": lambda: on("dispatch", once, login_required).as_view(),
    "dispatch, around a mixin": (
        lambda: on("dispatch", idempotent, view=type("P", (Guarded,), {})).as_view()
    ),
    "dispatch, around another": (
        lambda: on("dispatch", idempotent, view=on("dispatch", permitted)).as_view()
    ),
    "dispatch, around a method": (
        lambda: on("dispatch", idempotent, view=on("post", permitted)).as_view()
    ),
}
RIGHT = {
    "login_required": lambda: login_required(idempotent(view)),
    "permission_required": lambda: permitted(timed(idempotent(timed(view)))),
    "a method of a class": lambda: idempotent(on("post", permitted)).as_view(),
    "a mixin": lambda: idempotent(Guarded).as_view(),
    "around a class": lambda: login_required(idempotent(Page).as_view()),
    "dispatch": lambda: on("dispatch", login_required, once).as_view(),
    "dispatch of a class": lambda: idempotent(on("dispatch", permitted)).as_view(),
    "one method": lambda: on("post", permitted, idempotent).as_view(),
    "another method": (
        lambda: on("put", permitted, view=on("post", idempotent, view=Both)).as_view()
    ),
    "no entry point": lambda: permitted(view),
    "no entry point, a class": lambda: on("post", permitted).as_view(),
    "may_replay": lambda: idempotent(may_replay=lambda request, record: True)(
        permitted(view)
    ),
}


class Both(Page):
    def put(self, request):
        return HttpResponse()


@pytest.mark.parametrize("make", WRONG.values(), ids=WRONG)
def test_w021_a_guard_inside_of_an_entry_point(found, make):
    assert found(make()) == ["W021"]


@pytest.mark.parametrize("make", RIGHT.values(), ids=RIGHT)
def test_a_guard_around_an_entry_point_is_in_order(found, make):
    assert found(make()) == []


def covered(found, view, **changed):
    return found(view, MIDDLEWARE=[*MIDDLEWARE, OURS], **changed)


def test_the_middleware_goes_inside_what_it_can(found):
    assert covered(found, permitted(timed(view))) == []
    assert covered(found, login_required(Page.as_view())) == []
    assert covered(found, Guarded.as_view()) == []
    assert covered(found, on("post", timed, permitted).as_view()) == []
    assert covered(found, on("post", permitted, transaction.atomic).as_view()) == []


@pytest.mark.parametrize(
    "make",
    [
        lambda: Opaque(permitted(view)),
        lambda: timed(Opaque(permitted(view))),
        lambda: transaction.atomic(permitted(view)),
        lambda: on("post", transaction.atomic, permitted).as_view(),
    ],
    ids=["opaque", "further inside", "atomic", "atomic method"],
)
def test_w021_guards_that_the_middleware_stays_outside_of(found, make):
    assert covered(found, make()) == ["W021"]
    assert covered(found, make(), IDEMPOTENCY={"EXEMPT_PATHS": ["^/view/"]}) == []


@pytest.mark.drf
def test_w021_a_guarded_method_of_rest_framework(found):
    from rest_framework.views import APIView

    from django_idempotency.rest_framework import IdempotentMixin

    post = {"post": lambda view, request: HttpResponse()}
    payments = type("Payments", (IdempotentMixin, APIView), post)
    assert found(payments.as_view()) == []
    assert found(on("dispatch", login_required, view=payments).as_view()) == []
    assert found(on("post", login_required, view=payments).as_view()) == []
    inside = on("post", transaction.atomic, login_required, view=payments)
    assert found(inside.as_view()) == ["W021"]


has_right = user_passes_test(lambda user: allows(user))


@pytest.mark.usefixtures("transactional_db")
@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda inner: idempotent(has_right(inner)), True),
        (lambda inner: has_right(idempotent(inner)), False),
    ],
    ids=["inside", "around"],
)
def test_a_guard_that_w021_reports_is_passed_by_on_a_replay(
    call, found, monkeypatch, make, expected
):
    """A user who lost a right gets the response where the guard is inside."""
    guarded = make(Runs().view)
    assert bool(found(guarded)) is expected
    call.settings.MIDDLEWARE = [
        *MIDDLEWARE,
        "django.contrib.auth.middleware.AuthenticationMiddleware",
    ]
    assert call(guarded).content == b"run 1"
    monkeypatch.setitem(RIGHTS, "alice", False)
    assert is_replay(call(guarded)) is expected


RIGHTS: dict[str, bool] = {}


def allows(user):
    return RIGHTS.get(user.username, True)
