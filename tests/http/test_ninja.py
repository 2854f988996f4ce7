"""``@idempotent`` under Django Ninja, the real library."""

from __future__ import annotations

import uuid
from functools import cache

import pytest
from django.http import JsonResponse
from django.urls import path
from ninja import NinjaAPI
from ninja.decorators import decorate_view
from ninja.security import APIKeyHeader

from django_idempotency.checks.views import check_ninja
from django_idempotency.decorators import idempotent
from tests.support.callers import effects, is_replay
from tests.support.views import book, code

KNOWN = {"right", "other"}


class ApiKey(APIKeyHeader):
    param_name = "X-API-Key"

    def authenticate(self, request, key):
        return key if key in KNOWN else None


@pytest.fixture
def ninja(call, settings):
    """An API, and POSTs to what it has at /pay."""
    api = NinjaAPI(urls_namespace=uuid.uuid4().hex, docs_url=None)

    mounted = cache(lambda: api.urls)
    settings.IDEMPOTENCY = {
        "EXEMPT_PATHS": ["^/api/"]
    }  # the middleware can't see the entry points inside Ninja's views

    def post(api_key="right", **options):
        settings.ROOT_URLCONF = (path("api/", mounted()),)
        sent = call.request(path="/api/pay?amount=5", headers={"X-API-Key": api_key}, **options)
        return call.client.generic(**sent)

    return api, post


def test_an_operation_runs_once_behind_ninjas_authentication(ninja):
    api, post = ninja

    @api.post("/pay", auth=ApiKey())
    @idempotent(scope=lambda request: request.auth)
    def pay(request, amount: int):
        return JsonResponse({"amount": amount, "entry": str(book(request).pk)}, status=201)

    first, second = post(), post()
    assert (first.status_code, second.content, is_replay(second), effects()) == (201, first.content, True, 1)
    assert not is_replay(post("other"))
    KNOWN.discard("right")
    try:
        refused = post()
    finally:
        KNOWN.add("right")
    assert (refused.status_code, is_replay(refused), b"entry" in refused.content) == (401, False, False)


def test_a_result_is_stored_as_ninja_renders_it(ninja):
    api, post = ninja

    @api.post("/pay")
    @decorate_view(idempotent)
    def pay(request, amount: int):
        return {"amount": amount, "entry": str(book(request).pk)}

    first, second = post(), post()
    assert (first.json()["amount"], second.content, is_replay(second), effects()) == (5, first.content, True, 1)
    assert post(key=None).content != first.content


def test_what_ninja_refuses_leaves_the_key_free(ninja):
    api, post = ninja

    @api.post("/pay")
    @decorate_view(idempotent)
    def pay(request, amount: int, missing: int):
        return {}

    assert [post().status_code for _ in range(2)] == [422, 422]
    assert code(post()) is None


@pytest.fixture
def old_ninja(monkeypatch):
    """One whose operations can't be copied."""
    monkeypatch.setattr("django_idempotency.ninja.path_view", lambda view: None)


@pytest.mark.usefixtures("old_ninja")
def test_w011_a_replay_before_ninjas_authentication(ninja, settings):
    api, post = ninja

    @api.post("/pay", auth=ApiKey())
    def pay(request, amount: int):
        return {"entry": str(book(request).pk)}

    @api.get("/paid/{int:number}", auth=ApiKey())
    def paid(request, number: int):
        return {}

    settings.IDEMPOTENCY = {"SCOPE": "public"}
    first, leaked = post("right"), post("wrong")
    assert (leaked.status_code, leaked.content, is_replay(leaked)) == (200, first.content, True), "what it is about"
    (message,) = check_ninja(None)
    assert message.id == "django_idempotency.W011"
    assert "1 views of Django Ninja, such as /api/pay," in message.msg
    assert "EXEMPT_PATHS" in message.hint
    settings.IDEMPOTENCY = {"SCOPE": "public", "EXEMPT_PATHS": ["^/api/"]}
    assert check_ninja(None) == []
    settings.IDEMPOTENCY = {"SCOPE": "public", "METHODS": ["PUT"]}
    assert check_ninja(None) == []
    settings.IDEMPOTENCY, settings.MIDDLEWARE = {}, []
    assert check_ninja(None) == []


@pytest.mark.usefixtures("old_ninja")
@pytest.mark.parametrize("method", ["post", "put"])
def test_w011_an_async_operation_is_seen_too(ninja, settings, method):
    api, _post = ninja

    @getattr(api, method)("/pay", auth=ApiKey())
    async def pay(request, amount: int):
        return {}

    settings.IDEMPOTENCY = {}
    settings.ROOT_URLCONF = (path("api/", api.urls),)
    assert [message.id for message in check_ninja(None)] == ["django_idempotency.W011"]
