"""Callers who are no ``request.user``: those with API keys, or tokens without a user,
and anonymous ones.
"""

from __future__ import annotations

import logging
import time
import uuid
from types import SimpleNamespace

import pytest
from django.contrib.auth.models import AnonymousUser, User
from django.contrib.auth.views import LoginView
from django.core.exceptions import ImproperlyConfigured
from django.urls import path

from django_idempotency.http.placement import idempotent
from django_idempotency.models import IdempotencyRecord
from django_idempotency.reporting import logs
from django_idempotency.values.scopes import caller_scope
from testproject.models import LedgerEntry
from tests.support.callers import is_replay
from tests.support.views import Runs, code

CLAIMS = {"iss": "https://id.example", "sub": "7", "exp": 1, "jti": "a"}
OF_CLAIMS = "jwt:https%3A%2F%2Fid.example:7"
SECRET = "eyJhbGciOiJIUzI1NiJ9.e30"


@pytest.fixture
def warnings(caplog):
    """The messages about callers without a scope."""
    caplog.set_level(logging.WARNING, "django_idempotency")
    return lambda: [
        f"{entry.getMessage()} {entry.view}"
        for entry in caplog.records
        if getattr(entry, "event", "") == "scope_missing"
    ]


@pytest.mark.parametrize(
    ("auth", "scope"),
    [
        (User(pk=7), "auth.user:7"),
        (SimpleNamespace(pk="secret", user=User(pk=7)), "auth.user:7"),
        (CLAIMS, OF_CLAIMS),
        (CLAIMS | {"exp": 2, "jti": "renewed"}, OF_CLAIMS),
        ({"iss": "https://id.example:7", "sub": ""}, None),
        ({"iss": "", "sub": "7"}, None),
        ({"sub": "7"}, None),
        ({"iss": "https://id.example", "sub": 7}, None),
        (SECRET, None),
        (True, None),
        (None, None),
        (LedgerEntry(pk=7), None),
        (SimpleNamespace(pk=SECRET, user=None), None),
        (SimpleNamespace(pk=SECRET, user=AnonymousUser()), None),
    ],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.parametrize("user", [None, AnonymousUser()])
def test_the_scope_of_a_caller_without_a_user_outlives_its_token(user, auth, scope):
    assert caller_scope(SimpleNamespace(user=user, auth=auth), "default") == scope
    assert (
        caller_scope(SimpleNamespace(user=User(pk=8), auth=auth), "default")
        == "auth.user:8"
    ), "a user comes first"


def test_issuer_and_subject_are_kept_apart():
    pairs = [("a", "b:c"), ("a:b", "c"), ("a%3Ab", "c"), ("a", "b%3Ac")]
    scopes = {
        caller_scope(SimpleNamespace(auth={"iss": iss, "sub": sub}), "default")
        for iss, sub in pairs
    }
    assert len(scopes) == len(pairs)


@pytest.fixture
def pay_with_ninja(call, settings):
    from ninja import NinjaAPI
    from ninja.security import APIKeyHeader

    class ApiKey(APIKeyHeader):
        param_name = "X-API-Key"

        def authenticate(self, request, key):
            return {
                "claims": CLAIMS,
                "other": CLAIMS | {"sub": "8"},
                "alice": User.objects.first(),
            }.get(key, key)

    api, runs = NinjaAPI(urls_namespace=uuid.uuid4().hex, docs_url=None), Runs()
    api.post("/pay", auth=ApiKey())(idempotent(runs.view))
    settings.ROOT_URLCONF = (path("api/", api.urls),)

    def pay(api_key):
        call.client.logout()
        return call.client.generic(
            **call.request(path="/api/pay", headers={"X-API-Key": api_key})
        )

    return pay, runs


@pytest.mark.ninja
def test_ninjas_caller_has_a_scope_of_its_own(pay_with_ninja, alice):
    pay, runs = pay_with_ninja
    first, replayed, other = pay("claims"), pay("claims"), pay("other")
    assert (first.content, replayed.content, other.content) == (
        b"run 1",
        b"run 1",
        b"run 2",
    )
    assert is_replay(pay("alice")) is False
    assert is_replay(pay("alice"))
    scopes = {
        OF_CLAIMS,
        OF_CLAIMS.replace(":7", ":8"),
        f"auth.user:{User.objects.first().pk}",
    }
    assert set(IdempotencyRecord.objects.values_list("scope", flat=True)) == scopes
    assert runs.count == 3


@pytest.mark.ninja
def test_an_api_key_is_not_stored_but_refused_with_a_warning_that_names_the_scope(
    pay_with_ninja, warnings
):
    pay, runs = pay_with_ninja
    refused = [pay(SECRET), pay(SECRET)][1]
    assert (refused.status_code, code(refused), runs.count) == (
        400,
        "idempotency_key_anonymous",
        0,
    )
    assert "If it was, the server has to define a scope" in refused.json()["detail"]
    (warning,) = warnings()
    assert "Runs.view" in warning
    assert "set a scope in the view's policy" in warning
    assert SECRET not in warning


def test_a_view_is_warned_about_once(call, warnings):
    call.client.logout()
    view, another = idempotent(Runs().view), idempotent(lambda request: None)
    for _time in range(2):
        assert code(call(view)) == code(call(another)) == "idempotency_key_anonymous"
        logs._said.update(dict.fromkeys(logs._said, time.monotonic() - 7200))
    assert len(warnings()) == 2
    assert all("was refused" in warning for warning in warnings())


ACCOUNT = uuid.UUID(int=7)


@pytest.mark.parametrize(
    ("returned", "stored"),
    [(7, "custom:7"), (0, "custom:0"), (ACCOUNT, f"custom:{ACCOUNT}")],
)
def test_a_scope_callable_may_return_a_primary_key(call, returned, stored):
    view = idempotent(scope=lambda request: returned)(Runs().view)
    assert [call(view).content for _time in range(2)] == [b"run 1"] * 2
    assert IdempotencyRecord.objects.get().scope == stored


def of_nobody(request):
    return request.META["returned"]


@pytest.mark.parametrize(
    "returned", [True, False, 7.5, b"acme", ["acme"], User(pk=7)], ids=repr
)
def test_an_invalid_scope_is_an_error_that_names_the_callable_and_the_type(
    rf, returned
):
    runs = Runs()
    request = rf.post("/", headers={"Idempotency-Key": "k"}, returned=returned)
    sentence = (
        rf"test_callers_without_user\.of_nobody returned {type(returned).__name__}\."
        r" Return a string, an int or a"
    )
    with pytest.raises(ImproperlyConfigured, match=sentence):
        idempotent(scope=of_nobody)(runs.view)(request)
    assert runs.count == 0


ANONYMOUS = "idempotency_key_anonymous"


@pytest.fixture
def stranger(call):
    call.client.logout()
    return call


def test_a_client_that_sends_a_key_with_every_post_can_log_in(
    stranger, alice, settings
):
    alice.set_password("secret")
    alice.save()
    settings.LOGIN_REDIRECT_URL = "/"
    form = {
        "data": "username=alice&password=secret",
        "content_type": "application/x-www-form-urlencoded",
    }
    answer = stranger(LoginView.as_view(), **form)
    assert (answer.status_code, answer.wsgi_request.user) == (302, alice)
    assert not IdempotencyRecord.objects.exists()


def test_under_the_middleware_a_stated_policy_decides(stranger, settings):
    runs = Runs()
    settings.IDEMPOTENCY = {"ANONYMOUS": "refuse"}
    assert (code(stranger(runs.view)), runs.count) == (ANONYMOUS, 0)
    settings.IDEMPOTENCY = {"ANONYMOUS": "ignore"}
    assert (stranger(runs.view).status_code, runs.count) == (200, 1)


def test_a_view_with_an_entry_point_refuses_unless_it_ignores(stranger):
    runs = Runs()
    assert (code(stranger(idempotent(runs.view))), runs.count) == (ANONYMOUS, 0)
    view = idempotent(anonymous="ignore")(runs.view)
    assert [stranger(view).content for _ in range(2)] == [b"run 1", b"run 2"]
    assert runs.contexts == [None, None]


def test_an_ignored_caller_needs_neither_a_key_nor_a_valid_one(stranger):
    runs = Runs()
    view = idempotent(anonymous="ignore", required=True)(runs.view)
    assert [stranger(view, key=key).status_code for key in (None, "two words", "")] == [
        200
    ] * 3
    assert (
        code(stranger(idempotent(required=True)(runs.view), key=None))
        == "idempotency_key_missing"
    )


def test_a_caller_whom_a_custom_scope_does_not_name_is_ignored(call):
    view = idempotent(
        scope=lambda request: request.headers.get("X-Tenant"), anonymous="ignore"
    )(Runs().view)
    assert [call(view).content for _ in range(2)] == [b"run 1", b"run 2"]
    assert [call(view, headers={"X-Tenant": "a"}).content for _ in range(2)] == [
        b"run 3"
    ] * 2


@pytest.mark.parametrize(
    "protect",
    [idempotent, idempotent(required=True), lambda view: view],
    ids=["own", "required", "covered"],
)
def test_switched_off_every_view_runs_as_without_keys(call, settings, protect):
    runs = Runs()
    view = protect(runs.view)
    assert call(view).content == b"run 1"
    settings.IDEMPOTENCY = {"ENABLED": False}
    assert [call(view, key=key).content for key in ("k", "k", None)] == [
        b"run 2",
        b"run 3",
        b"run 4",
    ]
    assert runs.contexts[1:] == [None] * 3
    settings.IDEMPOTENCY = {}
    assert call(view).content == b"run 1", "what was stored is replayed again"
