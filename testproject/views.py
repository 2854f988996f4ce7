"""The plain Django endpoints."""

from __future__ import annotations

import json

from asgiref.sync import sync_to_async
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_POST

from django_idempotency.decorators import idempotent
from testproject.models import LedgerEntry
from testproject.serializers import OrderSerializer
from testproject.simulate import simulated

Kind = LedgerEntry.Kind


@csrf_exempt
@require_POST
@idempotent
def order(request: HttpRequest) -> HttpResponse:
    return _book(request, Kind.ORDER)


@csrf_exempt
@require_POST
@idempotent(mode="lease", on_crash="retry")
async def async_order(request: HttpRequest) -> HttpResponse:
    return await _abook(request, Kind.ORDER)


@csrf_exempt
@require_POST
def refund(request: HttpRequest) -> HttpResponse:
    """Has no door of its own: the middleware gives it one."""
    return _book(request, Kind.REFUND)


@simulated
def _book(request: HttpRequest, kind: Kind) -> HttpResponse:
    return _write(request, kind)


@simulated
async def _abook(request: HttpRequest, kind: Kind) -> HttpResponse:
    """This may run again after a crash, in no transaction with its key; a child key makes it one entry all the same."""
    context = getattr(request, "idempotency", None)
    return await sync_to_async(_write)(request, kind, context.child_key("ledger") if context else None)


def _write(request: HttpRequest, kind: Kind, operation: str | None = None) -> HttpResponse:
    try:
        data = json.loads(request.body) if request.content_type == "application/json" else request.POST
    except (ValueError, RecursionError):
        return JsonResponse({"detail": "The body is not JSON."}, status=400)
    serializer = OrderSerializer(data=data)
    if not serializer.is_valid():
        return JsonResponse(serializer.errors, status=400, safe=False)
    serializer.save(kind=kind, user=request.user, operation=operation)
    return JsonResponse(serializer.data, status=201)
