"""A handler that leaves one effect, and how many there are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.contrib.auth import get_user_model
from django.db import connections

from django_idempotency.messages import Message
from testproject.models import LedgerEntry

MESSAGE = Message("payments", "id-1", b'{"amount": 5, "currency": "EUR"}')


def pay(message: Message, context: Any) -> dict[str, int]:
    user, _created = get_user_model().objects.get_or_create(username="carol")
    LedgerEntry.objects.create(user=user, amount=5, reference=message.id)
    return {"paid": 5, "attempt": context.attempt}


def pay_from(attempt: int, *ids: str) -> Callable[[Message, Any], dict[str, int]]:
    """A handler that fails before this attempt at each of these messages, or at all."""

    def handle(message: Message, context: Any) -> dict[str, int]:
        if context.attempt < attempt and (not ids or message.id in ids):
            raise LookupError("not yet")
        return pay(message, context)

    return handle


def reading(alias: str) -> Callable[[Message, Any], None]:
    """A handler that reads from the database ``alias``; its connection breaks after
    messages that are called "last".
    """

    def read(message: Message, context: Any) -> None:
        with connections[alias].cursor() as cursor:
            cursor.execute("SELECT 1")
        if message.id.startswith("last"):
            connections[alias].connection.close()

    return read
