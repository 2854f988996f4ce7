"""The plain Django endpoints."""

from __future__ import annotations

import json

from asgiref.sync import sync_to_async
from django import forms
from django.conf import settings
from django.contrib import messages
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import redirect, render
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_POST

from django_idempotency import IdempotentRequest, Lease
from django_idempotency.forms import idempotent_form
from django_idempotency.http.placement import idempotent
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
@idempotent(
    mode=Lease(on_crash="retry"), store=getattr(settings, "LEASE_STORE", "default")
)
async def async_order(request: IdempotentRequest) -> HttpResponse:
    return await _abook(request, Kind.ORDER)


class OrderForm(forms.Form):
    reference = forms.CharField(max_length=200)
    amount = forms.IntegerField(min_value=1, max_value=10**12)


@idempotent_form
@simulated
def new_order(request: HttpRequest) -> HttpResponse:
    form = OrderForm(request.POST or None)
    if request.method == "POST" and form.is_valid():
        LedgerEntry.objects.record(
            kind=Kind.ORDER, user=request.user, currency="eur", **form.cleaned_data
        )
        messages.success(request, f"Ordered {form.cleaned_data['reference']}.")
        return redirect("new-order")
    return render(request, "new_order.html", {"form": form})


@csrf_exempt
@require_POST
def refund(request: HttpRequest) -> HttpResponse:
    """Has no entry point of its own: the middleware gives it one."""
    return _book(request, Kind.REFUND)


@simulated
def _book(request: HttpRequest, kind: Kind) -> HttpResponse:
    return _write(request, kind)


@simulated
async def _abook(request: IdempotentRequest, kind: Kind) -> HttpResponse:
    """Book in no transaction with the key. This may run again after a crash, but a
    child key keeps it to one entry.
    """
    operation = request.idempotency.child_key("ledger")
    return await sync_to_async(_write)(request, kind, operation)


def _write(
    request: HttpRequest, kind: Kind, operation: str | None = None
) -> HttpResponse:
    try:
        data = (
            json.loads(request.body)
            if request.content_type == "application/json"
            else request.POST
        )
    except (ValueError, RecursionError):
        return JsonResponse({"detail": "The body is not JSON."}, status=400)
    serializer = OrderSerializer(data=data)
    if not serializer.is_valid():
        return JsonResponse(serializer.errors, status=400, safe=False)
    serializer.save(kind=kind, user=request.user, operation=operation)
    return JsonResponse(serializer.data, status=201)
