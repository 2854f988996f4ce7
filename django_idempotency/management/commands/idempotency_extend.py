from __future__ import annotations

from typing import Any

from django.core.management.base import CommandParser
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from django_idempotency.maintenance.interventions import Act, Done, Refused, extend
from django_idempotency.management.base import seconds
from django_idempotency.management.keys import DecisionCommand


class Command(DecisionCommand):
    about = gettext_lazy(
        "Makes the lease of a key last at least the given time from now, for an owner that is well but does not "
        "renew it. A lease is never shortened. Exits with 1 if nothing is done."
    )
    act = Act.EXTEND
    did = "extended"
    done = gettext_lazy("The key of %(scope)s is held by its owner for at least that long.")
    would = gettext_lazy("The key of %(scope)s would be held by its owner for at least that long.")

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument(
            "--seconds",
            type=seconds(1),
            default=300,
            help=_("seconds from now, or a time such as 20min or 2h; default: 300"),
        )

    def given(self, options: dict[str, Any]) -> dict[str, Any]:
        return {"seconds": f"{options['seconds']:g}"}

    def decide(self, record: Any, options: dict[str, Any], **named: Any) -> Done | Refused:
        return extend(record.pk, options["seconds"], **named)
