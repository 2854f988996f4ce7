from __future__ import annotations

import json
from typing import Any

from django.core.management.base import CommandError, CommandParser
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from django_idempotency.maintenance.export import export
from django_idempotency.management.base import MaintenanceCommand


class Command(MaintenanceCommand):
    about = gettext_lazy(
        "Prints the selected records, such as those of one scope, as one JSON object per line. Headers and bodies of "
        "responses are left out unless --bodies is given, which prints them decrypted."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        self.add_selection_arguments(parser)
        parser.add_argument("--bodies", action="store_true", help=_("also headers and bodies of responses, decrypted"))

    def work(self, *, bodies: bool, **options: Any) -> bool:
        selected = self.selected(options)
        count = 0
        for record in export(bodies=bodies, using=self.database, **selected):
            self.stdout.write(json.dumps({"database": self.database, **record}))
            count += 1
            if self.told.is_set():
                told = ngettext("Ended early, after %(count)d record.", "Ended early, after %(count)d records.", count)
                raise CommandError(told % {"count": count})
        if options["verbosity"] > 0 and not options["json"]:
            told = ngettext("%(count)d record exported.", "%(count)d records exported.", count)
            self.stderr.write(f"{self.database}: {told % {'count': count}}")
        return True
