from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from django.core.management.base import CommandError, CommandParser
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from django_idempotency.maintenance.interventions import Act, Done, Refused, resolve
from django_idempotency.management.keys import DecisionCommand
from django_idempotency.outcomes import StoredResponse

STDIN = Path("-")


class Command(DecisionCommand):
    about = gettext_lazy(
        "Gives a key the response that its operation, which did take place, should have returned: every retry gets it. "
        "Exits with 1 if nothing is done."
    )
    act = Act.RESOLVE
    did = "resolved"
    done = gettext_lazy("The key of %(scope)s is resolved: every retry gets the response.")
    would = gettext_lazy("The key of %(scope)s would be resolved: every retry would get the response.")

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("--status", type=int, required=True, help=_("status of the response, 200 to 599"))
        parser.add_argument(
            "--content-type", default="application/json", help=_("type of the body; default: application/json")
        )
        body = parser.add_mutually_exclusive_group()
        body.add_argument("--body", help=_("body of the response; default: none"))
        body.add_argument(
            "--body-file", type=Path, metavar="FILE", help=_("file with the body, byte for byte; - reads stdin")
        )

    def given(self, options: dict[str, Any]) -> dict[str, Any]:
        body, content_type = _body(options), options["content_type"]
        if body and "json" in content_type:
            try:
                json.loads(body)
            except (ValueError, RecursionError) as error:
                raise CommandError(_("The body is not JSON: %(error)s") % {"error": error}) from None
        headers = (("Content-Type", content_type),)
        self.response = StoredResponse(options["status"], headers, body)
        return {"status": options["status"]}

    def decide(self, record: Any, options: dict[str, Any], **named: Any) -> Done | Refused:
        return resolve(record.pk, self.response, **named)


def _body(options: dict[str, Any]) -> bytes:
    file: Path | None = options["body_file"]
    if file is None:
        return str(options["body"] or "").encode()
    try:
        return sys.stdin.buffer.read() if file == STDIN else file.read_bytes()
    except OSError as error:
        raise CommandError(_("The body can't be read: %(error)s") % {"error": error}) from error
