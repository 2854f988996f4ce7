"""``add_decorator(idempotent, mode="view")``: one line for all operations of an API or a router of Django Ninja."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.urls import path
from ninja import NinjaAPI, Router, Schema, Status
from ninja.security import APIKeyHeader
from ninja.streaming import JSONL

from django_idempotency.checks.views import check_ninja_decorators
from django_idempotency.decorators import idempotency_exempt, idempotent
from django_idempotency.models import IdempotencyRecord
from tests.support.callers import effects, is_replay
from tests.support.views import book, code

by_key = idempotent(scope=lambda request: request.auth)


class ApiKey(APIKeyHeader):
    param_name = "X-API-Key"

    def authenticate(self, request, key):
        return key if key in {"right", "other"} else None


class Paid(Schema):
    amount: int
    entry: str


@pytest.fixture
def api():
    return NinjaAPI(urls_namespace=uuid.uuid4().hex, docs_url=None, auth=ApiKey())


@pytest.fixture
def post(call, settings, api):
    """POSTs to /api/pay, without the middleware."""
    settings.MIDDLEWARE = [each for each in settings.MIDDLEWARE if not each.endswith("IdempotencyMiddleware")]
    mounted: list[object] = []

    def send(api_key="right", *, to="pay", method="POST", **options):
        if not mounted:
            mounted.append(path("api/", api.urls))
            settings.ROOT_URLCONF = tuple(mounted)
        sent = call.request(path=f"/api/{to}?amount=5", headers={"X-API-Key": api_key}, **options)
        return call.client.generic(**sent | {"method": method})

    return send


def pay(request, amount: int):
    return Status(201, {"amount": amount, "entry": str(book(request).pk)})


def protecting(router, **options):
    router.add_decorator(idempotent(scope=lambda request: request.auth, **options), mode="view")


def test_one_line_protects_every_operation_of_an_api(api, post):
    protecting(api)
    api.post("/pay", response={201: Paid})(pay)
    api.put("/pay", response={201: Paid})(pay)
    first, second = post(), post()
    assert (first.status_code, first.json()["amount"], is_replay(first)) == (201, 5, False), "rendered by Ninja"
    assert (second.content, is_replay(second), effects()) == (first.content, True, 1)
    assert [is_replay(post(method="PUT", key="put")) for _ in range(2)] == [False, True]


def test_a_replay_comes_after_ninjas_authentication(api, post):
    protecting(api)
    api.post("/pay", response={201: Paid})(pay)
    assert post().status_code == 201
    refused, other = post("wrong"), post("other")
    assert (refused.status_code, is_replay(refused), b"entry" in refused.content) == (401, False, False)
    assert (other.status_code, is_replay(other)) == (201, False)


def test_a_routers_line_protects_its_operations_alone(api, post):
    router = Router()
    protecting(router)
    router.post("/pay", response={201: Paid})(pay)
    api.post("/free", response={201: Paid})(pay)
    api.add_router("", router)
    assert [is_replay(post()) for _ in range(2)] == [False, True]
    assert [is_replay(post(to="free")) for _ in range(2)] == [False, False]


def test_the_narrowest_line_counts(api, post):
    router = Router()
    protecting(api)
    protecting(router, required=True)
    router.post("/pay", response={201: Paid})(pay)
    api.add_router("", router)

    @api.post("/own", response={201: Paid})
    @idempotent(scope="public")
    def own(request, amount: int):
        return pay(request, amount)

    assert code(post(key=None)) == "idempotency_key_missing"
    assert post(to="own").status_code == 201
    assert IdempotencyRecord.objects.get().scope == "public"


def test_one_router_in_two_apis_has_the_line_of_each(api, post):
    router, other = Router(), NinjaAPI(urls_namespace=uuid.uuid4().hex, docs_url=None)
    router.post("/pay", response={201: Paid})(pay)
    protecting(other, required=True)
    protecting(api)
    other.add_router("", router)
    assert other.urls
    api.add_router("", router)
    assert [is_replay(post()) for _ in range(2)] == [False, True]
    assert post(key=None).status_code == 201


def test_an_exempt_operation_is_left_alone(api, post):
    protecting(api)

    @api.post("/pay", response={201: Paid})
    @idempotency_exempt
    def pay_again(request, amount: int):
        return pay(request, amount)

    assert [is_replay(post()) for _ in range(2)] == [False, False]


@pytest.mark.parametrize("method", ["post", "get"])
def test_a_stream_is_refused_where_keys_are_heeded(api, method):
    @getattr(api, method)("/items", response=JSONL[Paid])
    def items(request) -> Iterator[Paid]:
        yield Paid(amount=1, entry="")

    protecting(api)
    if method == "get":
        assert api.urls
    else:
        with pytest.raises(ImproperlyConfigured, match="idempotency_exempt leaves it out"):
            _ = api.urls


def test_an_async_operation_is_in_lease_mode(api, post):
    @api.post("/pay", response={201: Paid})
    async def pay_async(request, amount: int):
        return Status(201, {"amount": amount, "entry": uuid.uuid4().hex})

    protecting(api)
    first, second = post(), post()
    assert (first.status_code, second.content, is_replay(second)) == (201, first.content, True)
    assert IdempotencyRecord.objects.get().mode == "lease"


def test_a_decorator_between_two_lines_is_refused(api):
    from functools import wraps

    def logged(function):
        return wraps(function)(lambda *args, **values: function(*args, **values))

    router = Router()
    protecting(api)
    api.add_decorator(logged)
    protecting(router)
    router.post("/pay")(pay)
    api.add_router("", router)
    with pytest.raises(ImproperlyConfigured, match="before the others"):
        _ = api.urls


@pytest.mark.parametrize("is_async", [False, True])
def test_e079_ninjas_default_mode_protects_nothing_and_says_so(api, post, settings, is_async):
    def unprotected(request, amount: int):
        return pay(request, amount)

    async def unprotected_async(request, amount: int):
        return {}

    api.add_decorator(by_key)
    api.post("/pay", response={201: Paid})(unprotected_async if is_async else unprotected)
    with pytest.raises(ImproperlyConfigured, match='mode="view"'):
        post()
    assert effects() == 0
    (message,) = check_ninja_decorators(None)
    assert message.id == "django_idempotency.E079"
    assert "at /api/pay, is not protected" in message.msg


def test_a_function_behind_it_can_be_called_by_another(api, post):
    @by_key
    @api.post("/pay", response={201: Paid})
    def pay_once(request, amount: int):
        return pay(request, amount)

    @api.post("/twice", response={201: Paid})
    def twice(request, amount: int):
        return pay_once(request, amount)

    assert [is_replay(post()) for _ in range(2)] == [False, True]
    assert post(to="twice", key=None).status_code == 201
    assert check_ninja_decorators(None) == []
