from __future__ import annotations

from django.apps import AppConfig, apps
from django.utils.translation import gettext_lazy as _


class OperationsConfig(AppConfig):
    name = "django_idempotency.contrib.operations"
    label = "django_idempotency_operations"
    verbose_name = _("Deferred operations")

    def ready(self) -> None:
        from django_idempotency.contrib.operations import operators, running
        from django_idempotency.contrib.operations.checks import CHECKS
        from django_idempotency.contrib.operations.schedule import HINT
        from django_idempotency.extending import register

        register(
            self.label,
            page="deferred",
            checks=CHECKS,
            companions=[operators.DEFERRED],
            passes=[HINT],
            replays=[running.as_ended],
            gauges=[operators.FAMILY],
        )
        if apps.is_installed("django.contrib.admin"):
            register(self.label, alarms=[operators.alarms])
