"""What the key of a caller without a scope does: it is refused or ignored, and keeps nobody from logging in."""

from __future__ import annotations

import pytest
from django.contrib.auth.views import LoginView

from django_idempotency.decorators import idempotent
from django_idempotency.models import IdempotencyRecord
from tests.support.views import Runs, code

ANONYMOUS = "idempotency_key_anonymous"


@pytest.fixture
def stranger(call):
    call.client.logout()
    return call


def test_a_client_that_sends_a_key_with_every_post_can_log_in(stranger, alice, settings):
    alice.set_password("secret")
    alice.save()
    settings.LOGIN_REDIRECT_URL = "/"
    form = {"data": "username=alice&password=secret", "content_type": "application/x-www-form-urlencoded"}
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
    assert [stranger(view, key=key).status_code for key in (None, "two words", "")] == [200] * 3
    assert code(stranger(idempotent(required=True)(runs.view), key=None)) == "idempotency_key_missing"


def test_a_caller_whom_a_custom_scope_does_not_name_is_ignored(call):
    view = idempotent(scope=lambda request: request.headers.get("X-Tenant"), anonymous="ignore")(Runs().view)
    assert [call(view).content for _ in range(2)] == [b"run 1", b"run 2"]
    assert [call(view, headers={"X-Tenant": "a"}).content for _ in range(2)] == [b"run 3"] * 2


@pytest.mark.parametrize(
    "protect", [idempotent, idempotent(required=True), lambda view: view], ids=["own", "required", "covered"]
)
def test_switched_off_every_view_runs_as_if_there_were_no_keys(call, settings, protect):
    runs = Runs()
    view = protect(runs.view)
    assert call(view).content == b"run 1"
    settings.IDEMPOTENCY = {"ENABLED": False}
    assert [call(view, key=key).content for key in ("k", "k", None)] == [b"run 2", b"run 3", b"run 4"]
    assert runs.contexts[1:] == [None] * 3
    settings.IDEMPOTENCY = {}
    assert call(view).content == b"run 1", "what was stored is replayed again"
