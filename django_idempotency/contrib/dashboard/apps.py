from __future__ import annotations

from django.apps import AppConfig
from django.utils.translation import gettext_lazy as _


class DashboardConfig(AppConfig):
    name = "django_idempotency.contrib.dashboard"
    label = "django_idempotency_dashboard"
    verbose_name = _("Idempotency dashboard")

    def ready(self) -> None:
        from django_idempotency import checks
        from django_idempotency.admin.pages import Page, register
        from django_idempotency.contrib.dashboard import counters, observations
        from django_idempotency.contrib.dashboard.checks import CHECKS
        from django_idempotency.contrib.dashboard.formatting import recently
        from django_idempotency.contrib.dashboard.pages import dashboard
        from django_idempotency.maintenance import cleaner, formatting
        from django_idempotency.reporting import events

        checks.register(CHECKS, label=self.label, page="observe")
        cleaner.register(counters.prune)
        cleaner.register(observations.prune)
        formatting.register(recently)
        register(
            Page(
                "dashboard/", dashboard, "django_idempotency_dashboard", _("Dashboard")
            )
        )
        events.listen(counters.count_event)
