from __future__ import annotations

import signal
import sys
from contextlib import nullcontext
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import CommandError, CommandParser
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from django_idempotency.conf import conf
from django_idempotency.consumers.health import health_endpoint
from django_idempotency.consumers.runner import PATIENCE, runner_at
from django_idempotency.management.base import OneLineErrors


class Command(OneLineErrors):
    about = gettext_lazy("Consume messages until told to stop (SIGTERM, SIGINT), then finish what is in progress.")

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "runner",
            nargs="?",
            help=_(
                "Dotted path of a runner, or of a function that returns one. Not needed if CONSUMERS names only one."
            ),
        )
        parser.add_argument(
            "--concurrency", type=int, help=_("Handlers at a time; by default, the runner's own number.")
        )
        parser.add_argument("--health", metavar="[HOST:]PORT", help=_("Serve /healthz and, with Prometheus, /metrics."))
        parser.add_argument(
            "--patience", type=float, default=PATIENCE, help=_("Seconds to finish what is in progress (%(default)g).")
        )

    def handle(
        self, *, runner: str | None, concurrency: int | None, health: str | None, patience: float, **options: Any
    ) -> None:
        path = runner or _only(conf().consumers)
        try:
            consuming = runner_at(path)
        except (ImportError, ImproperlyConfigured) as error:
            raise CommandError(str(error)) from error
        if concurrency is not None:
            consuming.set_concurrency(concurrency)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_signal: consuming.stop())
        if health is not None and not health.rpartition(":")[2].isdecimal():
            raise CommandError(_("--health is %(health)r; it must be a port or host:port.") % {"health": health})
        with health_endpoint(consuming, health) if health else nullcontext():
            told = _("Consuming with %(runner)s, %(concurrency)d at a time.")
            self.stdout.write(told % {"runner": path, "concurrency": consuming.concurrency})
            sys.stdout.flush()
            try:
                consuming.run(patience=patience)
            except ImproperlyConfigured as error:
                raise CommandError(str(error)) from error
        counts = ", ".join(f"{count} {name}" for name, count in consuming.counts.items())
        self.stdout.write(_("Stopped: %(counts)s") % {"counts": counts or _("no messages")})


def _only(paths: Any) -> str:
    if len(paths) == 1:
        return str(paths[0])
    told = _("Pass the dotted path of the runner to run. CONSUMERS names %(runners)s.")
    raise CommandError(told % {"runners": ", ".join(paths) or _("none")})
