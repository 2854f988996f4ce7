"""What the maintenance commands share: options, databases, batches that SIGTERM ends cleanly, and reports."""

from __future__ import annotations

import argparse
import json
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import fields
from typing import Any, Protocol, TypeVar
from uuid import UUID

from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import Error, connections
from django.utils.functional import Promise
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, override

from django_idempotency.exceptions import StoreUnavailable
from django_idempotency.logs import cause
from django_idempotency.maintenance.selection import Selection
from django_idempotency.printable import printable, printable_lines
from django_idempotency.stats.formatting import age
from django_idempotency.stores.connections import databases

FAILURE = 1


class Summable(Protocol):
    def __add__(self, later: Any, /) -> Any: ...


Result = TypeVar("Result", bound=Summable)


class OneLineErrors(BaseCommand):
    """Ends with one line and an exit code if the database refuses or can't be reached.

    It writes in the language in force or, with ``--json``, for programs, in English.
    """

    about: str | Promise  # the help, in the language in force
    unreachable = FAILURE  # the exit code if the database refuses or can't be reached

    def create_parser(self, prog_name: str, subcommand: str, **kwargs: Any) -> CommandParser:
        self.help = str(self.about)  # argparse takes no lazy text
        return super().create_parser(prog_name, subcommand, **kwargs)

    def execute(self, *args: Any, **options: Any) -> str | None:
        """Run, and end with one line if the database refuses or can't be reached; with ``--json``, also as JSON."""
        with override(None) if options.get("json") else nullcontext():
            return self._execute(*args, **options)

    def _execute(self, *args: Any, **options: Any) -> str | None:
        try:
            _refuse_undecodable(options)
            return super().execute(*args, **options)
        except CommandError as error:
            self._report_error(error, options)
            raise
        except (Error, StoreUnavailable) as error:
            self._report_error(error, options)
            raise CommandError(_told(error), returncode=self.unreachable) from error

    def _report_error(self, error: Exception, options: Mapping[str, Any]) -> None:
        if options.get("json"):
            self.stdout.write(json.dumps({"error": _told(error)}))


