from __future__ import annotations

from django.apps import AppConfig

from django_idempotency.maintenance.passes import Pass

PASSES = tuple(
    Pass(
        name=f"{action}_partitions",
        path=f"django_idempotency.contrib.partitions.upkeep.{action}",
        every=3600.0,
        bounded=False,
    )
    for action in ("ensure", "drop")
)


class PartitionsConfig(AppConfig):
    name = "django_idempotency.contrib.partitions"
    label = "django_idempotency_partitions"

    def ready(self) -> None:
        from django_idempotency import checks
        from django_idempotency.contrib.partitions.catalog import meaning
        from django_idempotency.contrib.partitions.checks import CHECKS
        from django_idempotency.contrib.partitions.upkeep import FAMILY, delay
        from django_idempotency.instrumentation import metrics
        from django_idempotency.maintenance import passes, stats
        from django_idempotency.stores import errors

        checks.register(CHECKS, label=self.label, page="partitions")
        metrics.register(FAMILY)
        passes.register(*PASSES)
        stats.allow_delay(delay)
        errors.register(meaning)
