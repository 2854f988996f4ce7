from __future__ import annotations

from typing import Any

from django.utils.translation import gettext_lazy

from django_idempotency.maintenance.interventions import Act, Done, Refused, allow_retry
from django_idempotency.management.keys import DecisionCommand


class Command(DecisionCommand):
    about = gettext_lazy(
        "Lets the next request with a key run again, if the key is on hold or its owner is gone. First make sure "
        "that the operation did not take place. Exits with 1 if nothing is done."
    )
    act = Act.ALLOW_RETRY
    did = "allowed"
    done = gettext_lazy("The key of %(scope)s is free: its next request runs again.")
    would = gettext_lazy("The key of %(scope)s would be free: its next request would run again.")

    def decide(self, record: Any, options: dict[str, Any], **named: Any) -> Done | Refused:
        return allow_retry(record.pk, **named)
