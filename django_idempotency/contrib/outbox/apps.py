from __future__ import annotations

from django.apps import AppConfig
from django.utils.translation import gettext_lazy as _


class OutboxConfig(AppConfig):
    name = "django_idempotency.contrib.outbox"
    label = "django_idempotency_outbox"
    verbose_name = _("Outbox")
    idempotency_setting = "OUTBOX"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        from django_idempotency.contrib.outbox import signals
        from django_idempotency.contrib.outbox.checks import CHECKS
        from django_idempotency.contrib.outbox.maintenance import FAMILY
        from django_idempotency.extending import register

        register(
            self.label,
            page="outbox",
            checks=CHECKS,
            gauges=[FAMILY],
            events=[signals.FAMILY],
        )
