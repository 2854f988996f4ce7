"""Checkout sessions as agents make them, by the Agentic and the Universal Commerce
Protocol.
"""

from __future__ import annotations

import uuid
from typing import Any

from django.shortcuts import get_object_or_404
from rest_framework import serializers
from rest_framework.authentication import TokenAuthentication
from rest_framework.generics import GenericAPIView
from rest_framework.parsers import JSONParser
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import exception_handler

from django_idempotency.contrib import profiles
from django_idempotency.rest_framework import IdempotentMixin
from testproject.models import LedgerEntry
from testproject.simulate import simulated_handler

Kind = LedgerEntry.Kind


class BearerAuthentication(TokenAuthentication):
    keyword = "Bearer"


class ItemSerializer(serializers.Serializer[Any]):
    id = serializers.CharField(max_length=255)
    quantity = serializers.IntegerField(min_value=1, max_value=10**6)


class SessionSerializer(serializers.Serializer[Any]):
    items = ItemSerializer(many=True, allow_empty=False)
    reference = serializers.CharField(max_length=255, default="")


class CompletionSerializer(SessionSerializer):
    items = ItemSerializer(many=True, required=False)


class CheckoutView(IdempotentMixin, GenericAPIView[LedgerEntry]):
    idempotency_policy = profiles.acp()
    authentication_classes = (BearerAuthentication,)
    parser_classes = (JSONParser,)
    serializer_class: Any = SessionSerializer
    queryset = LedgerEntry.objects.all()

    def book(self, kind: Kind, request: Request, reference: str = "") -> dict[str, Any]:
        sent = self.get_serializer(data=request.data)
        sent.is_valid(raise_exception=True)
        items = sent.validated_data.get("items", [])
        entry = LedgerEntry.objects.record(
            kind=kind,
            user=request.user,
            amount=sum(item["quantity"] for item in items),
            currency="usd",
            reference=sent.validated_data["reference"] or reference,
        )
        return {"id": str(entry.id), "items": items, "reference": entry.reference}

    def get_exception_handler(self) -> Any:
        return flat_error


class Sessions(CheckoutView):
    @simulated_handler
    def post(self, request: Request) -> Response:
        session = self.book(Kind.ORDER, request)
        return Response({**session, "status": "ready_for_payment"}, status=201)


class Completion(CheckoutView):
    serializer_class = CompletionSerializer

    @simulated_handler
    def post(self, request: Request, id: uuid.UUID) -> Response:
        session = get_object_or_404(
            LedgerEntry, id=id, user=request.user, kind=Kind.ORDER
        )
        order = self.book(Kind.CHARGE, request, session.reference)
        return Response({"id": str(id), "status": "completed", "order": order})


def flat_error(error: Exception, context: dict[str, Any]) -> Response | None:
    """Return an error of this service as the protocols have it."""
    response = exception_handler(error, context)
    if response is None:
        return None
    message = str(response.data.get("detail", response.data))
    code = getattr(response.data.get("detail"), "code", "invalid")
    response.data = {
        "type": "invalid_request",
        "code": code,
        "message": message,
        "content": message,
    }
    return response
