from __future__ import annotations

from dataclasses import asdict
from typing import Any
from uuid import UUID

from django.core.management.base import CommandParser
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from django_idempotency.maintenance.erasure import Erased, erase_in_batches
from django_idempotency.management.base import MaintenanceCommand, how_far, left_of_table
from django_idempotency.stats.formatting import age


class Command(MaintenanceCommand):
    about = gettext_lazy(
        "Erases the records of one scope, key or path, such as those of a user who asks for it. A retry of an erased "
        "key runs again. Exits with 1 if something is left or has not been looked at yet."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        self.add_selection_arguments(parser)
        parser.add_argument(
            "--bodies",
            action="store_true",
            help=_("erase only the headers and bodies of responses, and the paths; keys stay, and no retry runs again"),
        )
        parser.add_argument("--on-hold", action="store_true", help=_("also records on hold, which wait for a decision"))
        self.add_page_arguments(parser)

    def work(
        self,
        *,
        bodies: bool,
        on_hold: bool,
        batch: int | None,
        pause: float | None,
        max_seconds: float | None,
        after: UUID | None,
        dry_run: bool,
        verbosity: int,
        **options: Any,
    ) -> bool:
        options |= {"verbosity": verbosity}
        self.refuse_ambiguous(after)
        selected = self.selected(options)

        def sentence(erased: Erased) -> str:
            return _sentence(erased, dry_run=dry_run, bodies=bodies)

        batches = erase_in_batches(
            bodies=bodies,
            on_hold=on_hold,
            dry_run=dry_run,
            batch=batch,
            pause=pause,
            max_seconds=max_seconds,
            after=after,
            using=self.database,
            **selected,
        )
        erased = self.run(batches, sentence, verbosity=verbosity, left=lambda erased: left_of_table(erased.after))
        told = [sentence(erased)]
        if erased.erased and not bodies and not dry_run:
            told.append(_("A retry of an erased key runs again."))
        self.report(asdict(erased) | {"complete": erased.complete}, " ".join(told), options)
        return erased.complete or dry_run


def _sentence(erased: Erased, *, dry_run: bool, bodies: bool) -> str:
    counts = {_("live"): erased.live, _("on hold"): erased.on_hold, _("busy"): erased.busy}
    left = ", ".join(f"{count} {name}" for name, count in counts.items() if count) or _("none")
    if dry_run:
        told = ngettext(
            "%(count)d record to erase; left: %(left)s.", "%(count)d records to erase; left: %(left)s.", erased.erased
        )
    elif bodies:
        told = ngettext(
            "%(count)d record emptied; left: %(left)s.", "%(count)d records emptied; left: %(left)s.", erased.erased
        )
    else:
        told = ngettext(
            "%(count)d record erased; left: %(left)s.", "%(count)d records erased; left: %(left)s.", erased.erased
        )
    told %= {"count": erased.erased, "left": left}
    return " ".join(filter(None, (told, how_far(erased.finished, erased.after), _cached(erased))))


def _cached(erased: Erased) -> str:
    if not erased.cached_for:
        return ""
    told = _("The cache in front was not reached: it may replay them for another %(age)s.")
    return told % {"age": age(erased.cached_for)}
