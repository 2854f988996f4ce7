"""Whose key it is where the policy states no scope: users with and without a model or a
primary key, and tenants.
"""

from __future__ import annotations

import pytest
from django.contrib.auth.models import AnonymousUser, User
from django.core.exceptions import ImproperlyConfigured
from django.db import connections
from django.test import RequestFactory
from django.utils.functional import SimpleLazyObject

from django_idempotency.http.placement import idempotent
from django_idempotency.http.requests import identify
from django_idempotency.models import IdempotencyRecord
from django_idempotency.values import scopes
from django_idempotency.values.policy import Fingerprint, Policy
from django_idempotency.values.scopes import user_scope
from tests.support.aliases import another_alias
from tests.support.callers import is_replay
from tests.support.views import Runs, code


class Staff(User):
    class Meta:
        app_label = "tests"
        proxy = True


class TokenUser:
    """As those of a service that knows no users, only tokens."""

    is_authenticated = True

    def __init__(self, **attributes):
        vars(self).update(attributes)


TOKEN_SCOPE = f"{__name__}.TokenUser:7"


@pytest.mark.parametrize(
    ("user", "scope"),
    [
        (User(pk=7), "auth.user:7"),
        (Staff(pk=7), "auth.user:7"),
        (SimpleLazyObject(lambda: User(pk=7)), "auth.user:7"),
        (TokenUser(pk=7), TOKEN_SCOPE),
        (TokenUser(pk=None), None),
        (TokenUser(pk=""), None),
        (TokenUser(), None),
        (User(), None),
        (AnonymousUser(), None),
        (None, None),
    ],
)
def test_a_users_scope_is_its_model_and_its_primary_key(user, scope):
    assert user_scope(user, "default") == scope


@pytest.fixture
def tenant(monkeypatch):
    """Have a database's connection be in a tenant's schema, as django-tenants does."""

    def enter(schema, using="default"):
        scopes.has_schemas.cache_clear()
        monkeypatch.setattr(connections[using], "schema_name", schema, raising=False)

    yield enter
    monkeypatch.undo()
    scopes.has_schemas.cache_clear()


def test_the_same_user_of_another_tenant_is_another_scope(tenant):
    tenant("acme")
    assert user_scope(User(pk=7), "default") == "acme/auth.user:7"
    tenant("a/auth.user:7")
    assert user_scope(User(pk=7), "default") == "a%2Fauth.user%3A7/auth.user:7"


def test_a_connection_whose_tenant_is_not_set_is_without_a_scope(tenant):
    tenant(None)
    with pytest.raises(ImproperlyConfigured, match="no schema is set"):
        user_scope(User(pk=7), "default")
    assert user_scope(AnonymousUser(), "default") is None


@pytest.fixture
def more_databases():
    with another_alias("ledger"), another_alias("archive"):
        yield


def test_records_in_another_database_carry_the_tenant(tenant, more_databases):
    tenant("acme", using="ledger")
    assert user_scope(User(pk=7), "default") == "acme/auth.user:7"


def test_of_several_databases_with_tenants_none_is_guessed(tenant, more_databases):
    tenant("acme", using="ledger")
    tenant("acme", using="archive")
    assert user_scope(User(pk=7), "ledger") == "acme/auth.user:7"
    with pytest.raises(ImproperlyConfigured, match="Set a scope"):
        user_scope(User(pk=7), "default")


@pytest.mark.parametrize("taken", ["auth.user:{}", "public", "form"])
def test_a_callables_scope_never_meets_a_built_in_one(call, alice, taken):
    builtin, custom = Runs(), Runs()
    scope = taken.format(alice.pk)
    call(idempotent(**({"scope": "public"} if scope == "public" else {}))(builtin.view))
    assert call(idempotent(scope=lambda request: scope)(custom.view)).status_code == 200
    assert (builtin.count, custom.count) == (1, 1), "no replay of the one for the other"
    assert f"custom:{scope}" in IdempotencyRecord.objects.values_list(
        "scope", flat=True
    )


TOKEN = "eyJhbGciOiJIUzI1NiJ9.e30"


@pytest.mark.parametrize("scope", ["{header}", "{token}", "tenant:acme/{token}"])
def test_a_scope_with_the_callers_credentials_is_refused(call, scope):
    def made(request):
        header = request.headers["Authorization"]
        return scope.format(header=header, token=header.removeprefix("Bearer "))

    runs = Runs()
    with pytest.raises(ImproperlyConfigured, match="credentials"):
        call(
            idempotent(scope=made)(runs.view),
            headers={"Authorization": f"Bearer {TOKEN}"},
        )
    assert (runs.count, IdempotencyRecord.objects.count()) == (0, 0)


@pytest.mark.parametrize("header", ["", "Bearer", "Token 7", f"Bearer {TOKEN}"])
def test_a_scope_without_the_callers_credentials_is_not_refused(call, header):
    view = idempotent(scope=lambda request: "tenant:7")(Runs().view)
    assert call(view, headers={"Authorization": header}).status_code == 200


@pytest.mark.parametrize("letter", ["\0", "\ud800"], ids=ascii)
def test_a_scope_that_can_not_be_stored_is_refused(call, rf, letter):
    runs = Runs()
    answer = call(idempotent(scope=lambda request: f"account:{letter}")(runs.view))
    assert (answer.status_code, code(answer), runs.count) == (
        400,
        "idempotency_key_malformed",
        0,
    )
    request = rf.post("/", headers={"Idempotency-Key": "k"})
    request.user = TokenUser(pk=letter)
    assert (idempotent(runs.view)(request).status_code, runs.count) == (400, 0)


def test_the_same_key_for_another_account_is_a_mismatch(call):
    view = idempotent(fingerprint=Fingerprint(headers=["Stripe-Account"]))(Runs().view)

    def send(**headers):
        return call(view, headers=headers)

    assert send(**{"Stripe-Account": "acct_1"}).status_code == 200
    for other in ({"Stripe-Account": "acct_2"}, {"Stripe-Account": ""}, {}):
        assert (send(**other).status_code, code(send(**other))) == (
            422,
            "idempotency_key_reused",
        )
    assert is_replay(send(**{"stripe-account": "acct_1", "X-Other": "1"}))


def test_compared_headers_do_not_run_together():
    """What one ends with is not what the next begins with."""
    policy = Policy(fingerprint=Fingerprint(headers=["A", "B"]))

    def fingerprint(**headers):
        request = RequestFactory().post("/", headers=headers)
        request.user = User(pk=7)
        request.META["HTTP_IDEMPOTENCY_KEY"] = "k"
        return identify(request, policy, sender=None).fingerprint

    cases = [
        {},
        {"A": ""},
        {"B": ""},
        {"A": "1", "B": "2"},
        {"A": "1b=2"},
        {"A": "12"},
        {"B": "12"},
        {"A": "1", "B": ""},
    ]
    assert len({fingerprint(**case) for case in cases}) == len(cases)


@pytest.mark.parametrize("wrong", ["Stripe-Account", ["X\r\nY"], [""], [7]])
def test_names_unfit_for_a_header_are_refused(wrong):
    with pytest.raises(ImproperlyConfigured, match=r"Fingerprint\.headers"):
        Policy(fingerprint=Fingerprint(headers=wrong))
