from __future__ import annotations

from django.apps import AppConfig
from django.db.models.signals import post_migrate
from django.utils.translation import gettext_lazy as _


class DjangoIdempotencyConfig(AppConfig):
    name = "django_idempotency"
    verbose_name = _("Idempotency")
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        from django_idempotency import instrumentation
        from django_idempotency.checks import register
        from django_idempotency.checks.catalogue import CHECKS
        from django_idempotency.http import handlers
        from django_idempotency.reporting import events
        from django_idempotency.stores.claim_function import create_after_migrate

        register(CHECKS, label=self.label, page="checks")
        handlers.install()
        events.receivers.register(events.log_event)
        post_migrate.connect(create_after_migrate, sender=self)
        instrumentation.install()
