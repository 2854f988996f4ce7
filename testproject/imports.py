"""An operation that takes longer than a request should: the view defers it."""

from __future__ import annotations

from typing import Any

from django.contrib.auth.models import User
from django.http import HttpResponse
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import extend_schema
from rest_framework.request import Request
from rest_framework.views import APIView

from django_idempotency import Policy
from django_idempotency.contrib.operations import defer, defers, operation
from django_idempotency.rest_framework import IdempotentMixin
from testproject.models import LedgerEntry
from testproject.serializers import PaymentSerializer


@operation("imports.run", status=201)
def run_import(*, user: int, payment: dict[str, Any]) -> dict[str, Any]:
    """Enter a payment into the ledger."""
    entry = LedgerEntry.objects.create(
        kind=LedgerEntry.Kind.DEPOSIT, user=User.objects.get(pk=user), **payment
    )
    return {"id": str(entry.pk), "reference": entry.reference}


class ImportView(IdempotentMixin, APIView):
    idempotency_policy = Policy(required=True)

    @extend_schema(request=PaymentSerializer, responses={201: OpenApiTypes.OBJECT})
    @defers
    def post(self, request: Request) -> HttpResponse:
        payment = PaymentSerializer(data=request.data)
        payment.is_valid(raise_exception=True)
        return defer(
            request, run_import, user=request.user.pk, payment=payment.validated_data
        )
