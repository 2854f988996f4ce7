from __future__ import annotations

from django.apps import AppConfig, apps
from django.db.models.signals import post_migrate
from django.utils.translation import gettext_lazy as _


class DjangoIdempotencyConfig(AppConfig):
    name = "django_idempotency"
    verbose_name = _("Idempotency")
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        from django_idempotency import checks, events, instrumentation  # noqa: F401 (checks)
        from django_idempotency.middleware import describe_covered_operations
        from django_idempotency.stats import counters, observations
        from django_idempotency.stores.claim_function import create_after_migrate

        events.log_events()
        counters.listen()
        observations.listen()
        post_migrate.connect(create_after_migrate, sender=self)
        instrumentation.install()
        if apps.is_installed("ninja"):
            describe_covered_operations()
        if apps.is_installed("drf_spectacular"):
            from django_idempotency.contrib import openapi  # noqa: F401 (registers itself)
