"""The published policy tells each operation's rules, and nothing else."""

from __future__ import annotations

import re

import pytest
from django.http import HttpResponse
from django.urls import path, re_path
from django.views import View

from django_idempotency import body_field
from django_idempotency.contrib.openapi import published
from django_idempotency.contrib.openapi.published_policy import PublishedPolicyView
from django_idempotency.http.placement import idempotent
from django_idempotency.values.policy import Fingerprint, Key, Policy


@idempotent(
    required=True,
    retention=7200,
    fingerprint=Fingerprint(headers=["X-Account"]),
    scope=lambda request: "a-secret-scope",
)
def pay(request, pk):
    return HttpResponse()


class Orders(View):
    def get(self, request):
        return HttpResponse()

    def post(self, request):
        return HttpResponse()

    def put(self, request):
        return HttpResponse()


def plain(request):
    return HttpResponse()


@pytest.fixture
def show(client, settings):
    settings.MIDDLEWARE = []

    def shown(*more, **options):
        settings.ROOT_URLCONF = (
            path("policy/", PublishedPolicyView.as_view(**options)),
            path("pay/<int:pk>/", pay),
            re_path(r"^orders/$", idempotent(Orders).as_view()),
            path("plain/", plain),
            *more,
        )
        return client.get("/policy/")

    return shown


def test_each_operation_is_listed_with_its_policy(show):
    first, second = show().context["operations"]
    assert (first["path"], first["methods"]) == (
        "/pay/{pk}/",
        ["DELETE", "PATCH", "POST", "PUT"],
    )
    assert (first["required"], first["remembered"]) == (True, "for 2 hours")
    assert "are compared, and the headers X-Account;" in first["rules"]
    assert first["statuses"].startswith(
        "After 400, 401, 403–406, 415, 422, 429 the key is free again. After 500–599"
    )
    assert first["responses"].keys() == {"400", "409", "422", "503"}
    assert (second["path"], second["methods"], second["required"]) == (
        "/orders/",
        ["POST", "PUT"],
        False,
    )


def test_the_place_of_each_key_is_shown(show):
    imported = idempotent(key=Key(source=body_field("reference"), pattern="[a-z]+"))
    page = show(path("imports/", imported(plain))).content.decode()
    assert "The key in the field reference of the body names" in page
    assert "1 to 255 characters, matching <code>[a-z]+</code>" in page
    assert "The key in the header Idempotency-Key names" in page
    assert "1 to 257 characters, quotes included" in page


def test_the_page_shows_each_operation_without_secrets(show):
    page = show().content.decode()
    assert re.findall(r"<h2>(.*?) <code>(.*?)</code>", page) == [
        ("DELETE, PATCH, POST, PUT", "/pay/{pk}/"),
        ("POST, PUT", "/orders/"),
    ]
    assert "Required." in page
    assert "2 hours" in page
    assert "secret" not in page


def test_the_published_policy_shows_only_the_chosen_paths(show):
    assert [each["path"] for each in show(paths="^/orders").context["operations"]] == [
        "/orders/"
    ]


def test_the_published_policy_uses_the_words_of_the_openapi_document(show):
    pay_terms, _orders = show().context["operations"]
    policy = Policy(
        required=True, retention=7200, fingerprint=Fingerprint(headers=["X-Account"])
    )
    assert pay_terms["rules"] == published.retry_rules(policy)
    assert pay_terms["responses"] == published.own_responses(policy)
    assert pay_terms["key"] == published.key_schema(policy)


def test_the_middlewares_policy_counts_for_the_others(show, settings):
    assert show().context["others"] is None
    settings.MIDDLEWARE = ["django_idempotency.middleware.IdempotencyMiddleware"]
    settings.IDEMPOTENCY = {"RETENTION": 60}
    assert show().context["others"]["remembered"] == "for 1 minute"
    settings.IDEMPOTENCY = {"ENABLED": False}
    assert (show().context["others"], show().context["operations"]) == (None, [])


@pytest.mark.openapi
def test_operations_of_the_frameworks_are_listed_too(show, settings, client):
    from ninja import NinjaAPI
    from rest_framework.routers import DefaultRouter

    from tests.contrib.openapi.test_openapi import Payments

    api, router = NinjaAPI(urls_namespace="published", docs_url=None), DefaultRouter()
    api.post("/give")(idempotent(required=True)(lambda request: None))
    router.register("payments", Payments, basename="payment")
    settings.ROOT_URLCONF = (
        path("", PublishedPolicyView.as_view()),
        path("ninja/", api.urls),
        *router.urls,
    )
    told = client.get("/").context["operations"]
    assert sorted(
        (each["path"], each["methods"], each["required"]) for each in told
    ) == [
        ("/ninja/give", ["POST"], True),
        ("/payments/", ["POST"], False),
        ("/payments/refund/", ["POST"], True),
    ]
