from __future__ import annotations

from django.apps import AppConfig
from django.db.models.signals import post_migrate
from django.utils.translation import gettext_lazy as _


class DjangoIdempotencyConfig(AppConfig):
    name = "django_idempotency"
    verbose_name = _("idempotency")
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        from django_idempotency import checks, deploy_checks, events, instrumentation, tallies  # noqa: F401 (checks)
        from django_idempotency.stores.claim_function import create_after_migrate

        events.listen()
        tallies.listen()
        post_migrate.connect(create_after_migrate, sender=self)
        instrumentation.install()
