"""A stored response reaches only callers whom the view would let in now, never another
scope (L7).
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from django.contrib.auth.decorators import user_passes_test
from django.contrib.auth.mixins import UserPassesTestMixin
from django.core.exceptions import PermissionDenied
from django.http import HttpResponse
from django.test import Client
from django.utils.decorators import method_decorator
from django.views import View
from django.views.decorators.csrf import csrf_protect
from rest_framework.authentication import SessionAuthentication
from rest_framework.permissions import BasePermission
from rest_framework.response import Response
from rest_framework.throttling import BaseThrottle
from rest_framework.views import APIView

from django_idempotency.http.placement import idempotent
from django_idempotency.models import IdempotencyRecord
from django_idempotency.rest_framework import IdempotentMixin
from django_idempotency.values.policy import Atomic
from tests.support.callers import all_effects as effects
from tests.support.callers import is_replay
from tests.support.views import Caller, book

pytestmark = pytest.mark.usefixtures("transactional_db")

MayCome = Callable[[Any], bool]


def handler(request: Any, *args: Any, **kwargs: Any) -> HttpResponse:
    """Its answer differs with every run and tells whose it is."""
    return HttpResponse(f"{request.user} {book(request).pk}", status=201)


def decorated(view: Any, may_come: MayCome) -> Any:
    def checked(user: Any) -> bool:
        if not may_come(user):
            raise PermissionDenied
        return True

    return user_passes_test(checked)(view)


class _PlainView(UserPassesTestMixin, View):
    raise_exception = True

    def post(self, request: Any, *args: Any, **kwargs: Any) -> HttpResponse:
        return handler(request)


def plain_class(may_come: MayCome) -> type:
    return type(
        "PlainView",
        (_PlainView,),
        {"test_func": lambda self: may_come(self.request.user)},
    )


class _APIView(APIView):
    authentication_classes = (SessionAuthentication,)

    def post(self, request: Any, *args: Any, **kwargs: Any) -> Response:
        answer = handler(request)
        return Response(answer.content.decode(), status=answer.status_code)


def api_class(may_come: MayCome, *bases: type, **attributes: Any) -> type:
    class MayCome(BasePermission):
        def has_permission(self, request: Any, view: Any) -> bool:
            return may_come(request.user)

    return type(
        "API", (*bases, _APIView), {"permission_classes": (MayCome,), **attributes}
    )


ENTRY_POINTS: dict[str, Callable[[MayCome], Any]] = {
    "decorator": lambda may_come: decorated(idempotent(handler), may_come),
    "decorator, class": lambda may_come: idempotent(plain_class(may_come)).as_view(),
    "mixin": lambda may_come: api_class(may_come, IdempotentMixin).as_view(),
    "decorator, claim by lock": lambda may_come: decorated(
        idempotent(mode=Atomic(claim="lock"))(handler), may_come
    ),
    "middleware": lambda may_come: decorated(handler, may_come),
    "middleware, class": lambda may_come: plain_class(may_come).as_view(),
    "middleware, REST framework": lambda may_come: api_class(may_come).as_view(),
}
through_each_entry_point = pytest.mark.parametrize(
    "entry_point",
    [
        pytest.param(
            each, id=name, marks=[pytest.mark.postgresql] if "lock" in name else []
        )
        for name, each in ENTRY_POINTS.items()
    ],
)


def anybody(user: Any) -> bool:
    return user.is_active


@pytest.fixture
def bob(django_user_model):
    return django_user_model.objects.create_user("bob")


def seal() -> Any:
    """All there is of the records, to be compared, but for the count of replays."""
    return list(
        IdempotencyRecord.objects.values(
            "id", "status", "token", "attempts", "response_body", "expires_at"
        )
    )


@through_each_entry_point
@pytest.mark.parametrize(
    "body", [{"a": 1}, {"a": 2}], ids=["the same request", "another request"]
)
def test_another_user_with_the_same_key_has_an_operation_of_their_own(
    call, client, bob, entry_point, body
):
    view = entry_point(anybody)
    first = call(view, {"a": 1})
    client.force_login(bob)
    other = call(view, body)
    assert (first.status_code, other.status_code) == (201, 201)
    assert ("alice" in first.content.decode(), "bob" in other.content.decode()) == (
        True,
        True,
    )
    assert not is_replay(other)
    assert effects() == 2


def tenant(request: Any) -> str:
    return request.headers["X-Tenant"]


@through_each_entry_point
def test_a_user_in_two_tenants_has_two_operations(call, settings, entry_point):
    settings.IDEMPOTENCY = {"SCOPE": tenant}
    view = entry_point(anybody)
    red, blue, again = (
        call(view, headers={"X-Tenant": name}) for name in ("red", "blue", "red")
    )
    assert len({red.content, blue.content}) == 2
    assert (is_replay(red), is_replay(blue), is_replay(again)) == (False, False, True)
    assert again.content == red.content
    assert effects() == 2


def signs_out(client: Any, user: Any) -> None:
    client.logout()


def is_deactivated(client: Any, user: Any) -> None:
    user.is_active = False
    user.save()


def loses_the_role(client: Any, user: Any) -> None:
    user.is_staff = False
    user.save()


@through_each_entry_point
@pytest.mark.parametrize("happens", [signs_out, is_deactivated, loses_the_role])
def test_a_stored_response_is_withheld_from_a_caller_without_access(
    call, client, alice, entry_point, happens
):
    alice.is_staff = True
    alice.save()
    view = entry_point(lambda user: user.is_active and user.is_staff)
    assert call(view).status_code == 201
    before = seal()
    happens(client, alice)
    refused = call(view)
    assert (refused.status_code, is_replay(refused)) == (403, False)
    assert seal() == before
    assert effects() == 1


@through_each_entry_point
def test_a_caller_who_is_let_in_again_gets_the_response(
    call, client, alice, entry_point
):
    let_in = {"alice"}
    view = entry_point(lambda user: user.username in let_in)
    first = call(view)
    let_in.clear()
    assert call(view).status_code == 403
    let_in.add("alice")
    replayed = call(view)
    assert (is_replay(replayed), replayed.content) == (True, first.content)


@through_each_entry_point
def test_a_replay_needs_its_csrf_token_like_the_first_request(
    call, alice, settings, entry_point
):
    client = Client(enforce_csrf_checks=True)
    client.force_login(alice)
    strict = Caller(client, settings)
    token = "x" * 32
    client.cookies["csrftoken"] = token
    view = entry_point(anybody)
    first = strict(view, headers={"X-CSRFToken": token})
    assert first.status_code == 201
    forged = strict(view)
    assert (forged.status_code, is_replay(forged)) == (403, False)
    assert is_replay(strict(view, headers={"X-CSRFToken": token}))


@pytest.mark.parametrize("bases", [(IdempotentMixin,), ()], ids=["mixin", "middleware"])
def test_replays_are_throttled(call, bases):
    let = SimpleNamespace(through=2)

    class Throttle(BaseThrottle):
        def allow_request(self, request: Any, view: Any) -> bool:
            let.through -= 1
            return let.through >= 0

    view = api_class(anybody, *bases, throttle_classes=(Throttle,)).as_view()
    assert call(view).status_code == 201
    assert is_replay(call(view))
    before = seal()
    throttled = call(view)
    assert (throttled.status_code, is_replay(throttled)) == (429, False)
    assert seal() == before


class _OwnersOnly(BasePermission):
    owners: frozenset[str] = frozenset()

    def has_object_permission(self, request: Any, view: Any, obj: Any) -> bool:
        return request.user.username in self.owners


def object_view(**attributes: Any) -> Any:
    def post(self: Any, request: Any, *args: Any, **kwargs: Any) -> Response:
        self.check_object_permissions(request, object())
        return _APIView.post(self, request)

    given = {"permission_classes": (_OwnersOnly,), "post": post, **attributes}
    return type("ObjectView", (IdempotentMixin, _APIView), given).as_view()


def test_object_permissions_in_the_handler_are_not_checked_on_replay(call, monkeypatch):
    """The handler does not run again. Whoever asks is still in the scope of whoever got
    the answer first.
    """
    monkeypatch.setattr(_OwnersOnly, "owners", frozenset({"alice"}))
    view = object_view()
    first = call(view)
    monkeypatch.setattr(_OwnersOnly, "owners", frozenset())
    replayed = call(view)
    assert (is_replay(replayed), replayed.content) == (True, first.content)
    assert call(view, key="another").status_code == 403


def test_an_object_permission_in_initial_is_checked_on_a_replay(call, monkeypatch):
    def initial(self: Any, request: Any, *args: Any, **kwargs: Any) -> None:
        APIView.initial(self, request, *args, **kwargs)
        self.check_object_permissions(request, object())

    monkeypatch.setattr(_OwnersOnly, "owners", frozenset({"alice"}))
    view = object_view(initial=initial)
    assert call(view).status_code == 201
    monkeypatch.setattr(_OwnersOnly, "owners", frozenset())
    refused = call(view)
    assert (refused.status_code, is_replay(refused)) == (403, False)
    assert effects() == 1


@pytest.mark.parametrize(
    "protect", [idempotent, lambda view: view], ids=["decorator", "middleware"]
)
def test_a_method_decorators_check_runs_before_a_replay(call, protect):
    let_in = {"alice"}

    @method_decorator(
        user_passes_test(lambda user: user.username in let_in), name="dispatch"
    )
    @method_decorator(csrf_protect, name="dispatch")
    class Checked(_PlainView):
        def test_func(self) -> bool:
            return True

    view = protect(Checked).as_view()
    assert call(view).status_code == 201
    let_in.clear()
    refused = call(view)
    assert (refused.status_code, is_replay(refused)) == (302, False)
