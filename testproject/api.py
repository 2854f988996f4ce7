"""The DRF endpoints."""

from __future__ import annotations

import json
import uuid
from typing import Any, ClassVar
from urllib.request import Request as GatewayRequest
from urllib.request import urlopen

from django.apps import apps
from django.conf import settings
from django.db import transaction
from django.utils.decorators import method_decorator
from rest_framework import mixins, viewsets
from rest_framework.exceptions import APIException
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from django_idempotency.rest_framework import IdempotentMixin
from django_idempotency.values.policy import Policy
from testproject.models import LedgerEntry, Receipt
from testproject.serializers import OrderSerializer, PaymentSerializer
from testproject.simulate import simulated

Kind = LedgerEntry.Kind


class PaymentViewSet(mixins.CreateModelMixin, viewsets.GenericViewSet[LedgerEntry]):
    queryset = LedgerEntry.objects.all()
    serializer_class: Any = PaymentSerializer
    kind: ClassVar[Kind]

    @method_decorator(simulated)
    def create(self, request: Request, *args: Any, **kwargs: Any) -> Response:
        return super().create(request, *args, **kwargs)

    def perform_create(self, serializer: Any) -> None:
        serializer.save(kind=self.kind, user=self.request.user)


class ChargeViewSet(IdempotentMixin, PaymentViewSet):
    """A charge and the event that reports it: both or neither, with or without a key."""

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
    """Money that leaves through a gateway, outside any transaction of ours: hence lease mode and a child key."""

    idempotency_policy = Policy(mode="lease", store=settings.LEASE_STORE)
    kind = Kind.PAYOUT

    def perform_create(self, serializer: Any) -> None:
        context = getattr(self.request, "idempotency", None)
        key = context.child_key("gateway") if context else str(uuid.uuid4())
        payout = ask_gateway(key, serializer.validated_data)
        serializer.save(kind=self.kind, user=self.request.user, operation=payout["id"])


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


class GatewayUnavailable(APIException):
    status_code = 502
    default_detail = "The payment gateway can't be reached."


def ask_gateway(key: str, payment: dict[str, Any]) -> dict[str, Any]:
    """Have the gateway pay out. It recognizes a key that it has seen, so asking again is safe."""
    request = GatewayRequest(
        f"{settings.GATEWAY_URL}/payouts",
        data=json.dumps(payment).encode(),
        headers={"Content-Type": "application/json", "Idempotency-Key": f'"{key}"'},
    )
    try:
        with urlopen(request, timeout=10) as answer:
            return json.load(answer)  # type: ignore[no-any-return]
    except OSError as error:
        raise GatewayUnavailable from error
