from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import CommandError, CommandParser
from django.db import connections
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from django_idempotency.management.base import OneLineErrors
from django_idempotency.outbox.conf import options
from django_idempotency.outbox.maintenance import live_relays
from django_idempotency.outbox.publishers.base import PublisherUnavailable
from django_idempotency.outbox.relay import EventRelay


class Command(OneLineErrors):
    about = gettext_lazy("Publishes the events of the outbox until SIGTERM or SIGINT, then finishes what is under way.")

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "--database", choices=list(connections), help=_("alias; by default, the database that publish writes to")
        )
        parser.add_argument("--publisher", action="append", help=_("only this publisher; may be given several times"))
        parser.add_argument("--once", action="store_true", help=_("publish what there is, then exit"))
        parser.add_argument(
            "--health",
            action="store_true",
            help=_("exit with 0 if every publisher has a live relay on this host, else with 1"),
        )

    def handle(
        self,
        *args: Any,
        database: str | None,
        publisher: list[str] | None,
        once: bool,
        health: bool,
        verbosity: int,
        **options_: Any,
    ) -> None:
        aliases = publisher or list(options().publishers)
        if not aliases:
            raise CommandError(_("There is nothing to relay to: OUTBOX in the IDEMPOTENCY setting has no PUBLISHERS."))
        if health:
            self._check(aliases, database)
            return
        try:
            relays = [EventRelay(alias, using=database) for alias in aliases]
        except ImproperlyConfigured as error:
            raise CommandError(str(error)) from error
        if once:
            self._run_once(relays, verbosity)
        else:
            self._run(relays, verbosity)

    def _check(self, aliases: Sequence[str], database: str | None) -> None:
        here = live_relays(using=database).filter(host=socket.gethostname()[:255])
        alive = set(here.values_list("publisher", flat=True))
        if missing := [alias for alias in aliases if alias not in alive]:
            raise CommandError(_("No live relay on this host for %(publishers)s.") % {"publishers": ", ".join(missing)})
        self.stdout.write(_("alive: %(publishers)s") % {"publishers": ", ".join(aliases)})

    def _run_once(self, relays: Sequence[EventRelay], verbosity: int) -> None:
        for relay in relays:
            try:
                published = relay.run_once()
            except PublisherUnavailable as error:
                raise CommandError(f"{relay.alias}: {error}") from error
            if verbosity > 0:
                self.stdout.write(f"{relay.alias}: {_published(published)}")

    def _run(self, relays: Sequence[EventRelay], verbosity: int) -> None:
        if verbosity > 0:
            publishers = ", ".join(relay.alias for relay in relays)
            self.stdout.write(_("relaying to %(publishers)s") % {"publishers": publishers})
        with _told_to_stop() as stop:
            errors = _run_all(relays, stop)
        for error in errors:
            raise error
        if verbosity > 0:
            self.stdout.write(_published(sum(relay.published for relay in relays)))


def _published(count: int) -> str:
    return _("%(count)d published") % {"count": count}


def _run_all(relays: Sequence[EventRelay], stop: threading.Event) -> list[BaseException]:
    """Run each relay in a thread of its own, so that none waits for another's broker. If one fails, all end."""
    errors: list[BaseException] = []

    def run(relay: EventRelay) -> None:
        try:
            relay.run(stop)
        except BaseException as error:  # raised again by the command, in the main thread
            errors.append(error)
        finally:
            stop.set()

    threads = [threading.Thread(target=run, args=(relay,), name=f"relay-{relay.alias}") for relay in relays]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


@contextmanager
def _told_to_stop() -> Iterator[threading.Event]:
    """Yield an event that SIGTERM and SIGINT set."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():  # signals can only be handled there
        yield stop
        return
    before = {number: signal.signal(number, lambda *_: stop.set()) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
