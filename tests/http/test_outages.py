"""The store goes away in the middle of a request: 503, and never the advice that a new key is safe."""

from __future__ import annotations

import asyncio
import json

import pytest
from asgiref.sync import sync_to_async
from django.db import connections
from django.http import HttpResponse

from django_idempotency import signals
from django_idempotency.decorators import idempotent
from django_idempotency.policy import Policy
from tests.support.callers import SCOPE, entry_point, post, record, shift
from tests.support.views import code

pytestmark = [pytest.mark.postgresql, pytest.mark.usefixtures("payer")]

MODES = ("atomic", "lease")


def is_safe(response):
    return json.loads(response.content)["safe_new_key"]


@pytest.fixture
def away_once(proxy):
    """Has the store go away when a signal is sent."""
    connected = []

    def go_away(**_named):
        proxy.go_away()

    def when(signal):
        signal.connect(go_away)
        connected.append(signal)

    yield when
    for signal in connected:
        signal.disconnect(go_away)


@pytest.mark.parametrize("mode", MODES)
def test_before_the_claim(proxy, mode):
    """The key may have been used before: nobody can look now."""
    proxy.go_away()
    refused = entry_point(lambda request: HttpResponse(), mode=mode)()
    assert (refused.status_code, is_safe(refused)) == (503, False)


def test_in_renew_after_effects(proxy):
    effects = []

    def view(request):
        effects.append(request)
        proxy.go_away()
        request.idempotency.renew()

    refused = entry_point(view, mode="lease")()
    assert (refused.status_code, code(refused), is_safe(refused), len(effects)) == (
        503,
        "idempotency_store_unavailable",
        False,
        1,
    )


def test_in_renew_of_an_async_view(proxy):
    @idempotent(scope=SCOPE, mode="lease")
    async def view(request):
        proxy.go_away()
        await sync_to_async(request.idempotency.renew)()

    async def main():
        try:
            return await view(post())
        finally:
            await sync_to_async(connections.close_all)()

    refused = asyncio.run(main())
    assert (refused.status_code, is_safe(refused)) == (503, False)


@pytest.mark.parametrize("mode", MODES)
def test_in_answering_after_a_lost_claim(proxy, other_thread, mode):
    """The view has run; its claim is another's by now, and what came of that one can't be read."""

    def lose(**_named):
        proxy.go_away()

    def view(request):
        if mode == "atomic":
            return HttpResponse(status=201)
        other_thread(taken_over)
        return HttpResponse(status=201)

    def taken_over():
        shift(locked_at=-120, locked_until=-60)
        with connections["default"].cursor() as cursor:
            cursor.execute("UPDATE django_idempotency_record SET token = gen_random_uuid()")

    def steal(**_named):
        if mode == "atomic":
            other_thread(taken_over)

    signals.key_claimed.connect(steal)
    signals.claim_lost.connect(lose)
    signals.stale_write_rejected.connect(lose)
    try:
        refused = entry_point(view, mode=mode)()
    finally:
        for signal, hear in ((signals.key_claimed, steal), (signals.claim_lost, lose)):
            signal.disconnect(hear)
        signals.stale_write_rejected.disconnect(lose)
    assert (refused.status_code, is_safe(refused)) == (503, False)


@pytest.mark.drf
@pytest.mark.parametrize("send", ["mixin", "decorator"])
def test_an_outage_before_the_row_lock_is_503_without_a_run(away_once, proxy, send):
    from rest_framework.views import APIView

    from django_idempotency.rest_framework import IdempotentMixin

    runs = []
    away_once(signals.key_claimed)
    if send == "mixin":
        attributes = {
            "permission_classes": (),
            "authentication_classes": (),
            "idempotency_policy": Policy(scope="public"),
            "post": lambda self, request: runs.append(request),
        }
        view = type("Charge", (IdempotentMixin, APIView), attributes).as_view()
    else:
        view = idempotent(scope="public")(runs.append)
    refused = view(post())
    members = json.loads(refused.render().content if hasattr(refused, "render") else refused.content)
    assert (refused.status_code, members["code"], members["safe_new_key"]) == (
        503,
        "idempotency_store_unavailable",
        False,
    )
    assert refused.headers["Retry-After"] in ("1", "2")
    assert runs == []
    proxy.come_back()
    assert record().status == "processing"
