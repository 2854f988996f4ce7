from __future__ import annotations

import signal
import sys
from contextlib import nullcontext
from typing import Any

from django.core.management.base import CommandError, CommandParser

from django_idempotency.conf import conf
from django_idempotency.management.base import OneLineErrors
from django_idempotency.messages.health import health_endpoint
from django_idempotency.messages.runner import runner_at


class Command(OneLineErrors):
    help = (
        "Consume messages until stopped (SIGTERM, SIGINT), then finish those in"
        " progress."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "runner",
            nargs="?",
            help=(
                "Dotted path of a runner, or of a function that returns one. Not needed"
                " if CONSUMERS names only one."
            ),
        )
        parser.add_argument(
            "--health",
            metavar="[HOST:]PORT",
            help="Serve /healthz and, with Prometheus, /metrics.",
        )

    def handle(self, *, runner: str | None, health: str | None, **options: Any) -> None:
        path = runner or _only(conf().consumers)
        try:
            consuming = runner_at(path)
        except ImportError as error:
            raise CommandError(str(error)) from error
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_signal: consuming.stop())
        if health is not None and not health.rpartition(":")[2].isdecimal():
            raise CommandError(
                f"--health is {health!r}; it must be a port or host:port."
            )
        with health_endpoint(consuming, health) if health else nullcontext():
            self.stdout.write(
                f"Consuming with {path}, at most {consuming.batch} at a time."
            )
            sys.stdout.flush()
            consuming.run()
        counts = ", ".join(
            f"{count} {name}" for name, count in consuming.counts.items()
        )
        self.stdout.write(f"Stopped: {counts or 'no messages'}")


def _only(paths: Any) -> str:
    if len(paths) == 1:
        return str(paths[0])
    runners = ", ".join(paths) or "none"
    raise CommandError(
        f"Pass the dotted path of the runner to run. CONSUMERS names {runners}."
    )
