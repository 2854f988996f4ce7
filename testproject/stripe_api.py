"""``POST /v1/charges`` as Stripe has it, so that the official client works against this
service.
"""

from __future__ import annotations

from typing import Any

from rest_framework import serializers
from rest_framework.generics import GenericAPIView
from rest_framework.parsers import FormParser
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import exception_handler

from django_idempotency.contrib import profiles
from django_idempotency.rest_framework import IdempotentMixin
from testproject.authentication import SecretKeyAuthentication
from testproject.models import LedgerEntry
from testproject.simulate import simulated_handler


class ChargeSerializer(serializers.Serializer[LedgerEntry]):
    amount = serializers.IntegerField(min_value=1, max_value=99_999_999)
    currency = serializers.CharField(min_length=3, max_length=3)
    description = serializers.CharField(source="reference", max_length=255, default="")

    def create(self, validated_data: dict[str, Any]) -> LedgerEntry:
        return LedgerEntry.objects.record(**validated_data)

    def to_representation(self, instance: LedgerEntry) -> dict[str, Any]:
        return {
            "id": f"ch_{instance.id.hex}",
            "object": "charge",
            **super().to_representation(instance),
            "created": int(instance.created_at.timestamp()),
            "captured": True,
            "livemode": False,
            "paid": True,
            "status": "succeeded",
        }


class ChargeView(IdempotentMixin, GenericAPIView[LedgerEntry]):
    queryset = LedgerEntry.objects.all()
    serializer_class = ChargeSerializer
    authentication_classes = (SecretKeyAuthentication,)
    parser_classes = (FormParser,)

    # a status that is simulated is a fault, after which a retry is to succeed
    idempotency_policy = profiles.stripe().derive(retry_statuses=range(500, 600))

    @simulated_handler
    def post(self, request: Request) -> Response:
        charge = self.get_serializer(data=request.data)
        charge.is_valid(raise_exception=True)
        charge.save(kind=LedgerEntry.Kind.CHARGE, user=request.user)
        return Response(charge.data)

    def get_exception_handler(self) -> Any:
        return stripe_error


def stripe_error(error: Exception, context: dict[str, Any]) -> Response | None:
    """Put an error of this service in Stripe's envelope."""
    response = exception_handler(error, context)
    if response is None:
        return None
    if "detail" in response.data:
        response.data = _envelope("invalid_request_error", response.data["detail"])
    else:
        param, messages = next(iter(response.data.items()))
        response.data = _envelope("invalid_request_error", messages[0], param=param)
    return response


def _envelope(kind: str, detail: Any, **more: str) -> dict[str, Any]:
    return {"error": {"type": kind, "code": detail.code, "message": detail, **more}}
