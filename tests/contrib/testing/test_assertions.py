"""``assert_idempotent`` and ``lost_answer``: what passes, and that each fault of a broken peer fails."""

from __future__ import annotations

import pytest
from django.core import mail
from django.urls import path

from django_idempotency.contrib.testing import assert_idempotent, lost_answer
from testproject.models import LedgerEntry
from tests.support.callers import pay

pytestmark = pytest.mark.usefixtures("customer")

ASSERTIONS = pytest.mark.parametrize("assertion", [assert_idempotent, lost_answer])


@ASSERTIONS
@pytest.mark.parametrize("url", ["/orders/", "/lease/", "/mails/", "/streams/"])
def test_a_protected_view_passes(client, assertion, url):
    response = assertion(client, "POST", url, {"item": "book"})
    assert response.status_code < 300


@ASSERTIONS
def test_effects_may_be_the_first_rows_of_a_table(client, assertion):
    assertion(client, "POST", "/orders/", effects=LedgerEntry.objects.order_by("-pk")[:5])


@ASSERTIONS
def test_a_protected_change_of_rows_passes(client, assertion):
    client.post("/unprotected/")
    assertion(client, "post", "/bumps/", {"item": "book"}, content_type="application/json")


@ASSERTIONS
@pytest.mark.parametrize(
    ("url", "fault"),
    [
        ("/unprotected/", "took effect again: testproject.LedgerEntry: 1 more row"),
        ("/unprotected/mails/", "took effect again: mail.outbox: 1, then 2"),
        ("/pointed/", r"status 201, then 200\n  body .*, then b'{\"duplicate\": true}'"),
    ],
)
def test_a_broken_view_fails(client, assertion, url, fault):
    with pytest.raises(AssertionError, match=fault):
        assertion(client, "POST", url)


def test_rows_changed_twice_fail_though_none_were_added(client):
    client.post("/unprotected/")
    with pytest.raises(AssertionError, match=r"testproject\.LedgerEntry: rows were changed"):
        assert_idempotent(client, "POST", "/unprotected/bumps/")


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


def test_a_request_without_an_effect_shows_nothing(client):
    with pytest.raises(AssertionError, match="no visible effect"):
        assert_idempotent(client, "POST", "/nothing/")


def test_effects_may_be_a_queryset_or_a_callable(client):
    for effects in (LedgerEntry.objects.all(), LedgerEntry.objects.count, lambda: LedgerEntry.objects.all()):
        assert_idempotent(client, "POST", "/orders/", effects=effects)
        with pytest.raises(AssertionError, match="took effect again"):
            assert_idempotent(client, "POST", "/unprotected/", effects=effects)


def test_a_list_that_grows_is_no_longer_the_same(client):
    with pytest.raises(AssertionError, match="took effect again"):
        assert_idempotent(client, "POST", "/unprotected/mails/", effects=lambda: mail.outbox)


def test_ignored_models_are_no_effects(client):
    with pytest.raises(AssertionError, match="no visible effect"):
        assert_idempotent(client, "POST", "/orders/", ignore=["testproject.LedgerEntry"])


def test_the_key_and_the_headers_of_the_test_are_sent(client, settings):
    settings.IDEMPOTENCY = {"HEADER": "X-Key"}
    sent = {"headers": {"X-Own": "1"}, "effects": iter(range(9)).__next__}
    with pytest.raises(AssertionError):  # the effects differ each time
        assert_idempotent(client, "POST", "/headers/", key="k", **sent)
    sent["effects"] = iter([0, 1, 1]).__next__
    told = assert_idempotent(client, "POST", "/headers/", key="k", **sent).json()
    assert (told["X-Key"], told["X-Own"]) == ('"k"', "1")


def test_a_retry_after_a_lost_answer_has_the_old_cookies(client):
    """A session that the view renews: who has the new cookie gets the replay, who lost it is nobody."""
    for assertion in (assert_idempotent, lost_answer):
        client.cookies.clear()
        session = client.session
        session["seen"] = "alice"
        session.save()
        if assertion is assert_idempotent:
            assertion(client, "POST", "/renewals/")
        else:
            with pytest.raises(AssertionError, match="took effect again"):
                assertion(client, "POST", "/renewals/")


@pytest.mark.drf
def test_the_client_of_rest_framework_will_do():
    from rest_framework.test import APIClient

    assert_idempotent(APIClient(), "POST", "/orders/", {"item": "book"}, format="json")


@pytest.mark.drf
@ASSERTIONS
def test_a_page_of_the_browsable_api_is_compared_by_status_alone(client, settings, assertion):
    """Its replay is the data."""
    from rest_framework.renderers import BrowsableAPIRenderer, JSONRenderer
    from rest_framework.response import Response
    from rest_framework.views import APIView

    from django_idempotency.policy import Policy
    from django_idempotency.rest_framework import IdempotentMixin

    class OrderView(IdempotentMixin, APIView):
        idempotency_policy = Policy(scope="public")
        authentication_classes = permission_classes = ()
        renderer_classes = (JSONRenderer, BrowsableAPIRenderer)

        def post(self, request):
            return Response({"order": str(pay().pk)}, status=201)

    settings.ROOT_URLCONF = (path("orders/", OrderView.as_view()),)
    response = assertion(client, "POST", "/orders/", headers={"Accept": "text/html"})
    assert response.status_code == 201
