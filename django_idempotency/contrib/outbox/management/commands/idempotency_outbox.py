from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from threading import Event
from typing import Any
from uuid import UUID

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import CommandError, CommandParser
from django.db import connections

from django_idempotency.contrib.outbox import maintenance
from django_idempotency.contrib.outbox.conf import options as settings
from django_idempotency.contrib.outbox.maintenance import Act, decide
from django_idempotency.contrib.outbox.models import OutboxEvent
from django_idempotency.contrib.outbox.publishing import database as outbox_database
from django_idempotency.contrib.outbox.relay import EventRelay
from django_idempotency.extending import in_zone
from django_idempotency.extending.brokers import PublisherUnavailable
from django_idempotency.extending.operators import MaintenanceCommand, ended_by_signal

SHOWN = ("event_id", "topic", "key", "attempts", "error", "created_at", "given_up_at")
ACTIONS = {
    "relay": (
        "Publish the events of the outbox until SIGTERM or SIGINT, then finish what is"
        " under way."
    ),
    "status": "Show pending, failing and dead events, and live relays, by publisher.",
    "dead": "List dead letters, the oldest first.",
    "requeue": "Try dead letters again.",
    "discard": "Delete dead letters for good; later events of their keys go on.",
}
DONE = {Act.REQUEUE: "requeued", Act.DISCARD: "discarded"}


class Command(MaintenanceCommand):
    help = (
        "Publishes the events of the outbox, shows its state, and handles dead letters."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        for name, action in self.add_actions(parser, ACTIONS):
            help = "alias; by default, the database that publish writes to"
            action.add_argument("--database", choices=list(connections), help=help)
            if name != "relay":
                action.add_argument(
                    "--json",
                    action="store_true",
                    help="report as JSON, one object per line",
                )
            if name != "status":
                getattr(self, f"_add_{name}")(action)

    def _add_relay(self, action: CommandParser) -> None:
        action.add_argument(
            "--publisher",
            action="append",
            help="only this publisher; may be given several times",
        )
        action.add_argument(
            "--relays",
            type=int,
            default=1,
            help="number of relays for each publisher; each gets a share of the events",
        )
        action.add_argument(
            "--once", action="store_true", help="publish pending events, then exit"
        )

    def _add_dead(self, action: CommandParser) -> None:
        action.add_argument("--topic", help="only of this topic")
        action.add_argument("--limit", type=int, default=100, help="at most this many")

    def _add_requeue(self, action: CommandParser) -> None:
        action.add_argument("event", nargs="*", type=UUID, help="ids of events")
        action.add_argument("--topic", help="all of this topic")
        action.add_argument("--all", action="store_true", help="all dead letters")
        self.add_operator(action)

    def _add_discard(self, action: CommandParser) -> None:
        action.add_argument("event", nargs="+", type=UUID, help="ids of events")
        self.add_operator(action)

    def handle(self, *, action: str, database: str | None, **options: Any) -> None:
        self.database, self.several = outbox_database(database), False
        getattr(self, f"_{action}")(options)

    def _status(self, options: dict[str, Any]) -> None:
        for figures in maintenance.figures(using=self.database):
            error = (
                maintenance.first_failure(figures.publisher, using=self.database)
                if figures.failing
                else ""
            )
            parts = [f"{figures.publisher}: {figures.pending} pending"]
            if figures.oldest:
                parts.append(
                    "the oldest since"
                    f" {in_zone(figures.oldest).isoformat(' ', 'seconds')}"
                )
            others = (
                f"{figures.failing} failing, {figures.dead} dead, {figures.relays} live"
                " relays."
            )
            why = f" The first failing event: {error}" if error else ""
            self.report(
                {**asdict(figures), "error": error},
                f"{', '.join(parts)}; {others}{why}",
                options,
            )

    def _dead(self, options: dict[str, Any]) -> None:
        for event in maintenance.dead_letters(
            topic=options["topic"], using=self.database
        )[: options["limit"]]:
            self.report(
                {name: getattr(event, name) for name in SHOWN}, _line(event), options
            )

    def _requeue(self, options: dict[str, Any]) -> None:
        if not (options["event"] or options["topic"] or options["all"]):
            raise CommandError("Pass the ids of events, --topic or --all.")
        self._decide(Act.REQUEUE, options, topic=options["topic"])

    def _discard(self, options: dict[str, Any]) -> None:
        self._decide(Act.DISCARD, options)

    def _decide(
        self, act: Act, options: dict[str, Any], topic: str | None = None
    ) -> None:
        by = self.operator(options, act.permission)
        letters = maintenance.dead_letters(
            options["event"] or None, topic=topic, using=self.database
        )
        done, refused = decide(act, letters, by=by, note=options["note"])
        left_alone = "".join(
            f" {count} left alone: {why.label}" for why, count in refused.items()
        )
        if left_alone and not done:
            raise CommandError(left_alone.strip())
        facts = {
            DONE[act]: done,
            "refused": {why.value: count for why, count in refused.items()},
        }
        self.report(facts, f"{done} {DONE[act]}.{left_alone}", options)

    # --- relaying

    def _relay(self, options: dict[str, Any]) -> None:
        aliases = options["publisher"] or list(settings().publishers)
        if not aliases:
            raise CommandError(
                "There is nothing to relay to: OUTBOX in the IDEMPOTENCY setting has no"
                " PUBLISHERS."
            )
        if options["relays"] < 1 or (options["once"] and options["relays"] > 1):
            raise CommandError("--relays must be at least 1, and 1 with --once.")
        try:
            relays = [
                EventRelay(alias, using=self.database)
                for alias in aliases * options["relays"]
            ]
        except ImproperlyConfigured as error:
            raise CommandError(str(error)) from error
        (self._run_once if options["once"] else self._run)(relays, options["verbosity"])

    def _run_once(self, relays: Sequence[EventRelay], verbosity: int) -> None:
        for relay in relays:
            try:
                published = relay.run_once()
            except PublisherUnavailable as error:
                raise CommandError(f"{relay.alias}: {error}") from error
            if verbosity > 0:
                self.stdout.write(f"{relay.alias}: {published} published")

    def _run(self, relays: Sequence[EventRelay], verbosity: int) -> None:
        """Run each relay in a thread of its own, so that none waits for another's
        broker. If one fails, all end.
        """
        if verbosity > 0:
            self.stdout.write(
                f"relaying to {', '.join(dict.fromkeys(r.alias for r in relays))}"
            )
        with (
            ended_by_signal() as stop,
            ThreadPoolExecutor(len(relays), "relay") as threads,
        ):
            running = [threads.submit(_run, relay, stop) for relay in relays]
        for relay in running:
            relay.result()
        if verbosity > 0:
            self.stdout.write(f"{sum(relay.published for relay in relays)} published")


def _run(relay: EventRelay, stop: Event) -> None:
    try:
        relay.run(stop)
    finally:
        stop.set()


def _line(event: OutboxEvent) -> str:
    key = f" key {event.key}" if event.key else ""
    attempts = "1 attempt" if event.attempts == 1 else f"{event.attempts} attempts"
    return f"{event.event_id} {event.topic}{key}, {attempts}: {event.error}"
