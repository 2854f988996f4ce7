"""``@idempotent`` inside Django Ninja's operations: after Ninja's own checks, around
what it makes of a result.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from functools import cache

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.http import HttpRequest, HttpResponse
from django.urls import path
from django.views.decorators.cache import cache_control
from ninja import NinjaAPI, Router, Schema, Status
from ninja.decorators import decorate_view
from ninja.errors import HttpError
from ninja.security import APIKeyHeader
from ninja.streaming import JSONL

from django_idempotency.forms import idempotent_form
from django_idempotency.http.placement import idempotency_exempt, idempotent
from django_idempotency.models import IdempotencyRecord
from tests.support.callers import effects, is_replay
from tests.support.views import Runs, book, code

pytestmark = pytest.mark.filterwarnings("ignore:Returning tuple:DeprecationWarning")

KNOWN = {"right", "other"}


class ApiKey(APIKeyHeader):
    param_name = "X-API-Key"

    def authenticate(self, request, key):
        return key if key in KNOWN else None


class Paid(Schema):
    amount: int
    entry: str


class Refused(Schema):
    why: str


RESPONSES = {201: Paid, 402: Refused}
by_key = idempotent(scope=lambda request: request.auth)
by_key_leased = idempotent(scope=lambda request: request.auth, mode="lease")


@pytest.fixture
def api():
    return NinjaAPI(urls_namespace=uuid.uuid4().hex, docs_url=None)


@pytest.fixture
def post(call, settings, api):
    """POSTs to the API, behind the middleware."""
    mounted = cache(lambda: api.urls)

    def send(api_key="right", *, to="pay", query="amount=5", asgi=False, **options):
        settings.ROOT_URLCONF = (path("api/", mounted()),)
        sent = call.request(
            path=f"/api/{to}?{query}", headers={"X-API-Key": api_key}, **options
        )
        if not asgi:
            return call.client.generic(**sent)
        from asgiref.sync import async_to_sync
        from django.test import AsyncClient

        async def by_asgi():
            return await AsyncClient().generic(**sent)

        return async_to_sync(by_asgi)()

    return send


def paid(request, amount):
    return {"amount": amount, "entry": str(book(request).pk)}


def pay_once():
    """A function of its own: Ninja writes on it what operation it made of it."""

    def pay(request, amount: int):
        return 201, paid(request, amount)

    return pay


WAYS = {
    "a dict": lambda request, amount: paid(request, amount),
    "a status and a dict": lambda request, amount: (201, paid(request, amount)),
    "Status": lambda request, amount: Status(201, paid(request, amount)),
    "a schema": lambda request, amount: Paid(**paid(request, amount)),
    "a response": lambda request, amount: HttpResponse(
        str(paid(request, amount)), status=201
    ),
}


@pytest.mark.parametrize("answer", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("responses", [RESPONSES, {201: Paid}], ids=["several", "one"])
def test_a_view_returns_with_a_key_what_it_returns_without(
    api, post, answer, responses
):
    if answer in (WAYS["a dict"], WAYS["a schema"]):
        responses = {201: Paid}

    @api.post("/pay", auth=ApiKey(), response=responses)
    @by_key
    def pay(request, amount: int):
        return answer(request, amount)

    unkeyed, first, second = post(key=None), post(), post()
    assert [response.status_code for response in (unkeyed, first, second)] == [201] * 3
    assert (
        unkeyed.headers["Content-Type"]
        == first.headers["Content-Type"]
        == second.headers["Content-Type"]
    )
    assert (second.content, is_replay(first), is_replay(second), effects()) == (
        first.content,
        False,
        True,
        2,
    )


@pytest.mark.parametrize("asgi", [True, False], ids=["asgi", "wsgi"])
def test_an_async_operation_runs_once(api, post, asgi):
    @api.post("/pay", auth=ApiKey(), response=RESPONSES)
    @by_key_leased
    async def pay(request, amount: int):
        return 201, {"amount": amount, "entry": uuid.uuid4().hex}

    first, second = post(asgi=asgi), post(asgi=asgi)
    assert (first.status_code, second.content, is_replay(second)) == (
        201,
        first.content,
        True,
    )


@pytest.mark.parametrize(
    "protect", [by_key, lambda pay: pay], ids=["operation", "middleware"]
)
def test_a_replay_comes_after_ninjas_own_authentication(api, post, settings, protect):
    settings.IDEMPOTENCY = {"SCOPE": lambda request: request.auth}
    api.post("/pay", auth=ApiKey(), response=RESPONSES)(protect(pay_once()))
    first, second, refused = post(), post(), post("wrong")
    assert (first.status_code, second.content, is_replay(second), effects()) == (
        201,
        first.content,
        True,
        1,
    )
    assert (refused.status_code, is_replay(refused), b"entry" in refused.content) == (
        401,
        False,
        False,
    )


def test_a_router_that_is_mounted_twice_keeps_its_entry_points(api, post):
    router = Router()

    router.post("/pay", auth=ApiKey(), response=RESPONSES)(by_key(pay_once()))
    api.add_router("", router)
    NinjaAPI(urls_namespace=uuid.uuid4().hex, docs_url=None).add_router(
        "/again", router
    )
    assert [post().status_code for _ in range(2)] == [201, 201]
    assert effects() == 1


def test_headers_set_on_ninjas_response_are_replayed(api, post):
    @api.post("/pay", auth=ApiKey(), response=RESPONSES)
    @by_key
    def pay(request, response: HttpResponse, amount: int):
        response.headers["X-Paid"] = str(amount)
        return 201, paid(request, amount)

    assert [post().headers["X-Paid"] for _ in range(2)] == ["5", "5"]


def test_a_request_that_ninja_refuses_leaves_the_key_free(api, post):
    api.post("/pay", auth=ApiKey(), response=RESPONSES)(by_key(pay_once()))
    assert post(query="amount=x").status_code == 422
    assert not IdempotencyRecord.objects.exists()
    assert post().status_code == 201


@pytest.mark.parametrize(("status", "runs"), [(402, 1), (422, 2), (503, 2)])
@pytest.mark.parametrize("raised", [True, False], ids=["raised", "returned"])
def test_a_failure_is_treated_by_the_outcome_policy(api, post, status, runs, raised):
    seen = []

    @api.post("/pay", auth=ApiKey(), response={status: Refused})
    @by_key
    def pay(request, amount: int):
        seen.append(request)
        if raised:
            raise HttpError(status, "no")
        return status, {"why": "no"}

    first, second = post(), post()
    assert (first.status_code, second.status_code, first.content) == (
        status,
        status,
        second.content,
    )
    assert (is_replay(second), len(seen)) == (runs == 1, runs)


ENTRY_POINTS = {
    "middleware": lambda api, pay: api.post("/pay")(pay),
    "operation": lambda api, pay: api.post("/pay")(idempotent(pay)),
}


@pytest.mark.parametrize("mode", ["atomic", "lease"])
@pytest.mark.parametrize("protected", ENTRY_POINTS.values(), ids=ENTRY_POINTS)
def test_an_error_that_ninja_handles_undoes_nothing(
    api, post, settings, atomic_requests, protected, mode
):
    settings.IDEMPOTENCY = {"MODE": mode}

    def pay(request, amount: int):
        book(request)
        raise HttpError(422, "no")

    protected(api, pay)
    assert [(post(key=key).status_code, effects()) for key in (None, "k", "k")] == [
        (422, 1),
        (422, 2),
        (422, 3),
    ]


def test_a_result_that_ninja_cannot_render_undoes_the_effects(api, post):
    call_count = []

    @api.post("/pay", auth=ApiKey(), response={201: Paid})
    @by_key
    def pay(request, amount: int):
        call_count.append(book(request))
        return 201, {"amount": "no number"}

    for _ in range(2):
        with pytest.raises(Exception, match="validation error"):
            post()
    assert (len(call_count), effects()) == (2, 0)


def test_the_middleware_leaves_an_exempt_operation_alone(api, post):
    api.post("/pay", auth=ApiKey(), response=RESPONSES)(idempotency_exempt(pay_once()))

    @api.put("/pay")
    def replace(request):
        return uuid.uuid4().hex

    assert [is_replay(post()) for _ in range(2)] == [False, False]
    assert [is_replay(post(method="PUT")) for _ in range(2)] == [False, True]


@pytest.mark.parametrize("method", ["get", "put"])
def test_the_middleware_allows_a_stream_beside_an_operation(api, post, method):
    @getattr(api, method)("/pay", response=JSONL[Paid])
    def payments(request) -> Iterator[Paid]:
        yield Paid(amount=1, entry="")

    api.post("/pay", auth=ApiKey(), response=RESPONSES)(pay_once())
    assert [is_replay(post()) for _ in range(2)] == [False, True]
    if method == "put":
        with pytest.raises(ImproperlyConfigured, match="payments streams"):
            post(method="PUT")


def test_behind_the_middleware_its_own_policy_counts(api, post, settings):
    settings.IDEMPOTENCY = {"REQUIRED": True, "SCOPE": "public"}

    @api.post("/pay", auth=ApiKey(), response=RESPONSES)
    @by_key_leased
    def pay(request: HttpRequest, amount: int):
        return 201, paid(request, amount)

    assert post().status_code == 201
    record = IdempotencyRecord.objects.get()
    assert (record.scope, record.mode) == ("custom:right", "lease")
    assert code(post(key=None)) == "idempotency_key_missing"


def test_a_decorator_that_ninja_applies_below_it_is_kept(api, post):
    @api.post("/pay", auth=ApiKey(), response=RESPONSES)
    @by_key
    @decorate_view(cache_control(private=True))
    def pay(request: HttpRequest, amount: int):
        return 201, paid(request, amount)

    assert [post().headers["Cache-Control"] for _ in range(2)] == [
        "private",
        "no-store, private",
    ]


@pytest.mark.parametrize("decorator", [idempotent, idempotent_form])
@pytest.mark.parametrize(
    "decorate",
    [
        lambda api, decorator, pay: decorator(api.post("/pay")(pay)),
        lambda api, decorator, pay: api.post("/pay")(decorate_view(decorator)(pay)),
        lambda api, decorator, pay: (
            api.post("/pay")(pay),
            api.add_decorator(decorator, mode="view"),
            api.urls,
        ),
        lambda api, decorator, pay: (
            api.post("/pay")(pay),
            api.add_decorator(decorator),
            api.urls,
        ),
    ],
    ids=["above", "decorate_view", "add_decorator", "default mode"],
)
def test_an_entry_point_elsewhere_than_below_the_operation_is_refused(
    api, decorate, decorator
):
    with pytest.raises(ImproperlyConfigured, match=r"Put it below|Use @idempotent"):
        decorate(api, decorator, pay_once())


def test_a_form_is_not_an_operation_of_the_schema(api):
    """Callers who are not logged in would share the scope of forms, with keys of their
    own.
    """
    with pytest.raises(ImproperlyConfigured, match="Use @idempotent"):
        api.post("/pay")(idempotent_form(pay_once()))


def test_a_view_whose_operations_can_not_be_found_is_refused_before_it_is_replayed(
    call, monkeypatch
):
    """As that of a version of Ninja that builds its views in another way."""
    runs = Runs()
    monkeypatch.setattr(Runs.view, "__module__", "ninja.operation")
    with pytest.raises(ImproperlyConfigured, match="update it"):
        call(runs.view)
    assert runs.count == 0
