from __future__ import annotations

from django.apps import AppConfig
from django.utils.translation import gettext_lazy as _


class OutboxConfig(AppConfig):
    name = "django_idempotency.outbox"
    label = "django_idempotency_outbox"
    verbose_name = _("Outbox")
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        from django_idempotency.outbox import checks  # noqa: F401 (registers)
