"""An endpoint in lease mode whose response differs with every run, as those of the
atomic entry points do.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
import uuid
from contextlib import contextmanager
from urllib.parse import quote
from urllib.request import urlopen

from django.conf import settings
from django.db.models import F
from django.http import JsonResponse
from django.urls import include, path
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_POST

from django_idempotency.contrib import steps
from django_idempotency.contrib.steps.values import UNKNOWN
from django_idempotency.engine.leases import LeaseKeeper
from django_idempotency.http.placement import idempotent
from django_idempotency.maintenance.decisions import version
from django_idempotency.models import IdempotencyRecord
from testproject.api import ask_gateway
from testproject.models import LedgerEntry
from testproject.simulate import simulated

BOOKED, CLOSED = 1_000, 10_000


@csrf_exempt
@require_POST
@idempotent(mode="lease")
@simulated
def leased_order(request):
    """The effect is there once by its child key, whoever runs; each run answers in its
    own words.
    """
    operation = request.idempotency.child_key("ledger")
    entry = LedgerEntry.objects.record(
        operation=operation, user=request.user, kind="order", **json.loads(request.body)
    )
    return JsonResponse({"id": entry.pk, "run": uuid.uuid4()}, status=201)


@csrf_exempt
@require_POST
@idempotent(mode="lease")
@simulated
def in_five_steps(request):
    return five_steps(request, lambda ask: steps.call("fee", ask))


@csrf_exempt
@require_POST
@idempotent(mode="lease")
@simulated
def with_one_at_most_once(request):
    """The gateway honours no key for the fee, so it is asked for that once."""
    return five_steps(
        request, lambda ask: steps.call("fee", lambda: ask(""), at_most_once=True)
    )


def five_steps(request, ask_for_fee):
    """Three in the database, and two payments at the gateway between them."""
    sent = json.loads(request.body)
    fee = {"reference": f"{sent['reference']}:fee"}

    def reserve():
        entry = LedgerEntry.objects.create(user=request.user, kind="payout", **sent)
        return entry.pk.hex

    def add(amount, **named):
        entries = LedgerEntry.objects.filter(pk=entry)
        return entries.update(amount=F("amount") + amount, **named)

    entry = steps.atomic("reserve", reserve)
    ask_for_fee(lambda key: ask_gateway(key, fee))
    steps.atomic("book", lambda: add(BOOKED))
    steps.call("bank", lambda key: ask_gateway(key, sent))
    steps.atomic("close", lambda: add(CLOSED, operation=entry))
    return JsonResponse({"id": entry}, status=201)


@csrf_exempt
@require_POST
def decide(request):
    """What an operator does who finds a fee on hold: look whether it was paid."""
    sent = json.loads(request.body)
    held = IdempotencyRecord.objects.get(key=sent["reference"], on_hold=True)
    assert held.reason == UNKNOWN.format(name="fee")
    asked = quote(f"{sent['reference']}:fee")
    with urlopen(f"{settings.GATEWAY_URL}/payouts?reference={asked}") as answer:
        is_paid = json.load(answer)["effects"]
    result = {"found": True} if is_paid else steps.NOT_DONE
    decided = steps.resolve(held.pk, "fee", result, as_seen=version(held))
    assert isinstance(decided, IdempotencyRecord)
    return JsonResponse({"found": "paid" if is_paid else "not paid"})


@csrf_exempt
@require_POST
@idempotent(mode="lease", scope="public", store=settings.LEASE_STORE)
def outside(request):
    """Its effect is outside the database, a line in a file, and nothing keeps a second
    run from having it again.
    """
    with noted(request) as (run, seconds):
        time.sleep(seconds)
    return JsonResponse({"id": run}, status=201, headers={"X-Run": run})


@csrf_exempt
@require_POST
@idempotent(mode="lease", scope="public", store=settings.LEASE_STORE)
async def outside_async(request):
    with noted(request) as (run, seconds):
        await asyncio.sleep(seconds)
    return JsonResponse({"id": run}, status=201)


@contextmanager
def noted(request):
    """A run and its seconds: notes that it began, and that it ended or was
    cancelled.
    """
    line = {"key": request.idempotency.key, "run": uuid.uuid4().hex}
    note(line | {"at": "begin"})
    try:
        yield line["run"], json.loads(request.body)["seconds"]
    except asyncio.CancelledError:
        note(line | {"at": "cancelled"})
        raise
    note(line | {"at": "end"})


def note(line):
    """In one write, with the time."""
    file = os.open(
        os.environ["RUNS_LOG"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644
    )
    os.write(
        file,
        json.dumps({**line, "pid": os.getpid(), "time": time.time()}).encode() + b"\n",
    )
    os.close(file)


# a lease that has lapsed is taken over at once
if os.environ.get("FAULTS_WITHOUT") == "watch":
    LeaseKeeper._was_watched = lambda keeper, suspect: True

urlpatterns = [
    path("runs/", outside),
    path("runs/async/", outside_async),
    path("orders/leased/", leased_order),
    path("orders/in-five-steps/", in_five_steps),
    path("orders/in-five-steps/once/", with_one_at_most_once),
    path("decide/", decide),
    path("", include("testproject.urls")),
]
