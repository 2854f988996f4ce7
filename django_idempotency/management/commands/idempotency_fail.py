from __future__ import annotations

from typing import Any

from django.core.management.base import CommandParser
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from django_idempotency.maintenance.interventions import Act, Done, Refused, fail
from django_idempotency.management.keys import DecisionCommand


class Command(DecisionCommand):
    about = gettext_lazy(
        "Marks a key as failed for good: it never runs again, and every retry gets a problem response. "
        "Exits with 1 if nothing is done."
    )
    act = Act.FAIL
    did = "failed"
    done = gettext_lazy("The key of %(scope)s is failed for good: every retry gets the problem response.")
    would = gettext_lazy("The key of %(scope)s would be failed for good: every retry would get the problem response.")

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument(
            "--status", type=int, default=410, help=_("status of the response, 400 to 599; default: 410")
        )
        parser.add_argument("--detail", default="", help=_("for the client, in the problem response"))

    def given(self, options: dict[str, Any]) -> dict[str, Any]:
        return {"status": options["status"]}

    def decide(self, record: Any, options: dict[str, Any], **named: Any) -> Done | Refused:
        return fail(record.pk, status=options["status"], detail=options["detail"], **named)
