"""What a caller sees of an operation, by the id of its record and by its key: as much
as a retry would get, and nothing of anybody else's.
"""

from __future__ import annotations

import random
from base64 import b64encode
from functools import partial, wraps
from uuid import uuid4

import pytest
from django.contrib.auth import get_user_model
from django.contrib.auth.decorators import login_required, permission_required
from django.contrib.auth.models import Permission
from django.core.exceptions import ImproperlyConfigured
from django.http import HttpResponse, StreamingHttpResponse
from django.test import AsyncClient, Client
from django.urls import path
from django.views import View

from django_idempotency import Body, Hold, Lease, Policy, idempotent, signals
from django_idempotency.contrib.operations.status import OperationStatus
from django_idempotency.http.placement import idempotency_exempt
from django_idempotency.maintenance.privacy import erase
from django_idempotency.models import IdempotencyRecord
from django_idempotency.stores.database import ahead
from tests.support.callers import heard, is_replay
from tests.support.views import Runs, api_class, code

pytestmark = pytest.mark.usefixtures("transactional_db")
OURS = "django_idempotency.middleware.IdempotencyMiddleware"
ADD = "testproject.add_ledgerentry"
lease = partial(idempotent, mode="lease")


def answer(request):
    return HttpResponse(b'{"id": 7}', status=201, content_type="application/json")


def function(runs, **policy):
    return permission_required(ADD, raise_exception=True)(
        idempotent(**policy)(runs.view)
    )


class MayAdd:
    def has_permission(self, request, view):
        return request.user.has_perm(ADD)


def of_rest_framework(runs, **policy):
    from rest_framework.authentication import SessionAuthentication

    view = api_class(
        runs.view,
        authentication_classes=[SessionAuthentication],
        permission_classes=[MayAdd],
    )
    return idempotent(**policy)(view).as_view()


def of_a_class(runs, **policy):
    view = type("Pay", (View,), {"post": lambda _view, request: runs.view(request)})
    return permission_required(ADD)(idempotent(**policy)(view).as_view())


def async_function(runs, **policy):
    return permission_required(ADD)(lease(**policy)(runs.aview))


def covered(runs):
    return permission_required(ADD)(runs.view)


VIEWS = {
    "function": function,
    "class": of_a_class,
    "async function": async_function,
    "covered": covered,
    "REST framework": pytest.param(of_rest_framework, marks=pytest.mark.drf),
}
each_view = pytest.mark.parametrize("make", VIEWS.values(), ids=VIEWS.keys())


def rest_framework_status():
    from rest_framework.authentication import SessionAuthentication
    from rest_framework.views import APIView

    of_session = {"authentication_classes": [SessionAuthentication]}
    return type("Status", (OperationStatus, APIView), of_session).as_view()


each_status = pytest.mark.parametrize(
    "status_view",
    ["plain", pytest.param("REST framework", marks=pytest.mark.drf)],
    indirect=True,
)


@pytest.fixture
def status_view(request):
    is_plain = getattr(request, "param", "plain") == "plain"
    return OperationStatus.as_view() if is_plain else rest_framework_status()


@pytest.fixture
def runs():
    return Runs(answer)


def user(name, *permissions):
    made = get_user_model().objects.create_user(name)
    allow(made, *permissions)
    return made


def allow(someone, *permissions):
    codenames = [each.partition(".")[2] for each in permissions]
    someone.user_permissions.set(Permission.objects.filter(codename__in=codenames))


def signed_in(someone, make=Client, **options):
    client = make(**options)
    client.force_login(someone)
    return client


@pytest.fixture
def alice():
    return user("alice", ADD)


@pytest.fixture
def client(alice):
    return signed_in(alice)


@pytest.fixture
def serve(settings, status_view):
    """Serve a view at ``/pay/``, beside the status of its operations."""
    settings.MIDDLEWARE = [each for each in settings.MIDDLEWARE if each != OURS] + [
        OURS
    ]

    def serve(view, status=status_view):
        settings.ROOT_URLCONF = (
            path("pay/", view),
            path("operations/", status),
            path("operations/<uuid:id>/", status),
        )

    return serve


def pay(client, key="k", **options):
    return client.post("/pay/", **options, headers={"Idempotency-Key": key})


def by_key(client, key="k"):
    return client.get("/operations/", headers={"Idempotency-Key": key})


def by_id(client, id=None):
    return client.get(f"/operations/{id or record().pk}/")


def record():
    return IdempotencyRecord.objects.get()


