"""An endpoint in lease mode whose response differs with every run, as those of the atomic entry points do."""

from __future__ import annotations

import asyncio
import json
import os
import time
import uuid

from django.conf import settings
from django.http import JsonResponse
from django.urls import include, path
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_POST

from django_idempotency.engine.leases import LeaseKeeper
from django_idempotency.http.placement import idempotent
from testproject.models import LedgerEntry
from testproject.simulate import simulated


@csrf_exempt
@require_POST
@idempotent(mode="lease")
@simulated
def leased_order(request):
    """The effect is there once by its child key, whoever runs; each run answers in its own words."""
    operation = request.idempotency.child_key("ledger")
    entry = LedgerEntry.objects.record(
        operation=operation, user=request.user, kind="order", **json.loads(request.body)
    )
    return JsonResponse({"id": entry.pk, "run": uuid.uuid4()}, status=201)


@csrf_exempt
@require_POST
@idempotent(mode="lease", scope="public", store=settings.LEASE_STORE)
def outside(request):
    """Its effect is outside the database, a line in a file, and nothing keeps a second run from having it again."""
    sent, run = json.loads(request.body), uuid.uuid4().hex
    note({"key": request.idempotency.key, "run": run, "at": "begin"})
    time.sleep(sent["seconds"])
    note({"key": request.idempotency.key, "run": run, "at": "end"})
    return JsonResponse({"id": run}, status=201, headers={"X-Run": run})


@csrf_exempt
@require_POST
@idempotent(mode="lease", scope="public", store=settings.LEASE_STORE)
async def outside_async(request):
    """As ``outside``; notes also that it was cancelled."""
    sent, run = json.loads(request.body), uuid.uuid4().hex
    note({"key": request.idempotency.key, "run": run, "at": "begin"})
    try:
        await asyncio.sleep(sent["seconds"])
    except asyncio.CancelledError:
        note({"key": request.idempotency.key, "run": run, "at": "cancelled"})
        raise
    note({"key": request.idempotency.key, "run": run, "at": "end"})
    return JsonResponse({"id": run}, status=201)


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


if (
    os.environ.get("FAULTS_WITHOUT") == "watch"
):  # a lease that has lapsed is taken over at once
    LeaseKeeper._was_watched = lambda keeper, suspect: True

urlpatterns = [
    path("runs/", outside),
    path("runs/async/", outside_async),
    path("orders/leased/", leased_order),
    path("", include("testproject.urls")),
]
