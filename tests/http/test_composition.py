"""An entry point is found through decorators, by the middleware and by the checks, and a second one passes through."""

from __future__ import annotations

import pytest
from django.contrib.auth.decorators import login_required
from django.http import HttpResponse
from django.utils.decorators import method_decorator
from django.views.decorators.cache import never_cache
from django.views.decorators.csrf import csrf_exempt
from rest_framework import permissions, viewsets
from rest_framework.authentication import SessionAuthentication, TokenAuthentication
from rest_framework.authtoken.models import Token
from rest_framework.decorators import api_view, authentication_classes, permission_classes
from rest_framework.response import Response
from rest_framework.views import APIView

from django_idempotency.decorators import idempotent
from django_idempotency.http.placement import has_entry_point
from django_idempotency.models import IdempotencyRecord
from tests.support.callers import is_replay
from tests.support.views import Order, Runs, book, class_with

pytestmark = pytest.mark.drf

OURS = "django_idempotency.middleware.IdempotencyMiddleware"
leased = idempotent(mode="lease")


class ApiOrder(APIView):
    authentication_classes = (SessionAuthentication, TokenAuthentication)
    permission_classes = (permissions.IsAuthenticated,)
    runs: Runs

    def post(self, request, *args, **kwargs):
        return self.runs.view(request)


class ApiOrders(viewsets.ViewSet):
    authentication_classes = (SessionAuthentication, TokenAuthentication)
    runs: Runs

    def create(self, request, *args, **kwargs):
        return self.runs.view(request)


def function(runs):
    """An ``@api_view``, as projects write it."""

    @api_view(["POST"])
    @authentication_classes([SessionAuthentication, TokenAuthentication])
    @permission_classes([permissions.IsAuthenticated])
    def order(request):
        return runs.view(request)

    return order


WAYS = {
    "function": lambda runs: leased(runs.view),
    "subclass": lambda runs: type("Own", (leased(Order),), {"runs": runs}).as_view(),
    "api_view": lambda runs: leased(function(runs)),
    "csrf_exempt api_view": lambda runs: leased(csrf_exempt(function(runs))),
    "APIView.as_view()": lambda runs: leased(class_with(ApiOrder, runs).as_view()),
    "csrf_exempt APIView.as_view()": lambda runs: csrf_exempt(
        leased(csrf_exempt(class_with(ApiOrder, runs).as_view()))
    ),
    "ViewSet.as_view()": lambda runs: leased(class_with(ApiOrders, runs).as_view({"post": "create"})),
    "dispatch of an APIView": lambda runs: method_decorator(leased, name="dispatch")(
        class_with(ApiOrder, runs)
    ).as_view(),
    "View.as_view()": lambda runs: leased(class_with(Order, runs).as_view()),
    "csrf_exempt View.as_view()": lambda runs: leased(csrf_exempt(class_with(Order, runs).as_view())),
    "decorators around": lambda runs: never_cache(
        login_required(leased(csrf_exempt(class_with(Order, runs).as_view())))
    ),
    "dispatch": lambda runs: method_decorator(leased, name="dispatch")(class_with(Order, runs)).as_view(),
    "method": lambda runs: method_decorator(leased, name="post")(class_with(Order, runs)).as_view(),
}


@pytest.mark.parametrize("middleware", [True, False], ids=["middleware", "alone"])
@pytest.mark.parametrize("way", WAYS)
def test_a_view_runs_once_for_each_key(call, settings, way, middleware):
    settings.MIDDLEWARE = [path for path in settings.MIDDLEWARE if path != OURS] + [OURS] * middleware
    runs = Runs(lambda request: Response({"run": runs.count}) if is_api(way) else HttpResponse(f"run {runs.count}"))
    view = WAYS[way](runs)
    answers = [call(view, key=key) for key in ("k", "k", "other")]
    assert [answer.status_code for answer in answers] == [200] * 3
    assert [is_replay(answer) for answer in answers] == [False, True, False]
    assert answers[0].content == answers[1].content != answers[2].content
    assert [context.key for context in runs.contexts] == ["k", "other"]
    assert set(IdempotencyRecord.objects.values_list("mode", flat=True)) == {"lease"}, "its own policy"


def is_api(way):
    return "api" in way.lower() or "ViewSet" in way


@pytest.mark.parametrize("way", WAYS)
def test_an_entry_point_is_seen_through_decorators(way):
    assert has_entry_point(WAYS[way](Runs()), "POST")
    assert not has_entry_point(csrf_exempt(class_with(Order, Runs()).as_view()), "POST")


@pytest.mark.parametrize("way", [way for way in WAYS if is_api(way)])
def test_a_replay_is_behind_rest_frameworks_authentication(call, alice, way):
    runs = Runs(lambda request: Response({"entry": str(book(request).pk)}))
    view = WAYS[way](runs)
    call.client.logout()
    token = Token.objects.create(user=alice)
    header = {"Authorization": f"Token {token.key}"}
    assert [call(view, headers=header).status_code for _ in range(2)] == [200, 200]
    assert (runs.count, runs.contexts[0].scope.endswith(f":{alice.pk}")) == (1, True)
    token.delete()
    refused = call(view, headers=header)
    assert (refused.status_code in (401, 403), b"entry" in refused.content) == (True, False)
