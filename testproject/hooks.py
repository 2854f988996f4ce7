"""The webhook by which the payment gateway reports events."""

from __future__ import annotations

import json
from typing import Any

from django.contrib.auth import get_user_model

from django_idempotency.engine import Context
from django_idempotency.messages import Message, RejectMessage
from django_idempotency.values.policy import Policy
from django_idempotency.webhooks import WebhookView, standard_webhook
from testproject.models import LedgerEntry

SECRET = "whsec_d2ViaG9vay1zZWNyZXQtZm9yLXRlc3Rz"


class GatewayHook(WebhookView):
    """Books one deposit per event, for alice."""

    source = "gateway"
    verify = standard_webhook(SECRET)
    # longer than a signature is accepted, whatever the settings say
    policy = Policy(retention=24 * 60 * 60)

    def handle(self, message: Message, context: Context) -> dict[str, Any]:
        try:
            data = json.loads(message.body)["data"]
            deposit = {
                "amount": int(data["amount"]),
                "reference": str(data["reference"]),
            }
        except (ValueError, TypeError, KeyError) as error:
            raise RejectMessage(
                f"the event does not have the agreed form: {error!r}"
            ) from error
        user = get_user_model().objects.get(username="alice")
        entry = LedgerEntry.objects.create(
            kind=LedgerEntry.Kind.DEPOSIT, user=user, currency="eur", **deposit
        )
        return {"id": str(entry.pk)}
