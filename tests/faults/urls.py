"""An endpoint in lease mode whose answer differs with every run, as those of the atomic doors do."""

from __future__ import annotations

import json
import uuid

from django.http import JsonResponse
from django.urls import include, path
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_POST

from django_idempotency.decorators import idempotent
from testproject.models import LedgerEntry
from testproject.simulate import simulated


@csrf_exempt
@require_POST
@idempotent(mode="lease")
@simulated
def leased_order(request):
    """The effect is there once by its child key, whoever runs; each run answers in its own words."""
    operation = request.idempotency.child_key("ledger")
    entry = LedgerEntry.objects.record(operation=operation, user=request.user, kind="order", **json.loads(request.body))
    return JsonResponse({"id": entry.pk, "run": uuid.uuid4()}, status=201)


urlpatterns = [path("orders/leased/", leased_order), path("", include("testproject.urls"))]
