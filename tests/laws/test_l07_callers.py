"""L7: a stored response is for who may come in now, and for its scope alone."""

from __future__ import annotations

import pytest
from django.contrib.auth.decorators import user_passes_test
from django.contrib.auth.models import AnonymousUser
from django.test import override_settings
from rest_framework.views import APIView

from django_idempotency.decorators import idempotent
from django_idempotency.middleware import IdempotencyMiddleware
from django_idempotency.policy import Policy
from django_idempotency.rest_framework import IdempotentMixin
from tests.support.callers import (
    SCOPE,
    effects,
    entry_point,
    is_replay,
    paying,
    post,
)

pytestmark = pytest.mark.usefixtures("payer")


class Doorkeeper:
    """Whoever the view asks before it lets anybody in."""

    lets_in = True

    def has_permission(self, request, view):
        return self.lets_in


@pytest.fixture
def doorkeeper(monkeypatch):
    monkeypatch.setattr(Doorkeeper, "lets_in", True)  # undone after the test, whatever it set
    return Doorkeeper


def behind_the_mixin():
    class Entry(IdempotentMixin, APIView):
        authentication_classes = ()
        permission_classes = (Doorkeeper,)
        idempotency_policy = Policy(scope=SCOPE)

        def post(self, request):
            return paying(request)

    return Entry.as_view()


def behind_the_decorator():
    return user_passes_test(lambda user: Doorkeeper.lets_in)(idempotent(scope=SCOPE)(paying))


def behind_the_middleware():
    guarded = user_passes_test(lambda user: Doorkeeper.lets_in)(paying)
    middleware = IdempotencyMiddleware(paying)
    return lambda request: middleware.process_view(request, guarded, (), {})


@override_settings(IDEMPOTENCY={"SCOPE": SCOPE})
@pytest.mark.parametrize("door_to", [behind_the_mixin, behind_the_decorator, behind_the_middleware])
def test_l7_who_is_turned_away_now_gets_no_stored_response(door_to, doorkeeper):
    view = door_to()
    first = view(by_nobody(post()))
    doorkeeper.lets_in = False
    refused = view(by_nobody(post()))
    assert (first.status_code, is_replay(refused)) == (201, False)
    assert refused.status_code in (302, 403)
    doorkeeper.lets_in = True
    assert is_replay(view(by_nobody(post())))
    assert effects() == 1


def by_nobody(request):
    request.user = AnonymousUser()
    return request


def test_l7_the_same_key_in_another_scope_is_another_operation():
    tenants = iter(["tenant 1", "tenant 2", "tenant 1"])
    send = entry_point(paying, scope=lambda request: next(tenants))
    first, second, third = send(), send(), send()
    assert first.content == third.content != second.content
    assert effects() == 2
