from __future__ import annotations

from django.apps import AppConfig


class PartitionsConfig(AppConfig):
    name = "django_idempotency.contrib.partitions"
    label = "django_idempotency_partitions"

    def ready(self) -> None:
        from django_idempotency import checks
        from django_idempotency.contrib.partitions.checks import CHECKS
        from django_idempotency.contrib.partitions.metrics import FAMILY
        from django_idempotency.contrib.partitions.passes import PASSES
        from django_idempotency.instrumentation import metrics
        from django_idempotency.maintenance import passes

        checks.register(CHECKS, label=self.label, page="partitions")
        metrics.register(FAMILY)
        passes.register(*PASSES)