def gone(response):
    return response.status_code == 404


def both(client):
    """The status by key, which is the same by id."""
    shown, same = by_key(client), by_id(client)
    assert (shown.status_code, shown.content) == (same.status_code, same.content)
    return shown


def receipt(client):
    shown = both(client)
    assert shown.status_code == 200, shown.content
    assert shown.headers["Cache-Control"] == "no-store"
    return shown.json()


STORED = {"status": 201, "content_type": "application/json", "body": '{"id": 7}'}


@each_status
@each_view
def test_a_finished_key_has_its_response(serve, runs, client, make):
    serve(make(runs))
    assert pay(client).status_code == 201
    assert receipt(client) == {
        "id": str(record().pk),
        "status": "succeeded",
        "attempt": 1,
        "response": STORED,
    }
    assert runs.count == 1
    assert is_replay(pay(client)), "the key is as it was"


@each_view
def test_status_by_way_of_asgi(serve, runs, alice, client, make):
    serve(make(runs))
    pay(client)
    from asgiref.sync import async_to_sync

    sender = signed_in(alice, AsyncClient)
    shown = async_to_sync(sender.get)(f"/operations/{record().pk}/")
    assert shown.json()["response"] == STORED
    assert runs.count == 1


@each_status
@each_view
def test_a_permission_that_was_revoked(serve, runs, alice, client, make):
    serve(make(runs))
    pay(client)
    allow(alice)
    assert gone(both(client))
    allow(alice, ADD)
    assert receipt(client)["response"] == STORED


@each_status
@each_view
def test_two_people_see_nothing_of_each_other(serve, runs, alice, client, make):
    serve(make(runs))
    clients = {"alice": client, "bob": signed_in(user("bob", ADD))}
    ids = {}
    for name, of in clients.items():
        for key in range(5):
            pay(of, f"{name}-{key}")
        owned = IdempotencyRecord.objects.filter(key__startswith=name)
        ids[name] = list(owned.values_list("pk", flat=True))
    unknown = {by_key(client, "unknown").content, by_id(client, uuid4()).content}
    for attempt in range(100):
        name, other = random.sample(["alice", "bob"], 2)
        if attempt % 2:
            refused = by_id(clients[name], random.choice(ids[other]))
        else:
            refused = by_key(clients[name], f"{other}-{attempt % 5}")
        assert gone(refused)
        unknown.add(refused.content)
    assert len(unknown) == 1, "all refusals are the same"
    assert by_id(clients["bob"], ids["bob"][0]).status_code == 200


def test_nobody_in_particular(serve, runs, client):
    serve(function(runs))
    pay(client)
    assert gone(both(Client()))


@pytest.mark.parametrize("by", ["path", "id"])
def test_another_users_view_of_the_same_scope(serve, runs, by):
    """A tenant's key, and a view that lets in only some of its users."""
    scoped = Policy(scope=lambda request: request.user.is_authenticated and "acme")
    serve(
        function(runs, policy=scoped.derive(scope_path=by == "path")),
        OperationStatus.as_view(policy=scoped),
    )
    pay(signed_in(user("carol", ADD)))
    stranger, colleague = user("dora"), user("erin", ADD)
    assert gone(by_id(signed_in(stranger)))
    assert by_id(signed_in(colleague)).json()["response"] == STORED
    assert gone(by_key(signed_in(colleague))) == (by == "path")


@pytest.mark.parametrize("mode", ["atomic", "lease"])
def test_may_replay_decides(serve, runs, client, mode):
    asked = []

    def may_replay(request, of):
        asked.append((request.user.username, of.method, of.path, of.key))
        return len(asked) == 1

    serve(function(runs, may_replay=may_replay, mode=mode))
    pay(client)
    assert by_key(client).status_code == 200
    assert gone(both(client))
    assert asked == [("alice", "POST", "/pay/", "k")] * 3


def test_a_hundred_attempts_of_a_colleague_whom_may_replay_refuses(serve, runs):
    """In a scope that they share."""
    scoped = Policy(scope=lambda request: request.user.is_authenticated and "acme")
    own = scoped.derive(may_replay=lambda request, _of: request.user.username != "erin")
    serve(function(runs, policy=own), OperationStatus.as_view(policy=scoped))
    carol, erin = (signed_in(user(name, ADD)) for name in ("carol", "erin"))
    unknown = by_id(erin, uuid4())
    for number in range(50):
        pay(carol, f"k-{number}")
        ids = IdempotencyRecord.objects.filter(key=f"k-{number}")
        for refused in (by_key(erin, f"k-{number}"), by_id(erin, ids.get().pk)):
            assert (refused.status_code, refused.content) == (404, unknown.content)
    assert by_key(carol, "k-49").json()["response"] == STORED


