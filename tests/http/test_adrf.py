"""Async classes of REST framework have no entry point: that is said, and no error."""

from __future__ import annotations

import pytest
from adrf.decorators import api_view
from adrf.views import APIView
from adrf.viewsets import ViewSet
from django.core.exceptions import ImproperlyConfigured
from django.views.decorators.csrf import csrf_exempt
from rest_framework.decorators import permission_classes
from rest_framework.response import Response

from django_idempotency import signals
from django_idempotency.http.placement import idempotent
from django_idempotency.values.outcomes import Unprotected
from tests.support.callers import when
from tests.support.checks import found

pytestmark = [pytest.mark.django_db, pytest.mark.drf]
MIDDLEWARE = "django_idempotency.middleware.IdempotencyMiddleware"


class Charges(APIView):
    permission_classes = ()

    async def post(self, request):
        return Response(status=201)


class ChargesInASet(ViewSet):
    permission_classes = ()

    async def acreate(self, request):
        return Response(status=201)


@api_view(["POST"])
@permission_classes(())
async def charge(request):
    return Response(status=201)


VIEWS = {
    "class": Charges.as_view(),
    "decorated class": csrf_exempt(Charges.as_view()),
    "viewset": ChargesInASet.as_view({"post": "acreate"}),
    "function": charge,
}


@pytest.fixture
def covered(call, settings):
    settings.MIDDLEWARE = [*settings.MIDDLEWARE, MIDDLEWARE]
    return call


@pytest.mark.parametrize("send", ["__call__", "asgi"])
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_an_async_api_runs_unprotected_with_an_event(view, send, covered):
    reasons = []
    with when(
        signals.request_unprotected, lambda reason, **_named: reasons.append(reason)
    ):
        for key in ("k", None):
            assert getattr(covered, send)(view, key=key).status_code == 201
    assert reasons == [Unprotected.ASYNC_CLASS]


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_a_check_says_so(view, covered):
    covered._serve(view)
    (message,) = found("W016")
    assert "async class of REST framework" in message.msg
    covered._serve(idempotent(lambda request: None))
    assert found("W016") == []


def test_an_entry_point_of_its_own_is_refused(covered):
    with pytest.raises(ImproperlyConfigured, match="Charges is async"):
        idempotent(Charges).as_view()
