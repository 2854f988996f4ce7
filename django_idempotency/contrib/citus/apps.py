from __future__ import annotations

from django.apps import AppConfig


class CitusConfig(AppConfig):
    name = "django_idempotency.contrib.citus"
    label = "django_idempotency_citus"

    def ready(self) -> None:
        from django_idempotency.contrib.citus import store
        from django_idempotency.contrib.citus.checks import CHECKS
        from django_idempotency.extending import register

        register(self.label, page="scaling", checks=CHECKS, shardings=[store])