def test_a_running_key(serve, client):
    seen = []

    def running(request):
        seen.append(receipt(client))
        return HttpResponse("done")

    serve(lease()(running))
    assert pay(client).content == b"done"
    assert seen[0]["status"] == "running"
    assert seen[0]["response"] is None
    assert receipt(client)["response"]["body"] == "done"


def test_a_running_key_says_when_to_ask_again(serve, client):
    seen = []
    serve(lease()(lambda request: seen.append(by_key(client)) or HttpResponse()))
    pay(client)
    assert int(seen[0].headers["Retry-After"]) >= 1


def test_a_key_on_hold(serve, client):
    def view(request):
        raise Hold("ask the bank")

    serve(lease()(view))
    pay(client)
    shown = receipt(client)
    assert (shown["status"], shown["response"]) == ("on_hold", None)


@pytest.mark.parametrize(
    ("status", "stored"), [(409, {"status": 409, "body": "no"}), (500, None)]
)
def test_a_failed_key(serve, client, status, stored):
    serve(idempotent(lambda request: HttpResponse("no", status=status)))
    client.raise_request_exception = False
    pay(client)
    shown = receipt(client)
    assert shown["status"] == "failed"
    assert (shown["response"] is None) == (stored is None)
    assert (stored or {}).items() <= (shown["response"] or {}).items()


@pytest.mark.parametrize(
    "respond",
    [
        lambda request: StreamingHttpResponse([b"a"], content_type="text/csv"),
        lambda request: HttpResponse(b"x" * 100),
    ],
    ids=["streaming", "oversized"],
)
def test_a_response_without_a_stored_body(serve, client, respond):
    serve(idempotent(body=Body(limit=10))(respond))
    pay(client)
    assert receipt(client)["response"] == {
        "status": 200,
        "content_type": None,
        "body": None,
    }


def test_a_body_that_is_not_text(serve, client):
    serve(idempotent(lambda request: HttpResponse(b"\xff\x00")))
    pay(client)
    assert receipt(client)["response"]["body_base64"] == "/wA="


@pytest.mark.cryptography
def test_an_encrypted_body(serve, runs, client, settings):
    settings.IDEMPOTENCY = {"ENCRYPTION_KEYS": [b64encode(bytes(32)).decode()]}
    serve(function(runs, body=Body(encrypt="require")))
    pay(client)
    # two letters alone are in one of a thousand ciphertexts
    assert STORED["body"].encode() not in bytes(record().response_body)
    assert receipt(client)["response"] == STORED


def test_an_expired_key(serve, runs, client):
    serve(function(runs, audit_retention=10**6))
    pay(client)
    IdempotencyRecord.objects.update(expires_at=ahead(-1))
    assert gone(both(client))


@pytest.mark.parametrize("bodies", [True, False])
def test_an_erased_key(serve, runs, client, bodies):
    serve(function(runs))
    pay(client)
    id = record().pk
    assert erase(key="k", bodies=bodies).done
    assert gone(by_key(client))
    assert gone(by_id(client, id))


@each_status
def test_other_methods(serve, runs, client):
    serve(function(runs))
    pay(client)
    for method in ("post", "put", "patch", "delete", "options"):
        refused = getattr(client, method)(f"/operations/{record().pk}/")
        assert refused.status_code == 405
    assert client.head(f"/operations/{record().pk}/").status_code == 200
    assert runs.count == 1


@pytest.mark.parametrize("headers", [{}, {"Idempotency-Key": ""}])
def test_a_request_without_a_usable_key(serve, runs, client, headers):
    serve(function(runs))
    assert client.get("/operations/", headers=headers).status_code == 400


# --- The view is asked, and never run -------------------------------------------------


def test_a_view_that_lost_its_entry_point(serve, runs, client):
    serve(function(runs))
    pay(client)
    serve(idempotency_exempt(lambda request: runs.view(request)))
    assert gone(both(client))
    assert runs.count == 1


def test_a_key_that_is_used_again_meanwhile(serve, runs, client):
    """The response is then that of another view, perhaps, which was not asked."""
    protected = idempotent(runs.view)

    @wraps(protected)
    def slow(request):
        IdempotencyRecord.objects.update(created_at=ahead(1))
        return protected(request)

    serve(slow)
    pay(client)
    assert gone(both(client))


