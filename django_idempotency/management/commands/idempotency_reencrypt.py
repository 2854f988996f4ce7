from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any
from uuid import UUID

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import CommandError, CommandParser
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from django_idempotency.maintenance.reencryption import Reencrypted, reencrypt_in_batches
from django_idempotency.management.base import MaintenanceCommand, how_far, left_of_table


class Command(MaintenanceCommand):
    about = gettext_lazy(
        "Encrypts stored responses again with the newest of ENCRYPTION_KEYS, and reports which keys they had. Exits "
        "with 1 if something is left or has not been looked at yet."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument(
            "--unencrypted",
            action="store_true",
            help=_("also responses that are stored in clear text, whoever wrote them"),
        )
        self.add_page_arguments(parser)

    def work(self, *, after: UUID | None, dry_run: bool, verbosity: int, **options: Any) -> bool:
        self.refuse_ambiguous(after)
        names = ("unencrypted", "batch", "pause", "max_seconds")
        passed = {name: options[name] for name in names}
        batches = reencrypt_in_batches(dry_run=dry_run, after=after, using=self.database, **passed)
        try:
            done = self.run(batches, _sentence, verbosity=verbosity, left=lambda done: left_of_table(done.after))
        except ImproperlyConfigured as error:
            raise CommandError(str(error)) from error
        self.report(asdict(done) | {"complete": done.complete}, _sentence(done), options | {"verbosity": verbosity})
        return done.complete or dry_run


def _sentence(done: Reencrypted) -> str:
    counts = {_("unreadable"): done.unreadable, _("busy"): done.busy}
    told = ngettext(
        "%(count)d response encrypted again; left: %(left)s; keys before: %(keys)s; digest keys: %(digest_keys)s.",
        "%(count)d responses encrypted again; left: %(left)s; keys before: %(keys)s; digest keys: %(digest_keys)s.",
        done.reencrypted,
    )
    told %= {
        "count": done.reencrypted,
        "left": ", ".join(f"{count} {name}" for name, count in counts.items() if count) or _("none"),
        "keys": _listed(done.keys),
        "digest_keys": _listed(done.digest_keys),
    }
    return " ".join(filter(None, (told, how_far(done.finished, done.after))))


def _listed(counts: Mapping[str, int]) -> str:
    none = _("none")
    return ", ".join(f"{id or none} ({count})" for id, count in sorted(counts.items())) or none
