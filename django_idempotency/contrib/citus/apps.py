from __future__ import annotations

from django.apps import AppConfig


class CitusConfig(AppConfig):
    name = "django_idempotency.contrib.citus"
    label = "django_idempotency_citus"

    def ready(self) -> None:
        from django_idempotency.contrib.citus import distribution
        from django_idempotency.stores import sharding

        sharding.register(distribution)
