from __future__ import annotations

import sys
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError

from testproject.service import prepare, running


class Command(BaseCommand):
    help = "Migrate, seed, and serve on $PORT with gunicorn and the payment gateway, until told to stop."

    def handle(self, *args: Any, **options: Any) -> None:
        try:
            prepare()
            with running(settings.PORT) as service:
                self.stdout.write(f"payments  {service.url}  (Authorization: Token alice-token or bob-token)")
                self.stdout.write(f"admin     {service.url}/admin/  (admin/admin)")
                self.stdout.write(f"gateway   {service.gateway_url}/payouts?reference=…")
                self.stdout.write("Ctrl-C stops it all.")
                sys.exit(service.gunicorn.wait())
        except KeyboardInterrupt:
            self.stdout.write("stopped")
        except OSError as error:
            raise CommandError(f"{settings.HOST}:{settings.PORT}: {error}; PORT=… chooses another port.") from error
