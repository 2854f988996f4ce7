"""A replay from a REST framework view: exact, with ``.data``, and past the view's own
``finalize_response``.
"""

from __future__ import annotations

import pytest
from rest_framework.authentication import SessionAuthentication
from rest_framework.renderers import BrowsableAPIRenderer, JSONRenderer
from rest_framework.response import Response
from rest_framework.views import APIView

from django_idempotency.http.placement import idempotent
from django_idempotency.models import IdempotencyRecord
from django_idempotency.rest_framework import IdempotentMixin
from django_idempotency.values.policy import Body, Policy
from tests.support.callers import is_replay
from tests.support.views import Runs, code

pytestmark = pytest.mark.drf


class Envelope(IdempotentMixin, APIView):
    """Wraps what it answers, as many projects do."""

    authentication_classes = ()
    permission_classes = ()
    renderer_classes = (JSONRenderer,)
    runs: Runs

    def post(self, request, *args, **kwargs):
        return self.runs.view(request)

    def finalize_response(self, request, response, *args, **kwargs):
        response.data = {"data": response.data, "ok": response.status_code < 400}
        return super().finalize_response(request, response, *args, **kwargs)


def envelope(answer, **attributes):
    runs = Runs(lambda request: answer())
    attributes = {
        "runs": runs,
        "idempotency_policy": Policy(scope="public", body=Body(limit=1000)),
    } | attributes
    return runs, type("Charge", (Envelope,), attributes).as_view()


RESPONSES = {
    "JSON": lambda: Response({"id": 7}, status=201),
    "a stored failure": lambda: Response({"declined": True}, status=402),
    "nothing": lambda: Response(status=204),
}


@pytest.mark.parametrize("answer", RESPONSES.values(), ids=RESPONSES)
def test_an_envelope_is_put_on_once(call, answer):
    runs, view = envelope(answer)
    first, second = call(view), call(view)
    assert (second.status_code, second.content, is_replay(second)) == (
        first.status_code,
        first.content,
        True,
    )
    assert runs.count == 1


def test_a_replay_that_the_view_can_not_finalize_is_sent_all_the_same(call):
    def expect_data(view, request, response, *args, **kwargs):
        assert isinstance(response, Response)
        return APIView.finalize_response(view, request, response, *args, **kwargs)

    _runs, view = envelope(RESPONSES["JSON"], finalize_response=expect_data)
    first, second = call(view), call(view)
    assert (second.status_code, second.content, is_replay(second)) == (
        first.status_code,
        first.content,
        True,
    )


def test_a_replay_has_data_as_the_first_response_had(call):
    _runs, view = envelope(RESPONSES["JSON"])
    first, second = call(view), call(view)
    assert first.data == second.data == {"data": {"id": 7}, "ok": True}


def test_the_data_of_what_is_not_json_is_none(call):
    from django.http import HttpResponse

    _runs, view = envelope(
        lambda: HttpResponse(b"plain", content_type="text/plain"),
        finalize_response=APIView.finalize_response,
    )
    assert [call(view).content for _ in range(2)] == [b"plain"] * 2
    assert call(view).data is None


def test_a_problem_has_the_envelope_of_the_view(call):
    _runs, view = envelope(RESPONSES["JSON"])
    call(view, {"amount": 1})
    refused = call(view, {"amount": 2})
    assert (refused.status_code, refused.json()["ok"]) == (422, False)
    assert refused.json()["data"]["code"] == "idempotency_key_reused"


HTML = {"Accept": "text/html"}
BOTH = (JSONRenderer, BrowsableAPIRenderer)


class Browsable(APIView):
    authentication_classes = (SessionAuthentication,)
    renderer_classes = BOTH
    runs: Runs

    def post(self, request):
        return self.runs.view(request)

    get = post


def browsable(base):
    runs = Runs(lambda request: Response({"entry": 7}, status=201))
    return runs, type("View", (base,), {"runs": runs}).as_view()


class Protected(IdempotentMixin, Browsable):
    """By the mixin."""


def around(view):
    """An entry point that does not see that it is a view of REST framework."""
    return idempotent(lambda request: view(request))


@pytest.mark.parametrize(
    ("base", "wrap"),
    [(Protected, lambda view: view), (Browsable, around)],
    ids=["in", "around"],
)
def test_a_page_of_the_browsable_api_is_not_stored(call, base, wrap):
    runs, view = browsable(base=base)
    view = wrap(view)
    first, second = call(view, headers=HTML), call(view)
    assert "text/html" in first.headers["Content-Type"]
    assert (second.status_code, code(second), runs.count) == (
        201,
        "response_not_stored",
        1,
    )
    assert IdempotencyRecord.objects.get().response_body is None, (
        "no page with a CSRF token"
    )
