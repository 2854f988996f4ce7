"""``@idempotent`` inside Django Ninja's operations: after Ninja's own checks, around what it makes of a result."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from functools import cache, wraps

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.http import HttpRequest, HttpResponse
from django.urls import path
from ninja import NinjaAPI, Router, Schema, Status
from ninja.decorators import decorate_view
from ninja.errors import HttpError
from ninja.security import APIKeyHeader
from ninja.streaming import JSONL

from django_idempotency.decorators import idempotency_exempt, idempotent
from django_idempotency.forms import idempotent_form
from django_idempotency.models import IdempotencyRecord
from tests.support.callers import effects, is_replay
from tests.support.checks import found
from tests.support.views import book, code

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
        sent = call.request(path=f"/api/{to}?{query}", headers={"X-API-Key": api_key}, **options)
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
    "a response": lambda request, amount: HttpResponse(str(paid(request, amount)), status=201),
}


@pytest.mark.parametrize("answer", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("responses", [RESPONSES, {201: Paid}], ids=["several", "one"])
def test_a_view_returns_with_a_key_what_it_returns_without(api, post, answer, responses):
    if answer in (WAYS["a dict"], WAYS["a schema"]):
        responses = {201: Paid}

    @api.post("/pay", auth=ApiKey(), response=responses)
    @by_key
    def pay(request, amount: int):
        return answer(request, amount)

    unkeyed, first, second = post(key=None), post(), post()
    assert [response.status_code for response in (unkeyed, first, second)] == [201] * 3
    assert unkeyed.headers["Content-Type"] == first.headers["Content-Type"] == second.headers["Content-Type"]
    assert (second.content, is_replay(first), is_replay(second), effects()) == (first.content, False, True, 2)


@pytest.mark.parametrize("asgi", [True, False], ids=["asgi", "wsgi"])
def test_an_async_operation_runs_once(api, post, asgi):
    @api.post("/pay", auth=ApiKey(), response=RESPONSES)
    @by_key_leased
    async def pay(request, amount: int):
        return 201, {"amount": amount, "entry": uuid.uuid4().hex}

    first, second = post(asgi=asgi), post(asgi=asgi)
    assert (first.status_code, second.content, is_replay(second)) == (201, first.content, True)


def test_an_error_of_an_async_operation_is_stored_as_ninja_renders_it(api, post):
    @api.post("/pay", auth=ApiKey(), response=RESPONSES)
    @by_key_leased
    async def pay(request, amount: int):
        raise HttpError(402, "no")

    first, second = post(), post()
    assert (first.status_code, second.content, is_replay(second)) == (402, first.content, True)


def test_a_replay_comes_after_ninjas_own_authentication(api, post):
    api.post("/pay", auth=ApiKey(), response=RESPONSES)(by_key(pay_once()))
    assert post().status_code == 201
    refused = post("wrong")
    assert (refused.status_code, is_replay(refused), b"entry" in refused.content) == (401, False, False)


def test_a_router_that_is_mounted_twice_keeps_its_entry_points(api, post):
    router = Router()

    router.post("/pay", auth=ApiKey(), response=RESPONSES)(by_key(pay_once()))
    api.add_router("", router)
    NinjaAPI(urls_namespace=uuid.uuid4().hex, docs_url=None).add_router("/again", router)
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
    assert (first.status_code, second.status_code, first.content) == (status, status, second.content)
    assert (is_replay(second), len(seen)) == (runs == 1, runs)


ENTRY_POINTS = {
    "middleware": lambda api, pay: api.post("/pay")(pay),
    "operation": lambda api, pay: api.post("/pay")(idempotent(pay)),
    "decorate_view": lambda api, pay: api.post("/pay")(decorate_view(idempotent)(pay)),
    "API": lambda api, pay: (api.add_decorator(idempotent, mode="view"), api.post("/pay")(pay)),
}


@pytest.mark.parametrize("mode", ["atomic", "lease"])
@pytest.mark.parametrize("protected", ENTRY_POINTS.values(), ids=ENTRY_POINTS)
def test_an_error_that_ninja_handles_undoes_nothing(api, post, settings, atomic_requests, protected, mode):
    settings.IDEMPOTENCY = {"MODE": mode}

    def pay(request, amount: int):
        book(request)
        raise HttpError(422, "no")

    protected(api, pay)
    assert [(post(key=key).status_code, effects()) for key in (None, "k", "k")] == [(422, 1), (422, 2), (422, 3)]


def test_an_error_unhandled_by_ninja_releases_the_key(api, post, call):
    @api.post("/pay", auth=ApiKey())
    @by_key
    def pay(request, amount: int):
        raise LookupError

    for _ in range(2):
        with pytest.raises(LookupError):
            post()
    assert IdempotencyRecord.objects.get().attempts == 2


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


FORMS = {
    "below": lambda api, pay: api.post("/pay")(idempotent_form(pay)),
    "above": lambda api, pay: idempotent_form(api.post("/pay")(pay)),
    "decorate_view": lambda api, pay: api.post("/pay")(decorate_view(idempotent_form)(pay)),
}


@pytest.mark.parametrize("decorate", FORMS.values(), ids=FORMS)
def test_a_form_is_no_operation(api, decorate):
    """Callers who are not logged in would share the scope of forms, with keys of their own."""

    def pay(request):
        return {}

    with pytest.raises(ImproperlyConfigured, match="Use @idempotent"):
        decorate(api, pay)


def test_the_middleware_puts_an_entry_point_inside_an_operation(api, post, settings):
    settings.IDEMPOTENCY = {"SCOPE": lambda request: request.auth}

    api.post("/pay", auth=ApiKey(), response=RESPONSES)(pay_once())
    first, second = post(), post()
    assert (first.status_code, second.content, is_replay(second), effects()) == (201, first.content, True, 1)
    refused = post("wrong")
    assert (refused.status_code, is_replay(refused)) == (401, False)


def test_the_middleware_leaves_an_exempt_operation_alone(api, post):
    api.post("/pay", auth=ApiKey(), response=RESPONSES)(idempotency_exempt(pay_once()))

    @api.put("/pay")
    def replace(request):
        return uuid.uuid4().hex

    assert [is_replay(post()) for _ in range(2)] == [False, False]
    assert [is_replay(post(method="PUT")) for _ in range(2)] == [False, True]


@pytest.mark.parametrize("method", ["get", "put"])
def test_a_stream_beside_an_operation_is_no_obstacle_to_the_middleware(api, post, method):
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


def protecting(router, **options):
    router.add_decorator(idempotent(scope=lambda request: request.auth, **options), mode="view")


@pytest.fixture
def without_middleware(settings):
    settings.MIDDLEWARE = [each for each in settings.MIDDLEWARE if not each.endswith("IdempotencyMiddleware")]


def pay(request, amount: int):
    return Status(201, paid(request, amount))


@pytest.mark.usefixtures("without_middleware")
def test_add_decorator_protects_every_operation_of_an_api(api, post):
    protecting(api)
    api.post("/pay", auth=ApiKey(), response={201: Paid})(pay)
    api.put("/pay", auth=ApiKey(), response={201: Paid})(pay)
    first, second = post(), post()
    assert (first.status_code, first.json()["amount"], is_replay(first)) == (201, 5, False), "rendered by Ninja"
    assert (second.content, is_replay(second), effects()) == (first.content, True, 1)
    assert [is_replay(post(method="PUT", key="put")) for _ in range(2)] == [False, True]


@pytest.mark.usefixtures("without_middleware")
def test_a_routers_line_protects_its_operations_alone(api, post):
    router = Router()
    protecting(router)
    router.post("/pay", auth=ApiKey(), response={201: Paid})(pay)
    api.post("/free", auth=ApiKey(), response={201: Paid})(pay)
    api.add_router("", router)
    assert [is_replay(post()) for _ in range(2)] == [False, True]
    assert [is_replay(post(to="free")) for _ in range(2)] == [False, False]


@pytest.mark.usefixtures("without_middleware")
def test_the_narrowest_line_counts(api, post):
    router = Router()
    protecting(api)
    protecting(router, required=True)
    router.post("/pay", auth=ApiKey(), response={201: Paid})(pay)
    api.add_router("", router)

    @api.post("/own", auth=ApiKey(), response={201: Paid})
    @idempotent(scope="public")
    def own(request, amount: int):
        return pay(request, amount)

    assert code(post(key=None)) == "idempotency_key_missing"
    assert post(to="own").status_code == 201
    assert IdempotencyRecord.objects.get().scope == "public"


@pytest.mark.usefixtures("without_middleware")
def test_a_router_in_two_apis_has_the_decorator_of_each(api, post):
    router, other = Router(), NinjaAPI(urls_namespace=uuid.uuid4().hex, docs_url=None)
    router.post("/pay", auth=ApiKey(), response={201: Paid})(pay)
    protecting(other, required=True)
    protecting(api)
    other.add_router("", router)
    assert other.urls
    api.add_router("", router)
    assert [is_replay(post()) for _ in range(2)] == [False, True]
    assert post(key=None).status_code == 201


@pytest.mark.usefixtures("without_middleware")
def test_an_exempt_operation_is_left_alone(api, post):
    protecting(api)

    api.post("/pay", auth=ApiKey(), response={201: Paid})(idempotency_exempt(pay_once()))
    assert [is_replay(post()) for _ in range(2)] == [False, False]


@pytest.mark.parametrize("method", ["post", "get"])
def test_a_stream_is_refused_for_methods_that_take_keys(api, method):
    @getattr(api, method)("/items", response=JSONL[Paid])
    def items(request) -> Iterator[Paid]:
        yield Paid(amount=1, entry="")

    protecting(api)
    if method == "get":
        assert api.urls
    else:
        with pytest.raises(ImproperlyConfigured, match="idempotency_exempt leaves it out"):
            _ = api.urls


@pytest.mark.usefixtures("without_middleware")
def test_an_async_operation_is_in_lease_mode(api, post):
    @api.post("/pay", auth=ApiKey(), response={201: Paid})
    async def pay_async(request, amount: int):
        return Status(201, {"amount": amount, "entry": uuid.uuid4().hex})

    protecting(api)
    first, second = post(), post()
    assert (first.status_code, second.content, is_replay(second)) == (201, first.content, True)
    assert IdempotencyRecord.objects.get().mode == "lease"


def test_a_decorator_between_two_lines_is_refused(api):
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


@pytest.mark.parametrize("way", ["above the operation", "default mode"])
@pytest.mark.parametrize("is_async", [False, True])
def test_an_entry_point_that_ninja_would_render_outside_of_is_refused(api, is_async, way):
    async def pay_async(request, amount: int):
        return {}

    function = api.post("/pay")(pay_async if is_async else lambda request: {})
    api.add_decorator(idempotent)
    with pytest.raises(ImproperlyConfigured, match='mode="view"'):
        _ = idempotent(function) if way == "above the operation" else api.urls


@pytest.fixture
def old_ninja(monkeypatch):
    monkeypatch.setattr("django_idempotency.http.ninja.path_view", lambda view: None)


@pytest.mark.usefixtures("old_ninja")
def test_w021_a_replay_before_ninjas_authentication(api, post, settings):
    @api.post("/pay", auth=ApiKey())
    def pay(request, amount: int):
        return paid(request, amount)

    @api.get("/paid/{int:number}", auth=ApiKey())
    def paid_before(request, number: int):
        return {}

    settings.IDEMPOTENCY = {"SCOPE": "public"}
    first, leaked = post("right"), post("wrong")
    assert (leaked.status_code, leaked.content, is_replay(leaked)) == (200, first.content, True), "what it is about"
    (message,) = found("W021")
    assert message.msg.startswith("/api/pay is a view of Django Ninja")
    assert "EXEMPT_PATHS" in message.hint
    settings.IDEMPOTENCY = {"SCOPE": "public", "EXEMPT_PATHS": ["^/api/"]}
    assert found("W021") == []
    settings.IDEMPOTENCY = {"SCOPE": "public", "METHODS": ["PUT"]}
    assert found("W021") == []
    settings.IDEMPOTENCY, settings.MIDDLEWARE = {}, []
    assert found("W021") == []


@pytest.mark.usefixtures("old_ninja")
@pytest.mark.parametrize("method", ["post", "put"])
def test_w021_reports_an_async_operation(api, settings, method):
    @getattr(api, method)("/pay", auth=ApiKey())
    async def pay(request, amount: int):
        return {}

    settings.IDEMPOTENCY = {}
    settings.ROOT_URLCONF = (path("api/", api.urls),)
    assert [message.id for message in found("W021")] == ["django_idempotency.W021"]
