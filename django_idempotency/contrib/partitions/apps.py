from __future__ import annotations

from django.apps import AppConfig

from django_idempotency.extending import Pass, register

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
        from django_idempotency.contrib.partitions.catalog import meaning
        from django_idempotency.contrib.partitions.checks import CHECKS
        from django_idempotency.contrib.partitions.upkeep import FAMILY, delay

        register(
            self.label,
            page="partitions",
            checks=CHECKS,
            gauges=[FAMILY],
            passes=PASSES,
            delays=[delay],
            meanings=[meaning],
        )
