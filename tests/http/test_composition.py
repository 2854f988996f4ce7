"""An entry point on REST framework's views, in each place where a project may write it."""

from __future__ import annotations

import pytest
from django.views.decorators.csrf import csrf_exempt
from rest_framework import permissions, viewsets
from rest_framework.authentication import SessionAuthentication, TokenAuthentication
from rest_framework.authtoken.models import Token
from rest_framework.decorators import api_view, authentication_classes, permission_classes
from rest_framework.response import Response
from rest_framework.views import APIView

from django_idempotency.decorators import idempotent
from django_idempotency.models import IdempotencyRecord
from tests.support.callers import is_replay
from tests.support.views import Runs, book, class_with

pytestmark = pytest.mark.drf

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
    "class": lambda runs: leased(class_with(ApiOrder, runs)).as_view(),
    "api_view": lambda runs: leased(csrf_exempt(function(runs))),
    "APIView.as_view()": lambda runs: csrf_exempt(leased(csrf_exempt(class_with(ApiOrder, runs).as_view()))),
    "ViewSet.as_view()": lambda runs: leased(class_with(ApiOrders, runs).as_view({"post": "create"})),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_a_view_runs_once_for_each_key_behind_its_authentication(call, alice, way):
    runs = Runs(lambda request: Response({"entry": str(book(request).pk)}))
    view = way(runs)
    call.client.logout()
    token = Token.objects.create(user=alice)
    header = {"Authorization": f"Token {token.key}"}
    answers = [call(view, key=key, headers=header) for key in ("k", "k", "other")]
    assert [(answer.status_code, is_replay(answer)) for answer in answers] == [(200, False), (200, True), (200, False)]
    assert answers[0].content == answers[1].content != answers[2].content
    assert [context.key for context in runs.contexts] == ["k", "other"]
    assert runs.contexts[0].scope.endswith(f":{alice.pk}")
    assert set(IdempotencyRecord.objects.values_list("mode", flat=True)) == {"lease"}, "its own policy"
    token.delete()
    refused = call(view, headers=header)
    assert (refused.status_code in (401, 403), b"entry" in refused.content) == (True, False)
