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
from tests.support.callers import SCOPE, entry_point, post, record, shift
from tests.support.views import api_class, code

pytestmark = [pytest.mark.postgresql, pytest.mark.usefixtures("payer")]

MODES = ("atomic", "lease")


def is_safe(response):
    return json.loads(response.content)["safe_new_key"]


def test_an_outage_in_renew_after_effects(proxy):
    effects = []

    def view(request):
        effects.append(request)
        proxy.go_away()
        request.idempotency.renew()

    async def aview(request):
        await sync_to_async(view)(request)

    async def main():
        try:
            return await idempotent(scope=SCOPE, mode="lease")(aview)(post("async"))
        finally:
            await sync_to_async(connections.close_all)()

    refused = [entry_point(view, mode="lease")()]
    proxy.come_back()
    refused.append(asyncio.run(main()))
    assert [(each.status_code, code(each), is_safe(each)) for each in refused] == [
        (503, "idempotency_store_unavailable", False)
    ] * 2
    assert len(effects) == 2


@pytest.mark.parametrize("mode", MODES)
def test_an_outage_while_responding_after_a_lost_claim(proxy, other_thread, mode):
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
def test_an_outage_before_the_row_lock_is_a_problem_of_rest_framework(proxy):
    def go_away(**_named):
        proxy.go_away()

    runs = []
    signals.key_claimed.connect(go_away)
    try:
        refused = idempotent(scope="public")(api_class(runs.append)).as_view()(post()).render()
    finally:
        signals.key_claimed.disconnect(go_away)
    assert (refused.status_code, code(refused), is_safe(refused)) == (503, "idempotency_store_unavailable", False)
    assert refused.headers["Retry-After"] in ("1", "2")
    assert runs == []
    proxy.come_back()
    assert record().status == "processing"
