"""What the maintenance commands share: options, a pass in batches that SIGTERM ends cleanly, and the report of it."""

from __future__ import annotations

import argparse
import json
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

from django.core.management.base import BaseCommand, CommandParser
from django.db import connections

from django_idempotency.maintenance import database

FAILURE = 1


class Summable(Protocol):
    def __add__(self, later: Any, /) -> Any: ...


Result = TypeVar("Result", bound=Summable)


class MaintenanceCommand(BaseCommand):
    """Takes ``--database`` and ``--json``. Reports on stdout; on a terminal, tells how far it is on stderr."""

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--database", choices=list(connections), help="alias; by default where the records are")
        parser.add_argument("--json", action="store_true", help="report as one JSON object")

    def run(self, batches: Iterator[Result], sentence: Callable[[Result], str], *, verbosity: int) -> Result:
        """The sum of the batches, of which there is at least one; ends early, between two, on SIGTERM."""
        shows = verbosity > 0 and self.stderr.isatty()
        with _sigterm() as told:
            total = next(batches)
            for batch in _until(told, batches):
                total += batch
                if shows:
                    self.stderr.write(f"\r{sentence(total)}", self.style.NOTICE, ending="")
        if shows:
            self.stderr.write("")
        return total

    def report(self, facts: Mapping[str, Any], sentence: str, options: Mapping[str, Any]) -> None:
        """Print ``sentence``, or with ``--json`` the facts."""
        if options["json"]:
            facts = {"database": database(options["database"]), **facts}
            self.stdout.write(json.dumps(facts, default=str))
        elif options["verbosity"] > 0:
            self.stdout.write(sentence)


def _until(told: threading.Event, batches: Iterator[Result]) -> Iterator[Result]:
    while not told.is_set() and (batch := next(batches, None)) is not None:
        yield batch


@contextmanager
def _sigterm() -> Iterator[threading.Event]:
    """An event that SIGTERM sets, instead of ending the process."""
    told = threading.Event()
    if threading.current_thread() is not threading.main_thread():  # only there can signals be handled
        yield told
        return
    before = signal.signal(signal.SIGTERM, lambda *_: told.set())
    try:
        yield told
    finally:
        signal.signal(signal.SIGTERM, before)


def number(smallest: float, kind: type[int] | type[float] = float) -> Callable[[str], float]:
    """The type of an option that takes a number not below ``smallest``."""

    def parse(text: str) -> float:
        value = kind(text)
        if not value >= smallest:
            raise argparse.ArgumentTypeError(f"{text} is less than {smallest}")
        return value

    parse.__name__ = "number"
    return parse
