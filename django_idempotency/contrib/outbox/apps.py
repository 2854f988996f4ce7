from __future__ import annotations

from dataclasses import replace

from django.apps import AppConfig
from django.utils.translation import gettext_lazy as _

from django_idempotency.maintenance import passes

CLEANUP = replace(
    passes.CLEANUP, name="outbox_cleanup", path="django_idempotency.contrib.outbox.maintenance.cleanup", on_each=False
)


class OutboxConfig(AppConfig):
    name = "django_idempotency.contrib.outbox"
    label = "django_idempotency_outbox"
    verbose_name = _("Outbox")
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        from django_idempotency import checks
        from django_idempotency.contrib.outbox import signals
        from django_idempotency.contrib.outbox.checks import CHECKS
        from django_idempotency.contrib.outbox.maintenance import FAMILY, outbox_events
        from django_idempotency.instrumentation import metrics
        from django_idempotency.maintenance import timeline
        from django_idempotency.reporting import events

        checks.register(CHECKS, label=self.label, page="outbox")
        metrics.register(FAMILY)
        events.register(signals.FAMILY)
        passes.register(CLEANUP)
        timeline.register(outbox_events)
