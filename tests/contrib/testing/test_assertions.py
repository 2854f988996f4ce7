"""``assert_idempotent``: what passes, and that each fault of a broken peer fails."""

from __future__ import annotations

import pytest
from django.core import mail
from django.urls import path

from django_idempotency.contrib.testing import assert_idempotent
from testproject.models import LedgerEntry
from tests.support.callers import pay

pytestmark = pytest.mark.usefixtures("customer")


@pytest.mark.parametrize("url", ["/orders/", "/lease/", "/mails/", "/streams/"])
def test_a_protected_view_passes(client, url):
    response = assert_idempotent(client, "POST", url, {"item": "book"})
    assert response.status_code < 300


def test_a_protected_change_of_rows_passes(client):
    client.post("/unprotected/")
    assert_idempotent(
        client, "post", "/bumps/", {"item": "book"}, content_type="application/json"
    )


@pytest.mark.parametrize(
    ("url", "options", "fault"),
    [
        ("/unprotected/", {}, "took effect again: testproject.LedgerEntry: 1 more row"),
        ("/unprotected/bumps/", {}, r"testproject\.LedgerEntry: rows were changed"),
        ("/unprotected/mails/", {}, "took effect again: mail.outbox: 1, then 2"),
        ("/unprotected/mails/", {"effects": lambda: mail.outbox}, "took effect again"),
        (
            "/pointed/",
            {},
            r"status 201, then 200\n  body .*, then b'{\"duplicate\": true}'",
        ),
        ("/nothing/", {}, "no visible effect"),
        ("/orders/", {"ignore": ["testproject.LedgerEntry"]}, "no visible effect"),
    ],
    ids=[
        "a row more",
        "rows changed",
        "a mail more",
        "a list that grows",
        "another response",
        "no effect",
        "ignored",
    ],
)
def test_a_broken_view_or_an_effect_that_is_not_seen_fails(client, url, options, fault):
    client.post("/unprotected/")
    with pytest.raises(AssertionError, match=fault):
        assert_idempotent(client, "POST", url, **options)


def test_a_header_that_differs_fails_unless_ignored(client, settings):
    settings.MIDDLEWARE = ["tests.contrib.testing.test_assertions.numbered"]
    with pytest.raises(AssertionError, match="header x-number '1', then '2'"):
        assert_idempotent(client, "POST", "/orders/")
    assert_idempotent(client, "POST", "/orders/", ignore_headers=["X-Number"])


def numbered(get_response):
    served = []

    def respond(request):
        response = get_response(request)
        served.append(request)
        response["X-Number"] = str(len(served))
        return response

    return respond


def test_effects_may_be_a_queryset_or_a_callable(client):
    entries = LedgerEntry.objects
    for effects in (
        entries.all(),
        entries.order_by("-pk")[:50],
        entries.count,
        lambda: entries.all(),
    ):
        assert_idempotent(client, "POST", "/orders/", effects=effects)
        with pytest.raises(AssertionError, match="took effect again"):
            assert_idempotent(client, "POST", "/unprotected/", effects=effects)


def test_the_key_and_the_headers_of_the_test_are_sent(client, settings):
    settings.IDEMPOTENCY = {"KEY": "X-Key"}
    sent = {"headers": {"X-Own": "1"}, "effects": iter(range(9)).__next__}
    with pytest.raises(AssertionError):  # the effects differ each time
        assert_idempotent(client, "POST", "/headers/", key="k", **sent)
    sent["effects"] = iter([0, 1, 1]).__next__
    told = assert_idempotent(client, "POST", "/headers/", key="k", **sent).json()
    assert (told["X-Key"], told["X-Own"]) == ('"k"', "1")


def test_a_retry_has_the_cookies_from_before_the_lost_response(client):
    """A session that the view renews: who lost the new cookie is nobody."""
    session = client.session
    session["seen"] = "alice"
    session.save()
    with pytest.raises(AssertionError, match="took effect again"):
        assert_idempotent(client, "POST", "/renewals/")


@pytest.mark.drf
def test_the_client_of_rest_framework_will_do():
    from rest_framework.test import APIClient

    assert_idempotent(APIClient(), "POST", "/orders/", {"item": "book"}, format="json")


@pytest.mark.drf
def test_a_page_of_the_browsable_api_is_compared_by_status_alone(client, settings):
    """Its replay is the data."""
    from rest_framework.renderers import BrowsableAPIRenderer, JSONRenderer
    from rest_framework.response import Response
    from rest_framework.views import APIView

    from django_idempotency.rest_framework import IdempotentMixin
    from django_idempotency.values.policy import Policy

    class OrderView(IdempotentMixin, APIView):
        idempotency_policy = Policy(scope="public")
        authentication_classes = permission_classes = ()
        renderer_classes = (JSONRenderer, BrowsableAPIRenderer)

        def post(self, request):
            return Response({"order": str(pay().pk)}, status=201)

    settings.ROOT_URLCONF = (path("orders/", OrderView.as_view()),)
    response = assert_idempotent(
        client, "POST", "/orders/", headers={"Accept": "text/html"}
    )
    assert response.status_code == 201
