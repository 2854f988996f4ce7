from __future__ import annotations

import json
from dataclasses import fields
from typing import Any
from uuid import UUID

from django.core.management.base import CommandError, CommandParser

from django_idempotency.maintenance.decisions import Act
from django_idempotency.maintenance.privacy import Selection, erase, export, reencrypt
from django_idempotency.management.base import MaintenanceCommand
from django_idempotency.values.printable import printable

ACTIONS = {
    "erase": (
        "Erase the records of one scope or key, such as those of a user who asks for"
        " it. A retry of an erased key runs again. Exits with 1 if something is left or"
        " has not been examined yet."
    ),
    "export": (
        "Print the selected records, such as those of one scope, as one JSON object per"
        " line. Headers and bodies of responses are left out unless --bodies is given,"
        " which prints them decrypted."
    ),
    "reencrypt": (
        "Encrypt stored responses again with the newest of ENCRYPTION_KEYS. Exits with"
        " 1 if something is left or has not been examined yet."
    ),
}
# Of the actions that select records; all of the options that are given have to match.
BODIES = {
    "erase": (
        "erase only the headers and bodies of responses, and the paths; keys stay, and"
        " no retry runs again"
    ),
    "export": "also headers and bodies of responses, decrypted; needs --by",
}
SELECTED = tuple(field.name for field in fields(Selection))
VIEW = "django_idempotency.view_response_idempotencyrecord"


class Command(MaintenanceCommand):
    help = (
        "Erases and exports the records of a caller, and encrypts stored responses"
        " again."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        for name, action in self.add_actions(parser, ACTIONS):
            self.works_on_stores = name != "reencrypt"
            super().add_arguments(action)
            if name in BODIES:
                action.add_argument(
                    "--scope", help='a whole scope, such as "auth.user:7"'
                )
                action.add_argument(
                    "--scope-prefix",
                    help='the beginning of a scope, up to a separator, as "acme/"',
                )
                action.add_argument("--key", help="a whole key, as the client sent it")
                action.add_argument("--record", type=UUID, help="the id of a record")
                action.add_argument("--bodies", action="store_true", help=BODIES[name])
                self.add_operator(action)
            if name == "erase":
                help = (
                    "also records on hold, which wait for a decision; without --bodies,"
                    " needs --by"
                )
                action.add_argument("--on-hold", action="store_true", help=help)
            if name != "export":
                self.add_bounds(action)
                action.add_argument(
                    "--after",
                    type=UUID,
                    help="continue after this id, where an earlier run ended",
                )

    def handle(self, *args: Any, action: str, **options: Any) -> None:
        self.works_on_stores = action != "reencrypt"
        self.action = action
        self.by = None
        if action == "export" and options["bodies"]:
            self.by = self.operator(options, VIEW)
        elif (
            action == "erase"
            and options["on_hold"]
            and not (options["bodies"] or options["dry_run"])
        ):
            self.by = self.operator(options, Act.ALLOW_RETRY.permission)
        super().handle(**options)

    def work(self, **options: Any) -> bool:
        if options.get("after") is not None and self.several:
            raise CommandError(
                "Pass --database to say in which database to continue --after that id."
            )
        try:
            return bool(getattr(self, f"_{self.action}")(options))
        except ValueError as error:
            raise CommandError(printable(str(error))) from error

    def _erase(self, options: dict[str, Any]) -> bool:
        what = {
            name: options[name]
            for name in (*SELECTED, "bodies", "on_hold", "after", "note")
        }
        return (
            self.run_pass(erase, options, by=self.by, **what).complete
            or options["dry_run"]
        )

    def _export(self, options: dict[str, Any]) -> bool:
        count, what = 0, {name: options[name] for name in (*SELECTED, "bodies", "note")}
        for record in export(by=self.by, **what, **self.where):
            self.stdout.write(json.dumps(self.place | record))
            count += 1
            if self.ended.is_set():
                raise CommandError(f"Ended early, records exported: {count}.")
        if options["verbosity"] > 0 and not options["json"]:
            self.stderr.write(f"{self.database}: records exported: {count}.")
        return True

    def _reencrypt(self, options: dict[str, Any]) -> bool:
        return (
            self.run_pass(reencrypt, options, after=options["after"]).complete
            or options["dry_run"]
        )
