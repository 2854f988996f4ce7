from __future__ import annotations

from django.apps import AppConfig
from django.utils.translation import gettext_lazy as _


class AuditConfig(AppConfig):
    name = "django_idempotency.contrib.audit"
    label = "django_idempotency_audit"
    verbose_name = _("Idempotency audit")
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        from django_idempotency.contrib.audit.models import Entry
        from django_idempotency.extending import register

        register(self.label, histories=[Entry.objects])
