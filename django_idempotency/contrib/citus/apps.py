from __future__ import annotations

from django.apps import AppConfig


class CitusConfig(AppConfig):
    name = "django_idempotency.contrib.citus"
    label = "django_idempotency_citus"

    def ready(self) -> None:
        from django_idempotency import checks
        from django_idempotency.contrib.citus import store
        from django_idempotency.contrib.citus.checks import CHECKS
        from django_idempotency.maintenance import records

        checks.register(CHECKS, label=self.label, page="scaling")
        records.register_sharding(store)
