from __future__ import annotations

from typing import Any

from rest_framework import serializers

from testproject.models import LedgerEntry


class PaymentSerializer(serializers.ModelSerializer[LedgerEntry]):
    amount = serializers.IntegerField(min_value=1, max_value=10**12)
    currency = serializers.CharField(min_length=3, max_length=3)

    class Meta:
        model = LedgerEntry
        fields = ("id", "kind", "amount", "currency", "reference", "created_at")
        read_only_fields = ("kind",)

    def create(self, validated_data: dict[str, Any]) -> LedgerEntry:
        return LedgerEntry.objects.record(**validated_data)


class OrderSerializer(PaymentSerializer):
    """Orders and refunds may leave out the amount."""

    amount = serializers.IntegerField(min_value=0, max_value=10**12, default=0)
    currency = serializers.CharField(min_length=3, max_length=3, default="eur")
