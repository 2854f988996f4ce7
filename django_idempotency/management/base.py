"""What the maintenance commands share: options, databases, batches that a signal ends
cleanly, and reports.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import threading
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import Any, TypeVar

from django.contrib.auth import get_user_model
from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import Error, connections
from django.utils.text import capfirst
from django.utils.translation import override

from django_idempotency.maintenance.formatting import age
from django_idempotency.maintenance.history import is_kept
from django_idempotency.maintenance.stats import outside_store, outside_stores
from django_idempotency.maintenance.sweep import Bounds, Swept
from django_idempotency.reporting.logs import cause
from django_idempotency.stores import Store
from django_idempotency.stores.connections import databases
from django_idempotency.values.exceptions import IdempotencyError, StoreUnavailable
from django_idempotency.values.printable import printable, printable_lines

FAILURE = 1
LONGEST_NOTE = 200  # characters, as in the admin


T = TypeVar("T")
Work = Callable[..., bool]
# What ends a command with one line: errors of databases and stores, and of their
# configuration.
EXPECTED = (Error, ImproperlyConfigured, IdempotencyError)


class OneLineErrors(BaseCommand):
    """Writes in English. Ends with one line and an exit code if the database refuses or
    can't be reached.
    """

    unreachable = FAILURE  # the exit code if the database refuses or can't be reached

    def add_actions(
        self, parser: CommandParser, actions: Mapping[str, str]
    ) -> Iterator[tuple[str, CommandParser]]:
        """Add ``actions``, each with its help; yield the name and parser of each."""
        family = parser.add_subparsers(dest="action", required=True)
        for name, help in actions.items():
            action = family.add_parser(name, help=help, description=help)
            action.add_argument(
                "-v",
                "--verbosity",
                type=int,
                choices=range(4),
                default=argparse.SUPPRESS,
            )
            yield name, action

    def execute(self, *args: Any, **options: Any) -> str | None:
        """Run, and end with one line if the database refuses or can't be reached; with
        ``--json``, also as JSON.
        """
        with override(None):
            try:
                return super().execute(*args, **options)
            except (*EXPECTED, CommandError) as error:
                sentence = _sentence_about(error)
                if options.get("json"):
                    self.stdout.write(json.dumps({"error": sentence}))
                if isinstance(error, CommandError):
                    raise
                raise CommandError(sentence, returncode=self.unreachable) from error


class MaintenanceCommand(OneLineErrors):
    """Takes ``--database`` and ``--json``. Reports on stdout; on a terminal, shows its
    progress on stderr.

    Without ``--database``, it works on each database with records in turn, and then, if
    it ``works_on_stores``, on each store outside the databases. If one of them fails,
    the others are still worked on. The command then exits with 1, and also if a signal
    came before the last of them.
    """

    works_on_stores = False
    database: str  # the alias, of the database or of the store
    store: Store | None = None
    several: bool
    ended: threading.Event

    def add_arguments(self, parser: CommandParser) -> None:
        where = parser.add_mutually_exclusive_group()
        where.add_argument(
            "--database",
            choices=list(connections),
            help="alias; by default, all databases with records",
        )
        if self.works_on_stores:
            where.add_argument(
                "--store",
                help=(
                    "alias in STORES of a store outside the databases; by default, all"
                ),
            )
        parser.add_argument(
            "--json",
            action="store_true",
            help="report as one JSON object for each database or store",
        )

    def add_bounds(self, parser: CommandParser) -> None:
        """Add the options that bound a pass."""
        parser.add_argument("--batch", type=number, help="records in one transaction")
        parser.add_argument("--pause", type=seconds, help="seconds between two batches")
        parser.add_argument(
            "--max-seconds", type=seconds, help="begin no further batch after this time"
        )
        parser.add_argument(
            "--dry-run", action="store_true", help="only count; change nothing"
        )

    def add_operator(self, parser: CommandParser) -> None:
        parser.add_argument(
            "--by",
            metavar="USER",
            help="name of the user who does this, for the record's history",
        )
        parser.add_argument("--note", default="", help="why, for the record's history")

    def operator(self, options: Mapping[str, Any], permission: str) -> Any:
        """Return the named user, who must have the admin's permission for it; only the
        name if there is no admin.
        """
        if len(options["note"]) > LONGEST_NOTE:
            raise CommandError(
                f"--note has {len(options['note'])} characters; at most {LONGEST_NOTE}"
                " are allowed."
            )
        if not is_kept():
            return options["by"]
        if not options["by"]:
            raise CommandError(
                "Pass --by with the name of the user who does this: it is kept in the"
                " record's history."
            )
        model: Any = get_user_model()
        name = printable(options["by"])
        try:
            user = model._default_manager.get_by_natural_key(options["by"])
        except model.DoesNotExist:
            raise CommandError(f"There is no user {name}.") from None
        if not user.has_perm(permission):  # inactive users have none
            raise CommandError(
                f"The user {name} does not have the permission {permission}."
            )
        return user

    def handle(self, *args: Any, **options: Any) -> None:
        if not self.work_on_each(self.work, **options):
            sys.exit(FAILURE)

    def work_on_each(
        self,
        work: Work,
        *,
        database: str | None,
        store: str | None = None,
        **options: Any,
    ) -> bool:
        """Call ``work`` for the database or store, or for each; return whether all went
        well.
        """
        wanted: list[tuple[str, Store | None]] = []
        if store is None:
            wanted += [
                (alias, None)
                for alias in (databases() if database is None else (database,))
            ]
        if self.works_on_stores and database is None:
            wanted += [
                (alias, outside_store(alias))
                for alias in outside_stores()
                if store in (None, alias)
            ]
        if not wanted:
            raise CommandError(f"STORES has no store {store!r} outside the databases.")
        self.several = len(wanted) > 1
        with ended_by_signal() as self.ended:
            worked = [
                self._work_on(*place, work, options)
                for place in wanted
                if not self.ended.is_set()
            ]
        return all(worked) and len(worked) == len(wanted)

    def _work_on(
        self, alias: str, store: Store | None, work: Work, options: dict[str, Any]
    ) -> bool:
        self.database, self.store = alias, store
        try:
            return work(**options)
        except (*EXPECTED, CommandError) as error:
            if not self.several:
                raise
            sentence = _sentence_about(error)
            if options["json"]:
                self.report({"error": sentence}, "", options)
            self.stderr.write(f"{alias}: {sentence}")
            return False

    @abstractmethod
    def work(self, *args: Any, **options: Any) -> bool:
        """Do the command's work on ``self.database`` or ``self.store``; return whether
        it exits with 0.
        """

    @property
    def where(self) -> dict[str, Any]:
        """The argument of functions of maintenance for the database or store that is
        worked on.
        """
        return {"using": self.database} if self.store is None else {"store": self.store}

    @property
    def place(self) -> dict[str, str]:
        """The same for JSON."""
        return {"database" if self.store is None else "store": self.database}

    def run(
        self,
        work: Callable[..., T],
        sentence: Callable[[T], str],
        verbosity: int,
        **arguments: Any,
    ) -> T:
        """Return the result of ``work``, which a signal ends early, between two
        steps.
        """
        shows = verbosity > 0 and self.stderr.isatty()

        def go_on(total: T) -> bool:
            if shows:
                self.stderr.write(
                    f"\r{printable(sentence(total))}\x1b[K",
                    self.style.NOTICE,
                    ending="",
                )
            return not self.ended.is_set()

        total = work(**self.where, **arguments, go_on=go_on)
        if shows:
            self.stderr.write("")
        return total

    def run_pass(
        self, work: Callable[..., Swept], options: Mapping[str, Any], **more: Any
    ) -> Swept:
        """``run`` a pass with the bounds in ``options`` and ``more``, and report the
        sum.
        """
        bounds = {
            name: options[name]
            for name in Bounds.__annotations__
            if options.get(name) is not None
        }
        describe = partial(sentence, dry_run=options["dry_run"])
        swept: Swept = self.run(work, describe, options["verbosity"], **bounds, **more)
        self.report(
            asdict(swept) | {"complete": swept.complete}, describe(swept), options
        )
        for id, why in swept.bad.items():
            self.stderr.write(f"{id}: {why}")
        return swept

    def report(
        self, facts: Mapping[str, Any], sentence: str, options: Mapping[str, Any]
    ) -> None:
        """Print ``sentence``, made printable, or the facts with ``--json``."""
        if options["json"]:
            self.stdout.write(json.dumps(self.place | dict(facts), default=str))
        elif options["verbosity"] > 0:
            self.stdout.write(
                printable_lines(
                    f"{self.database}: {sentence}" if self.several else sentence
                )
            )


WORDS = {
    "failed": "freed",
    "on_hold": "put on hold",
    "dropped": "bodies dropped",
    "reencrypted": "encrypted again",
}


def sentence(swept: Swept, *, dry_run: bool = False) -> str:
    """Return what a pass has done, in words."""
    done = ", ".join(
        f"{WORDS.get(name, name)}: {count}" for name, count in swept.done.items()
    )
    parts = [f"would be {done}" if dry_run else done]
    if swept.left:
        left = [
            f"{count} {name.replace('_', ' ')}"
            for name, count in swept.left.items()
            if count
        ]
        parts.append(f"left alone: {', '.join(left) or 'none'}")
    if swept.bad:
        parts.append(f"could not be written: {len(swept.bad)}")
    if not dry_run:
        parts.append(age(swept.seconds))
    if swept.cached_for:
        parts.append(
            "the cache in front can't be reached, and may replay them for another"
            f" {age(swept.cached_for)}"
        )
    if not swept.finished:
        parts.append(_how_far(swept))
    return f"{capfirst('; '.join(parts))}."


def _how_far(swept: Swept) -> str:
    if swept.after is not None:
        return (
            f"{100 * swept.after.int >> 128} % examined; continue with --after"
            f" {swept.after}"
        )
    return f"{age(swept.lag)} behind" if swept.lag else "more is left"


def _sentence_about(error: Exception) -> str:
    """Return an error as printable text, without what the database quotes in it."""
    if not isinstance(error, (Error, StoreUnavailable)):
        return printable_lines(str(error))
    return printable(
        f"The database or store failed, or can't be reached: {cause(error)}"
    )


@contextmanager
def ended_by_signal() -> Iterator[threading.Event]:
    """Yield an event that SIGTERM or SIGINT sets instead of ending the process. The
    second signal ends it.
    """
    ended = threading.Event()
    # signals can be handled only there
    if threading.current_thread() is not threading.main_thread():
        yield ended
        return
    before = {
        number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)
    }

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def end(*_signal: object) -> None:
        ended.set()
        restore()

    for number in before:
        signal.signal(number, end)
    try:
        yield ended
    finally:
        restore()


def seconds(text: str) -> float:
    """Be the type of an option for a time in seconds."""
    if not 0 <= (value := float(text)) < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a time in seconds")
    return value


def number(text: str) -> int:
    """Be the type of an option for a whole number of at least 1."""
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return value