def test_a_path_that_is_gone(serve, runs, client, settings):
    serve(function(runs))
    pay(client)
    id = record().pk
    settings.ROOT_URLCONF = settings.ROOT_URLCONF[1:]
    assert gone(by_id(client, id))


def test_a_method_that_is_gone(serve, runs, client):
    serve(function(runs))
    pay(client)
    get = type("Pay", (View,), {"get": lambda _view, request: runs.view(request)})
    serve(idempotent(get).as_view())
    assert gone(both(client))
    assert runs.count == 1


def test_a_method_that_needs_no_key_any_more(serve, runs, client):
    serve(function(runs))
    pay(client)
    serve(function(runs, methods={"PUT"}))
    assert receipt(client)["response"] == STORED
    assert runs.count == 1


def reading(get_response):
    """A middleware that reads the body of each request, which these have none of."""

    def respond(request):
        _ = request.body, request.POST
        return get_response(request)

    return respond


@each_status
@pytest.mark.parametrize("read", ["body", "POST"])
@pytest.mark.parametrize("middleware", [[], [f"{__name__}.reading"]])
def test_a_check_that_reads_the_body(serve, runs, client, read, middleware, settings):
    """A retry would have to send the body."""
    protected = idempotent(runs.view)

    @wraps(protected)
    def checked(request):
        getattr(request, read)
        return protected(request)

    serve(checked)
    settings.MIDDLEWARE += middleware
    pay(client, data={"amount": 1})
    assert gone(both(client))


def test_a_check_of_the_query_sees_none(serve, runs, client):
    protected = idempotent(runs.view)

    @wraps(protected)
    def checked(request):
        asked = request.GET.get("ask") or request.META["QUERY_STRING"]
        return protected(request) if asked else HttpResponse(status=403)

    serve(checked)
    client.post("/pay/?ask=1", headers={"Idempotency-Key": "k"})
    assert runs.count == 1
    assert gone(client.get(f"/operations/{record().pk}/?ask=1"))


@pytest.mark.drf
def test_a_permission_that_reads_the_data(serve, runs, client):
    class Small:
        def has_permission(self, request, view):
            return request.data.get("amount", 0) < 10

    from rest_framework.authentication import SessionAuthentication

    view = api_class(
        runs.view,
        authentication_classes=[SessionAuthentication],
        permission_classes=[Small],
    )
    serve(idempotent(view).as_view())
    pay(client, data={"amount": 1}, content_type="application/json")
    assert gone(both(client))


@pytest.mark.ninja
def test_an_operation_that_streams_now(serve, runs, client):
    """It refuses keys, and must not take this for a request without one."""
    from ninja import NinjaAPI
    from ninja.streaming import JSONL

    serve(function(runs))
    pay(client)
    api = NinjaAPI()

    @api.post("", response=JSONL[int])
    @idempotent
    def pay_in_parts(request):
        runs.view(request)
        return iter(range(2))

    serve(api.urls)
    with pytest.raises(ImproperlyConfigured, match="streams"):
        by_id(client)
    assert runs.count == 1


@pytest.mark.drf
def test_a_throttled_caller_is_told_when_to_ask_again(serve, runs, client):
    class Never:
        def allow_request(self, request, view):
            return not runs.count

        def wait(self):
            return 7

    from rest_framework.authentication import SessionAuthentication

    view = api_class(
        runs.view,
        authentication_classes=[SessionAuthentication],
        throttle_classes=[Never],
    )
    serve(idempotent(view).as_view())
    pay(client)
    assert (both(client).status_code, both(client).headers["Retry-After"]) == (429, "7")
    assert gone(by_id(signed_in(user("bob"))))


@pytest.mark.drf
@pytest.mark.parametrize("check", [login_required, lambda view: view])
def test_a_caller_whom_only_the_status_view_knows(serve, runs, alice, client, check):
    """A plain view knows nothing of REST framework's tokens, and would refuse."""
    from rest_framework.authentication import TokenAuthentication
    from rest_framework.authtoken.models import Token
    from rest_framework.views import APIView

    of_token = {"authentication_classes": [TokenAuthentication]}
    status = type("Status", (OperationStatus, APIView), of_token).as_view()
    serve(check(idempotent(runs.view)), status)
    pay(client)
    token = f"Token {Token.objects.create(user=alice).key}"
    path = f"/operations/{record().pk}/"
    assert gone(Client().get(path, headers={"Authorization": token}))


