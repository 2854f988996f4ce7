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

from django_idempotency.decorators import idempotent
from tests.callers import effects, is_replay
from tests.views import book, code

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
    settings.IDEMPOTENCY = {"EXEMPT_PATHS": ["^/api/"]}  # the middleware can't see the doors inside Ninja's views

    def post(api_key="right", **options):
        settings.ROOT_URLCONF = (path("api/", mounted()),)
        sent = call.request(path="/api/pay?amount=5", headers={"X-API-Key": api_key}, **options)
        return call.client.generic(**sent)

    return api, post


def test_an_operation_that_answers_a_response_runs_once_behind_ninjas_own_authentication(ninja):
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


def test_around_the_whole_operation_its_result_is_stored_as_ninja_renders_it(ninja):
    api, post = ninja

    @api.post("/pay")
    @decorate_view(idempotent)
    def pay(request, amount: int):
        return {"amount": amount, "entry": str(book(request).pk)}

    first, second = post(), post()
    assert (first.json()["amount"], second.content, is_replay(second), effects()) == (5, first.content, True, 1)
    assert post(key=None).content != first.content


def test_below_what_renders_a_result_the_error_says_so_and_nothing_is_committed(ninja):
    api, post = ninja

    @api.post("/pay")
    @idempotent
    def pay(request, amount: int):
        book(request)
        return {"amount": amount}

    with pytest.raises(TypeError, match="returned dict, not an HttpResponse"):
        post()
    assert effects() == 0


def test_what_ninja_refuses_leaves_the_key_free(ninja):
    api, post = ninja

    @api.post("/pay")
    @decorate_view(idempotent)
    def pay(request, amount: int, missing: int):
        return {}

    assert [post().status_code for _ in range(2)] == [422, 422]
    assert code(post()) is None
