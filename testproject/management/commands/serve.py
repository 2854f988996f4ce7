from __future__ import annotations

import subprocess
import sys
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError

from testproject.service import prepare, running


class Command(BaseCommand):
    help = (
        "Migrate, seed, and serve on $PORT with gunicorn and the payment gateway, until"
        " told to stop."
    )

    def handle(self, *args: Any, **options: Any) -> None:
        try:
            prepare()
            with running(settings.PORT, workers=settings.WORKERS) as service:
                self.stdout.write(
                    f"payments  {service.url}  (Authorization: Token alice-token or"
                    " bob-token)"
                )
                self.stdout.write(f"admin     {service.url}/admin/  (admin/admin)")
                self.stdout.write(
                    f"gateway   {service.gateway_url}/payouts?reference=…"
                )
                self.stdout.write(_about(service.relay))
                if service.consumer is not None:
                    self.stdout.write(
                        f"consumer  process {service.consumer.pid}, writes a receipt"
                        " for each charge"
                    )
                self.stdout.write("Ctrl-C stops it all.")
                sys.exit(service.gunicorn.wait())
        except KeyboardInterrupt:
            self.stdout.write("stopped")
        except OSError as error:
            raise CommandError(
                f"{settings.HOST}:{settings.PORT}: {error}; PORT=… chooses another"
                " port."
            ) from error


def _about(relay: subprocess.Popen[bytes] | None) -> str:
    if relay is not None:
        return (
            f"relay     process {relay.pid}, to"
            f" {settings.BROKER_URL.rpartition('@')[2]}"
        )
    if settings.BROKER_URL:
        return (
            "relay     none: nothing listens at"
            f" {settings.BROKER_URL.rpartition('@')[2]}"
        )
    return (
        "relay     none; BROKER_URL=amqp://guest:guest@127.0.0.1:5672// or"
        " nats://127.0.0.1:4222 has events published"
    )
