"""A handler that leaves one effect, and how many there are."""

from __future__ import annotations

from typing import Any

from django.contrib.auth import get_user_model

from django_idempotency.consumers import Message
from testproject.models import LedgerEntry

MESSAGE = Message("payments", "id-1", b'{"amount": 5, "currency": "EUR"}')


def pay(message: Message, context: Any) -> dict[str, int]:
    user, _created = get_user_model().objects.get_or_create(username="carol")
    LedgerEntry.objects.create(user=user, amount=5, reference=message.id)
    return {"paid": 5, "attempt": context.attempt}
