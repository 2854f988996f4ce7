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
        "Sees that the lease of a key lasts for so long from now at least, for an owner that is well but does not "
        "renew it. A lease is never shortened. Exits with 1 if nothing is done."
    )
    act = Act.EXTEND
    did = "extended"
    done = gettext_lazy("The key of %(scope)s is held by its owner for that long, at least.")
    would = gettext_lazy("The key of %(scope)s would be held by its owner for that long, at least.")

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("--seconds", type=seconds(1), default=300, help=_("from now, or 20min, 2h; default: 300"))

    def given(self, options: dict[str, Any]) -> dict[str, Any]:
        return {"seconds": f"{options['seconds']:g}"}

    def decide(self, record: Any, options: dict[str, Any], **named: Any) -> Done | Refused:
        return extend(record.pk, options["seconds"], **named)