class MaintenanceCommand(OneLineErrors):
    """Takes ``--database`` and ``--json``. Reports on stdout; on a terminal, shows its progress on stderr.

    Without ``--database``, it works on each database with records in turn. If one of them fails, the others are still
    worked on, and the command then exits with 1.
    """

    database: str
    several: bool
    told: threading.Event

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "--database", choices=list(connections), help=_("alias; by default, all databases with records")
        )
        json_help = _("report as one JSON object for each database, in English")
        parser.add_argument("--json", action="store_true", help=json_help)

    def add_page_arguments(self, parser: CommandParser) -> None:
        """Add the options of a command that walks the whole table."""
        parser.add_argument("--batch", type=number(1, int), help=_("records to look at in one transaction"))
        parser.add_argument("--pause", type=seconds(0), help=_("seconds between two batches"))
        parser.add_argument("--max-seconds", type=seconds(0), help=_("begin no further batch after this time"))
        parser.add_argument("--after", type=UUID, help=_("continue after this id, where an earlier run ended"))
        parser.add_argument("--dry-run", action="store_true", help=_("only count; change nothing"))

    def add_selection_arguments(self, parser: CommandParser) -> None:
        """Add the options that select records. If several are given, a record has to match all of them."""
        parser.add_argument("--scope", help=_('a whole scope, such as "auth.user:7"'))
        parser.add_argument("--scope-prefix", help=_('the beginning of a scope, such as "acme/"'))
        parser.add_argument("--key", help=_("a whole key, as the client sent it"))
        parser.add_argument("--record", type=UUID, help=_("the id of a record, or the id that logs show"))
        parser.add_argument("--path", help=_("a whole path"))

    def selected(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options that select records. Raise ``CommandError`` if there is none, or if one is empty."""
        selected = {field.name: options[field.name] for field in fields(Selection)}
        try:
            Selection(**selected)
        except ValueError:
            raise CommandError(
                _("Pass --scope, --scope-prefix, --key, --record or --path to select records; none may be empty.")
            ) from None
        return selected

    def refuse_ambiguous(self, after: UUID | None) -> None:
        """Raise ``CommandError`` for an id to go on after if it could be in several databases."""
        if after is not None and self.several:
            raise CommandError(_("Pass --database to say in which database to continue --after that id."))

    def handle(self, *args: Any, **options: Any) -> None:
        if not self.work_on_each(**options):
            sys.exit(FAILURE)

    def work_on_each(self, *, database: str | None, **options: Any) -> bool:
        """Call ``work()`` for the database, or for each; return whether all went well."""
        wanted = databases() if database is None else (database,)
        self.several = len(wanted) > 1
        with _sigterm() as self.told:
            worked = [self._work_on(using, options) for using in wanted if not self.told.is_set()]
        return all(worked)

    def _work_on(self, using: str, options: dict[str, Any]) -> bool:
        self.database = using
        if not self.several:
            return self.work(**options)
        try:
            return self.work(**options)
        except (Error, StoreUnavailable, CommandError) as error:
            told = _told(error)
            if options["json"]:
                self.report({"error": told}, "", options)
            self.stderr.write(f"{using}: {told}")
            return False

    def work(self, *args: Any, **options: Any) -> bool:
        """Do the command's work on ``self.database``; return whether it exits with 0."""
        raise NotImplementedError

    def run(
        self,
        batches: Iterator[Result],
        sentence: Callable[[Result], str],
        *,
        verbosity: int,
        left: Callable[[Result], float] | None = None,
    ) -> Result:
        """Return the sum of the batches, of which there is at least one. On SIGTERM, end early, between two batches.

        ``left`` tells how much work is left, in any measure that falls to 0 by the end. It serves to estimate the time.
        """
        shows = verbosity > 0 and self.stderr.isatty()
        total = next(batches)
        began, whole = time.monotonic(), left(total) if left else 0.0
        for batch in _until(self.told, batches):
            total += batch
            if shows:
                rest = remaining(whole, left(total) if left else 0.0, time.monotonic() - began)
                parts = (
                    [sentence(total)]
                    if rest is None
                    else [sentence(total), _("About %(age)s more.") % {"age": age(rest)}]
                )
                self.stderr.write(f"\r{printable(' '.join(parts))}\x1b[K", self.style.NOTICE, ending="")
        if shows:
            self.stderr.write("")
        return total

    def report(self, facts: Mapping[str, Any], sentence: str, options: Mapping[str, Any]) -> None:
        """Print ``sentence``, made printable, or the facts with ``--json``."""
        if options["json"]:
            self.stdout.write(json.dumps({"database": self.database, **facts}, default=str))
        elif options["verbosity"] > 0:
            self.stdout.write(printable_lines(f"{self.database}: {sentence}" if self.several else sentence))


def _refuse_undecodable(options: Mapping[str, Any]) -> None:
    """Raise ``CommandError`` for a text that was not UTF-8 on the command line, so that no record can have it."""
    for name, value in options.items():
        if isinstance(value, str) and any("\ud800" <= character <= "\udfff" for character in value):
            raise CommandError(_("The argument %(name)s is not UTF-8.") % {"name": name})


# By the error's code: the SQLSTATE, or the number on MariaDB.
_REFUSALS: dict[str, str | Promise] = {
    **dict.fromkeys(
        ("42501", "1142", "1143", "1044", "1227"), gettext_lazy("The database refused it: its role lacks a privilege")
    ),
    **dict.fromkeys(("42P01", "1146"), gettext_lazy("A table is missing: run migrate")),
    **dict.fromkeys(("57014", "1969"), gettext_lazy("The database cancelled a statement: it took too long")),
    **dict.fromkeys(("55P03", "1205"), gettext_lazy("The database did not get a lock in time")),
}


def _told(error: Exception) -> str:
    """Return an error as printable text, without what the database quotes in it."""
    if isinstance(error, CommandError):
        return printable_lines(str(error))
    told = cause(error)
    if meaning := _REFUSALS.get(told.rpartition(" ")[2]):
        return f"{meaning} ({told})."
    return printable(_("The database failed, or can't be reached: %(cause)s") % {"cause": told})


def _until(told: threading.Event, batches: Iterator[Result]) -> Iterator[Result]:
    while not told.is_set() and (batch := next(batches, None)) is not None:
        yield batch


@contextmanager
def _sigterm() -> Iterator[threading.Event]:
    """Yield an event that SIGTERM sets instead of ending the process."""
    told = threading.Event()
    if threading.current_thread() is not threading.main_thread():  # signals can be handled only there
        yield told
        return
    before = signal.signal(signal.SIGTERM, lambda *_: told.set())
    try:
        yield told
    finally:
        signal.signal(signal.SIGTERM, before)


def _below(text: str, smallest: object) -> str:
    return _("%(value)s is less than %(least)s") % {"value": text, "least": smallest}


_UNITS = {"": 1, "s": 1, "min": 60, "h": 3600, "d": 24 * 3600}


def seconds(smallest: float) -> Callable[[str], float]:
    """Return the type of an option for a time, at least ``smallest`` seconds: ``90``, ``90s``, ``20min``, ``1.5h``."""

    def parse(text: str) -> float:
        found = re.fullmatch(r"(\d+(?:\.\d+)?) ?(s|min|h|d|)", text.strip())
        if not found:
            told = _("%(value)s is not a time; write seconds, or a number with a unit: 90s, 20min, 1.5h, 2d")
            raise argparse.ArgumentTypeError(told % {"value": text})
        value = float(found[1]) * _UNITS[found[2]]
        if value < smallest:
            raise argparse.ArgumentTypeError(_below(text, f"{smallest:g} s"))
        return value

    parse.__name__ = "time"
    return parse


IDS = 2**128


def left_of_table(after: UUID | None) -> float:
    """Return the share of all ids that come after ``after``: what is left of a table that is walked in their order."""
    return 0.0 if after is None else 1 - after.int / IDS


def remaining(whole: float, left: float, seconds: float) -> float | None:
    """Return in how many seconds ``left`` will be 0 if it fell from ``whole`` in ``seconds``; ``None`` if unknown."""
    return seconds * left / (whole - left) if 0 < left < whole else None


def how_far(finished: bool, after: UUID | None) -> str:
    """Return what a report says of a table that was not looked through to its end; empty if it was."""
    if finished or after is None:
        return ""
    told = _("%(percent)d %% looked through; continue with --after %(id)s.")
    return told % {"percent": 100 * after.int // IDS, "id": after}


def number(smallest: float, kind: type[int] | type[float] = float) -> Callable[[str], float]:
    """Return the type of an option for a number of at least ``smallest``."""

    def parse(text: str) -> float:
        value = kind(text)
        if not value >= smallest:
            raise argparse.ArgumentTypeError(_below(text, smallest))
        return value

    parse.__name__ = "number"
    return parse
