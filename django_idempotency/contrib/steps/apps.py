from __future__ import annotations

from django.apps import AppConfig, apps
from django.utils.translation import gettext_lazy as _


class StepsConfig(AppConfig):
    name = "django_idempotency.contrib.steps"
    label = "django_idempotency_steps"
    verbose_name = _("Steps")

    def ready(self) -> None:
        from django_idempotency.contrib.steps import operators, running, signals
        from django_idempotency.contrib.steps.checks import CHECKS
        from django_idempotency.contrib.steps.decisions import RenameStep, ResolveStep
        from django_idempotency.extending import register

        register(
            self.label,
            page="steps",
            checks=CHECKS,
            prunes=[operators.prune],
            companions=[operators.STEPS],
            decisions=[ResolveStep, RenameStep],
            events=[signals.FAMILY],
            verdicts=[running.final_verdict],
            gauges=[operators.FAMILY],
        )
        if apps.is_installed("django.contrib.admin"):
            register(self.label, alarms=[operators.alarms])