@pytest.mark.drf
@pytest.mark.parametrize("by_middleware", [True, False])
def test_cross_site_checks_are_for_requests_that_run(
    serve, runs, alice, client, settings, by_middleware
):
    serve(of_rest_framework(runs))
    pay(client)
    if not by_middleware:
        csrf = "django.middleware.csrf.CsrfViewMiddleware"
        settings.MIDDLEWARE = [each for each in settings.MIDDLEWARE if each != csrf]
    careful = signed_in(alice, enforce_csrf_checks=True)
    assert pay(careful).status_code == 403
    assert receipt(careful)["response"] == STORED


def test_a_decorator_that_changes_the_response(serve, runs, client):
    def redacting(view):
        def wrapped(request):
            response = view(request)
            response.content = b"redacted"
            return response

        wrapped.__wrapped__ = view
        return wrapped

    serve(redacting(idempotent(runs.view)))
    pay(client)
    assert receipt(client)["response"]["body"] == "redacted"


def test_a_decorator_that_refuses_the_response(serve, runs, client):
    """As one that asks, afterwards, who may see it."""

    def refusing(view):
        @wraps(view)
        def wrapped(request):
            response = view(request)
            return response if not is_replay(response) else HttpResponse(status=403)

        return wrapped

    serve(refusing(idempotent(runs.view)))
    pay(client)
    assert gone(both(client))


def test_a_receipt_is_counted_as_a_replay_and_as_nothing_else(serve, runs, client):
    serve(function(runs))
    pay(client)
    with (
        heard(signals.response_replayed) as replayed,
        heard(signals.request_rejected) as rejected,
        heard(signals.request_unprotected) as unprotected,
        heard(signals.key_claimed) as claimed,
    ):
        by_key(client)
        by_key(client, "unknown")
    assert len(replayed) == 1
    assert not rejected + unprotected + claimed


def test_a_project_below_a_prefix(serve, runs, client):
    serve(function(runs))
    below = {"SCRIPT_NAME": "/shop"}
    client.post("/pay/", headers={"Idempotency-Key": "k"}, **below)
    assert record().path == "/shop/pay/"
    assert (
        client.get(f"/operations/{record().pk}/", **below).json()["response"] == STORED
    )


@each_status
@pytest.mark.usefixtures("atomic_requests")
def test_with_and_without_transactions_of_requests(serve, runs, client):
    serve(function(runs))
    pay(client)
    assert receipt(client)["response"] == STORED


def test_a_key_of_the_same_digest(serve, runs, client):
    serve(function(runs))
    pay(client)
    IdempotencyRecord.objects.update(key="other")
    assert gone(by_key(client))


@pytest.mark.row_locks
def test_the_store_can_not_be_reached(serve, runs, proxy):
    policy = Policy(scope=lambda request: "acme")
    serve(idempotent(policy=policy)(runs.view), OperationStatus.as_view(policy=policy))
    pay(Client())
    assert by_key(Client()).status_code == 200
    proxy.go_away()
    refused = by_key(Client())
    assert (refused.status_code, code(refused)) == (
        503,
        "idempotency_store_unavailable",
    )


# --- Configurations that are refused --------------------------------------------------


def test_a_public_scope_is_refused(settings, rf):
    with pytest.raises(ImproperlyConfigured, match='scope="public"'):
        OperationStatus.as_view(policy=Policy(scope="public"))(rf.get("/"))
    settings.IDEMPOTENCY = {"SCOPE": "public"}
    with pytest.raises(ImproperlyConfigured, match='scope="public"'):
        OperationStatus.as_view()(rf.get("/"))


@pytest.mark.parametrize("alice_signed_in", [True, False])
def test_a_record_of_a_public_scope(serve, runs, client, alice_signed_in):
    serve(idempotent(scope="public")(runs.view))
    pay(client)
    assert gone(both(client if alice_signed_in else Client()))


@pytest.mark.redis
def test_a_store_outside_the_database_is_refused(settings, rf):
    settings.IDEMPOTENCY = {
        "STORES": {
            "redis": {
                "BACKEND": "django_idempotency.contrib.redis.RedisStore",
                "OPTIONS": {"url": "redis://127.0.0.1:1/0"},
            }
        }
    }
    with pytest.raises(ImproperlyConfigured, match="does not keep the path"):
        OperationStatus.as_view(policy=Policy(store="redis", mode=Lease()))(rf.get("/"))
