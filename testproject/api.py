"""The DRF endpoints."""

from __future__ import annotations

import json
from http.client import HTTPException
from typing import Any, ClassVar
from urllib.parse import quote
from urllib.request import Request as GatewayRequest
from urllib.request import urlopen

from django.apps import apps
from django.conf import settings
from django.db import transaction
from rest_framework import mixins, viewsets
from rest_framework.exceptions import APIException
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from django_idempotency import current
from django_idempotency.rest_framework import IdempotentMixin
from django_idempotency.values.policy import Policy
from testproject.models import LedgerEntry, Receipt
from testproject.serializers import OrderSerializer, PaymentSerializer
from testproject.simulate import die_if, gateway_fault, simulated_handler

Kind = LedgerEntry.Kind


class PaymentViewSet(mixins.CreateModelMixin, viewsets.GenericViewSet[LedgerEntry]):
    queryset = LedgerEntry.objects.all()
    serializer_class: Any = PaymentSerializer
    kind: ClassVar[Kind]

    @simulated_handler
    def create(self, request: Request, *args: Any, **kwargs: Any) -> Response:
        return super().create(request, *args, **kwargs)

    def perform_create(self, serializer: Any) -> None:
        serializer.save(kind=self.kind, user=self.request.user)


class ChargeViewSet(IdempotentMixin, PaymentViewSet):
    """A charge and the event that reports it: both or neither, with or without a
    key.
    """

    kind = Kind.CHARGE

    @transaction.atomic(savepoint=False)
    def perform_create(self, serializer: Any) -> None:
        super().perform_create(serializer)
        if not apps.is_installed("django_idempotency.contrib.outbox"):
            return
        from django_idempotency.contrib.outbox.publishing import publish

        publish(settings.CHARGE_TOPIC, serializer.data, key=str(serializer.instance.pk))


class TransferViewSet(IdempotentMixin, PaymentViewSet):
    idempotency_policy = Policy(required=True)
    kind = Kind.TRANSFER


class PayoutViewSet(IdempotentMixin, PaymentViewSet):
    """Money that leaves through a gateway, outside any transaction of ours: hence lease
    mode, and steps where they are possible.
    """

    idempotency_policy = Policy(mode="lease", store=settings.LEASE_STORE)
    kind = Kind.PAYOUT

    def perform_create(self, serializer: Any) -> None:
        payout = {"kind": self.kind, "user": self.request.user}
        (pay_in_steps if settings.STEPS else pay_at_once)(serializer, payout)


def pay_in_steps(serializer: Any, payout: dict[str, Any]) -> None:
    from django_idempotency.contrib import steps

    order = serializer.validated_data
    reserved = steps.atomic("reserve", lambda: str(serializer.save(**payout).pk))
    if gateway_fault.get() == "nokeys":
        bank = steps.call("bank", lambda: ask_gateway("", order), at_most_once=True)
    else:
        bank = steps.call("bank", lambda key: ask_gateway(key, order))
    die_if("bank")
    entries = LedgerEntry.objects.filter(pk=reserved)
    steps.atomic("book", lambda: entries.update(operation=bank["id"]))
    serializer.instance = entries.get()


def pay_at_once(serializer: Any, payout: dict[str, Any]) -> None:
    key = current().child_key("bank")
    bank = ask_gateway(key, serializer.validated_data)
    serializer.save(**payout, operation=bank["id"])


class RefundViewSet(PaymentViewSet):
    """Has no entry point of its own: the middleware gives it one."""

    serializer_class = OrderSerializer
    kind = Kind.REFUND


class LedgerView(APIView):
    def get(self, request: Request) -> Response:
        reference = request.query_params.get("reference", "")
        effects = LedgerEntry.objects.filter(reference=reference).count()
        receipts = Receipt.objects.filter(reference=reference).count()
        return Response(
            {"reference": reference, "effects": effects, "receipts": receipts}
        )


class GatewayView(APIView):
    """What the gateway has paid."""

    def get(self, request: Request) -> Response:
        reference = quote(request.query_params.get("reference", ""))
        with urlopen(f"{settings.GATEWAY_URL}/payouts?reference={reference}") as answer:
            return Response({"payments": json.load(answer)["effects"]})


class GatewayUnavailable(APIException):
    status_code = 502
    default_detail = "The payment gateway can't be reached."


def ask_gateway(key: str, payment: dict[str, Any]) -> dict[str, Any]:
    """Have the gateway pay out. It recognizes a key that it has seen, so asking again
    is safe.
    """
    request = GatewayRequest(
        f"{settings.GATEWAY_URL}/payouts",
        data=json.dumps(payment).encode(),
        headers={
            "Content-Type": "application/json",
            "Idempotency-Key": f'"{key}"',
            "X-Fault": gateway_fault.get(),
        },
    )
    try:
        with urlopen(request, timeout=10) as answer:
            paid: dict[str, Any] = json.load(answer)
    except (OSError, HTTPException) as error:
        raise GatewayUnavailable from error
    die_if("call")
    return paid
